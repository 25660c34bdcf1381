"""Replies: sends this engine's answers about chunks, and remembers the last answer to each so that
a repeated question gets the same one. The engine's lock guards everything here."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from p2p_engine.bounded import Budget, Notes, heap_bytes, put_newest
from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError
from p2p_engine.receive.expectations import Expectations
from p2p_engine.receive.ledger import Landing, LandingId
from p2p_engine.wire.bindings import prompt_in
from p2p_engine.wire.messages import (
    Cancel,
    Commit,
    ContentKey,
    Deny,
    Fail,
    Grant,
    Message,
    TransferKey,
    shorten,
)

MAX_BINDINGS = 16  # of one key; a peer may name any number of them
BINDING_BYTES = 256  # of one of them
OUTCOME_BYTES = 300  # of an outcome or a tombstone, beside a note
Generations: TypeAlias = dict[bytes, int]
Reply: TypeAlias = Callable[[int, type[Message], tuple[Any, ...]], None]


@dataclass(frozen=True)
class Outcome:
    """The last answer about a chunk, repeated whenever its sender asks."""

    attempt: int
    kind: type[Message]
    fields: tuple[Any, ...]


class Cause(enum.Enum):
    """Why a content ended here without success."""

    WITHDRAWN = enum.auto()  # requests here wanted it no more
    ABANDONED = enum.auto()  # its sender says that it will not come
    LOST = enum.auto()  # its sender was restarted: that may offer it, but need not be asked
    FAILED = enum.auto()  # a chunk of its sender did not fit, arrived with wrong bytes, or expired


@dataclass(frozen=True)
class Tombstone:
    """A content that ended here without success; `is_refused` if an offer was refused since.
    `epoch` is that of its sender; 0 stands for any."""

    reason: str
    until: float
    cause: Cause
    epoch: int = 0
    is_refused: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether its sender will not offer it any more, as far as is known."""
        return self.cause is not Cause.WITHDRAWN or self.is_refused

    def refuses_offer(self, epoch: int) -> bool:
        """Whether it refuses the offers of an engine, unless they belong to a later attempt."""
        if self.cause is Cause.FAILED:
            return self.epoch in (0, epoch)
        return self.cause is Cause.WITHDRAWN

    def refuses_receive(self, *, is_named: bool) -> bool:
        """Whether a receive must end at once. If its sender is named, that engine is asked, or is
        the only one whose failure counts."""
        if is_named:
            return self.cause is Cause.LOST or (self.cause is Cause.FAILED and not self.epoch)
        return self.is_sure


class Replies:
    """The answers to senders, the last answers, and the tombstones, as far as the budget allows. If
    one is forgotten, a transfer ends without success, or waits for its deadline."""

    def __init__(
        self,
        config: EngineConfig,
        reply: Reply,
        clock: Callable[[], float],
        expectations: Expectations,
        budget: Budget,
    ) -> None:
        """`reply(epoch, kind, fields)` sends a message to a sender. A tombstone lasts for one
        lease, or for as long as its content is kept."""
        self._config = config
        self._reply = reply
        self._clock = clock
        self._expectations = expectations
        self._tombstones: Notes[ContentKey, Tombstone] = Notes(budget)
        self._outcomes: Notes[LandingId, Outcome] = Notes(budget)
        # The last attempt to send a key that each sender spoke of, by binding (None: of any).
        self._generations: Notes[tuple[TransferKey, int], Generations] = Notes(budget)

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
        epoch, seq = landing_id
        outcome = Outcome(attempt, kind, (seq, attempt, *fields))
        self._outcomes.put(landing_id, outcome, epoch, OUTCOME_BYTES + heap_bytes(fields))

    def repeat(self, landing_id: LandingId, *, attempt: int = 0) -> bool:
        """Repeat the last answer about a chunk; False if there is none for this attempt or a later
        one."""
        outcome = self._outcomes.get(landing_id)
        if outcome is None or outcome.attempt < attempt:
            return False
        self._reply(landing_id[0], outcome.kind, outcome.fields)
        return True

    def leave_tombstone(
        self,
        content: ContentKey,
        reason: str,
        cause: Cause,
        epoch: int = 0,
        *,
        is_refused: bool = False,
    ) -> None:
        """Remember for one lease, or for as long as it is kept, why a content ended."""
        until = self._clock() + self._config.lease_seconds
        tombstone = Tombstone(shorten(reason), until, cause, epoch, is_refused)
        nbytes = OUTCOME_BYTES + heap_bytes(tombstone.reason)
        self._tombstones.put(content, tombstone, epoch, nbytes)

    def fail_prompt(self, content: ContentKey, reason: str, epoch: int) -> None:
        """Remember that what a sender had of a content's prompt is of no use here: who asks for
        that prompt, under whatever name the weights have then, need not wait for it, unless it is
        offered first."""
        self.leave_tombstone(_of_prompt(content), reason, Cause.FAILED, epoch)

    def refusal_of_offer(self, content: ContentKey, epoch: int, generation: int) -> str | None:
        """Return why an offer must be refused, or None; then it comes after all, or from another
        engine, and what ended before is forgotten."""
        is_later = self.note_generation(content, epoch, generation) > 0
        for name, tombstone in self._tombstones_of(content):
            if not is_later and tombstone.refuses_offer(epoch):
                self.leave_tombstone(
                    name, tombstone.reason, tombstone.cause, tombstone.epoch, is_refused=True
                )
                return tombstone.reason
            self._tombstones.pop(name)
        self._tombstones.pop(_of_prompt(content))
        return None

    def exhume(self, content: ContentKey) -> list[Tombstone]:
        """Remove and return the tombstones in force of a content, its prompt and its key."""
        found = self._tombstones_of(content, _of_prompt(content))
        for name, _ in found:
            self._tombstones.pop(name)
        return [tombstone for _, tombstone in found]

    def note_generation(self, content: ContentKey, epoch: int, generation: int) -> int:
        """Note which attempt to send a content a sender speaks of.

        Returns less than 0 if it has spoken of a later one, more than 0 if only of earlier ones,
        and 0 if of this one or none, or if it does not say.
        """
        key, binding = content
        heard = self._generations.get((key, epoch)) or {}
        known = heard.get(binding, 0)
        if generation > known:
            put_newest(heard, binding, generation, MAX_BINDINGS)
            self._generations.put((key, epoch), heard, epoch, BINDING_BYTES * len(heard))
        return generation - known if generation and known else 0

    def revive(self, content: ContentKey) -> None:
        """Accept offers of a content again, unless one was refused within the last lease."""
        for name in (content, (content[0], b"")):
            tombstone = self._tombstones.get(name)
            if tombstone is None:
                continue
            if tombstone.until <= self._clock() or (name == content and not tombstone.is_sure):
                self._tombstones.pop(name)

    def _tombstones_of(
        self, content: ContentKey, *others: ContentKey
    ) -> list[tuple[ContentKey, Tombstone]]:
        """Return the tombstones in force of a content, of `others` and of its key; forget those
        that are not."""
        found = []
        for name in dict.fromkeys((content, *others, (content[0], b""))):
            tombstone = self._tombstones.get(name)
            if tombstone is None:
                continue
            if tombstone.until > self._clock() or self._expectations.is_kept(content):
                found.append((name, tombstone))
            else:
                self._tombstones.pop(name)
        return found


def _of_prompt(content: ContentKey) -> ContentKey:
    """Name a content by its prompt alone, whatever its weights are called."""
    return content[0], prompt_in(content[1])


def _as_fields(error: P2pError) -> tuple[str, str]:
    return type(error).__name__, shorten(str(error))
