"""Replies: sends this engine's answers about chunks, and remembers the last answer to each so that
a repeated question gets the same one. The engine's lock guards everything here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from p2p_engine.bounded import BoundedMap
from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError
from p2p_engine.receive.expectations import Expectations
from p2p_engine.receive.ledger import Landing, LandingId
from p2p_engine.wire.messages import Cancel, Commit, ContentKey, Deny, Fail, Grant, Message, shorten

Reply: TypeAlias = Callable[[int, type[Message], tuple[Any, ...]], None]


@dataclass(frozen=True)
class Outcome:
    """The last answer about a chunk, repeated whenever its sender asks."""

    attempt: int
    kind: type[Message]
    fields: tuple[Any, ...]


@dataclass(frozen=True)
class Tombstone:
    """A content that ended here without success; `refused` if an offer was refused since. If its
    sender abandoned it (`said_by`, an epoch), it applies to that sender only."""

    reason: str
    until: float
    refused: bool = False
    said_by: int = 0

    def concerns(self, epoch: int) -> bool:
        """Whether it applies to an offer from this epoch."""
        return self.said_by in (0, epoch)


class Replies:
    """The answers to senders, the last answers, and the tombstones. Both memories are bounded."""

    def __init__(
        self,
        config: EngineConfig,
        reply: Reply,
        clock: Callable[[], float],
        expectations: Expectations,
    ) -> None:
        """`reply(epoch, kind, fields)` sends a message to a sender. A tombstone lasts for one
        lease, or for as long as its content is kept."""
        self._config = config
        self._reply = reply
        self._clock = clock
        self._expectations = expectations
        self._tombstones: BoundedMap[ContentKey, Tombstone] = BoundedMap()
        self._outcomes: BoundedMap[LandingId, Outcome] = BoundedMap()

    def grant(self, landing: Landing, word_offset: int = 0) -> None:
        """Say GRANT: the region is reserved, and the sender publishes its end at `word_offset`. For
        a chunk without bytes, no block is granted, and the sender writes nothing."""
        offset = landing.space.offset if landing.space is not None else 0
        first = landing.manifest.first_block
        num = landing.manifest.num_blocks if landing.nbytes else 0
        fields = (landing.id[1], landing.attempt, first, num, offset, landing.trailer, word_offset)
        self._reply(landing.id[0], Grant, fields)

    def deny(self, landing_id: LandingId, attempt: int, reason: str, retry_after: float) -> None:
        """Say DENY: there is no memory now; the sender is to offer again after `retry_after`
        seconds."""
        epoch, seq = landing_id
        self._reply(epoch, Deny, (seq, attempt, shorten(reason), retry_after))

    def cancel(self, landing: Landing) -> None:
        """Say CANCEL: the sender is to stop. The caller repeats it after retry_seconds."""
        landing.resend_at = self._clock() + self._config.retry_seconds
        self._reply(landing.id[0], Cancel, (landing.id[1], landing.attempt))

    def fail(self, landing_id: LandingId, attempt: int, error: P2pError) -> None:
        """Say FAIL: this attempt has ended with an error."""
        self.conclude(landing_id, attempt, error)
        self.repeat(landing_id)

    def conclude(self, landing_id: LandingId, attempt: int, error: P2pError | None) -> None:
        """Remember the last answer about a chunk (None: it has landed), to be sent when asked
        for."""
        kind, fields = (Commit, ()) if error is None else (Fail, _as_fields(error))
        self._outcomes.put(landing_id, Outcome(attempt, kind, (landing_id[1], attempt, *fields)))

    def repeat(self, landing_id: LandingId, *, attempt: int = 0) -> bool:
        """Repeat the last answer about a chunk; False if there is none for this attempt or a later
        one."""
        outcome = self._outcomes.get(landing_id)
        if outcome is None or outcome.attempt < attempt:
            return False
        self._reply(landing_id[0], outcome.kind, outcome.fields)
        return True

    def leave_tombstone(
        self, content: ContentKey, reason: str, *, refused: bool = False, said_by: int = 0
    ) -> None:
        """Refuse offers of a content for one lease."""
        until = self._clock() + self._config.lease_seconds
        self._tombstones.put(content, Tombstone(shorten(reason), until, refused, said_by))

    def revive(self, content: ContentKey) -> None:
        """Accept offers of a content again, unless one was refused within the last lease."""
        for name in (content, (content[0], b"")):
            tombstone = self._tombstones.get(name)
            if tombstone is None:
                continue
            if tombstone.until <= self._clock() or (name == content and not tombstone.refused):
                self._tombstones.pop(name)

    def exhume(self, content: ContentKey) -> Tombstone | None:
        """Remove and return the tombstone of a content, or of its key, if it is still in force."""
        for name in (content, (content[0], b"")):
            tombstone = self._tombstones.pop(name)
            if tombstone is not None and (
                tombstone.until > self._clock() or self._expectations.is_kept(content)
            ):
                return tombstone
        return None


def _as_fields(error: P2pError) -> tuple[str, str]:
    return type(error).__name__, shorten(str(error))
