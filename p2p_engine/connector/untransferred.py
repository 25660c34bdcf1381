"""Untransferred: counts, by reason, the requests of a router whose KV does not move. If none moves
though it should, a warning says why."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

# Nothing has moved for so long, and requests came: a warning says so. The requests of one reason
# have no more than one line of their own in that time.
QUIET_SECONDS = 60.0
# The log has a reason again after so long. Where transfers are rare, KV often has not moved lately.
AGAIN_SECONDS = 3600.0
_MOVED = ("p2p_sent_bytes", "p2p_landed_bytes")


class Reason(enum.Enum):
    """Why a request's KV does not move. The value is the metric's label."""

    NO_ID = "no_id"
    UNUSABLE_ID = "unusable_id"
    NO_ADDRESS = "no_address"
    INVALID_PARAMS = "invalid_params"
    OTHER_PROMPT = "other_prompt"
    UNKNOWN_WEIGHTS = "unknown_weights"
    UNSUPPORTED = "unsupported"
    ON_PURPOSE = "on_purpose"


_MEANINGS = {
    Reason.NO_ID: "with neither kv_transfer_params nor an instance's address in the request id",
    Reason.UNUSABLE_ID: "whose id looks like a proxy's and cannot be read",
    Reason.NO_ADDRESS: "that do not say where the other instance is",
    Reason.INVALID_PARAMS: "with kv_transfer_params that make no sense",
    Reason.OTHER_PROMPT: "whose prompt is not the one that prefill computed under the name",
    Reason.UNKNOWN_WEIGHTS: "since a reset behind which nobody has named the weights",
}  # the others are nobody's mistake: they are counted, and no warning names them


class Untransferred:
    """The requests since KV has last moved, and those that the metric has not counted yet."""

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`role` is vLLM's `kv_role`."""
        self._has_one_role = role != "kv_both"
        self._clock = clock
        self._silent_until = dict.fromkeys(Reason, 0.0)
        self._since = 0.0  # the first of what follows
        self._recent: Counter[Reason] = Counter()
        self._failed: Counter[str] = Counter()  # by what has failed
        self._uncounted: Counter[Reason] = Counter()
        self._has_warned = False
        self._logged_until: dict[Reason | str, float] = {}
        # Called with each warning, whether it is logged or not, and with "" when KV moves again.
        self.tell: Callable[[str], None] = lambda warning: None

    def refuse(self, request_id: str, reason: Reason, why: str) -> None:
        """Count a request that cannot take part; the log names the first of a kind."""
        now = self._clock()
        if now >= self._silent_until[reason]:
            self._silent_until[reason] = now + QUIET_SECONDS
            logger.warning("computed locally: request=%.256r reason=%s", request_id, why)
        self._note(reason)

    def leave_alone(self, params: Mapping[str, object] | None) -> None:
        """Count a request that asks for no transfer. Without parameters, it can be anybody's,
        unless this instance only ever takes part in transfers."""
        if params:
            self._note(Reason.ON_PURPOSE)
        elif self._has_one_role:
            self._note(Reason.NO_ID)

    def hear(self, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Take what the workers have counted in a step: bytes that moved, and what has failed."""
        if any(value for metric in _MOVED for value in counters.get(metric, {}).values()):
            self._recent.clear()
            self._failed.clear()
            if self._has_warned:
                self.tell("")
            self._has_warned = False
            return
        failed = {
            f"transfers {outcome}": int(number)
            for outcome, number in counters.get("p2p_transfers", {}).items()
            if not outcome.endswith(" ok")
        }
        if expired := counters.get("p2p_expired_leases"):
            failed["whose KV nobody asked for in time"] = int(sum(expired.values()))
        if failed:
            self._begin()
            self._failed.update(failed)
            self._warn()

    def take_counts(self) -> dict[str, int]:
        """Return the requests since the last call, by reason."""
        counts = {reason.value: number for reason, number in self._uncounted.items()}
        self._uncounted.clear()
        return counts

    def _note(self, reason: Reason) -> None:
        self._uncounted[reason] += 1
        if reason in _MEANINGS:
            self._begin()
            self._recent[reason] += 1
            self._warn()

    def _begin(self) -> None:
        if not self._recent and not self._failed:
            self._since = self._clock()

    def _warn(self) -> None:
        now = self._clock()
        seconds = now - self._since
        reasons: list[Reason | str] = [*self._recent, *self._failed]
        is_news = any(now >= self._logged_until.get(reason, 0.0) for reason in reasons)
        if seconds < QUIET_SECONDS or (self._has_warned and not is_news):
            return
        self._has_warned = True
        why = [f"{number} {_MEANINGS[reason]}" for reason, number in self._recent.items()]
        why += [f"{number} {what}" for what, number in self._failed.items()]
        warning = f"no KV has moved for {seconds:.0f} s; requests: {', '.join(why)}"
        if is_news:
            self._logged_until |= dict.fromkeys(reasons, now + AGAIN_SECONDS)
            logger.warning("%s", warning)
        self.tell(warning)
