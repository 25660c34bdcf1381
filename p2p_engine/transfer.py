"""Transfer: the local handle of one send or receive; it ends exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from p2p_engine.errors import P2pError, TransferError, TransferTimeout
from p2p_engine.wire.messages import TransferKey

# A logger of its own: it can be told apart from the rest, which says little at debug level.
timeline = logging.getLogger("p2p_engine.timeline")


def note_stage(key: TransferKey, stage: str, chunk: int = 0) -> None:
    """Log at debug level that a transfer, or one of its chunks, has reached a stage. The time is
    that of the host's clock, which all of its processes share. `p2p-engine trace` reads it."""
    if timeline.isEnabledFor(logging.DEBUG):
        timeline.debug("at=%.6f key=%s chunk=%d stage=%s", time.time(), key, chunk, stage)


def lane_of(key: TransferKey) -> int:
    """Return the mover's lane for a key. Chunks of one lane move one after the other, so that the
    receiver scatters the first while the next ones are on their way. Different keys take turns."""
    return hash(key) & (1 << 63) - 1 | 1


class Transfer:
    """A send, a hold or a receive; made by the engine, and safe to use from any thread.

    `released` turns true when the engine does not touch the caller's memory any more. `done` turns
    true when the outcome is known; `error` is then None for success, or the error. `done` implies
    `released`.
    """

    def __init__(
        self,
        key: TransferKey,
        nbytes: int,
        changed: threading.Condition,
        cancel: Callable[[Transfer, str], None],
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.error: P2pError | None = None
        self.released = False
        self.done = False
        self.denied = False  # the receiver had no room for a chunk, at least once
        self.group: TransferGroup | None = None
        self.on_end: Callable[[], None] | None = None  # engine only; called once, under its lock
        self._changed = changed
        self._cancel = cancel

    def __repr__(self) -> str:
        """Show the key and the state."""
        state = "done" if self.done else "released" if self.released else "open"
        return f"Transfer({self.key}, {self.nbytes} bytes, {state}, error={self.error!r})"

    def wait(self, timeout: float) -> None:
        """Block until done, for at most `timeout` seconds.

        Raises:
            TransferTimeout: it was not done in time; the transfer continues.
            P2pError: the error that it ended with.
        """
        if not self._wait_for(lambda: self.done, timeout):
            raise TransferTimeout(f"transfer {self.key} is still open after {timeout:g} s")
        if self.error is not None:
            raise self.error

    def wait_released(self, timeout: float) -> bool:
        """Block until released, for at most `timeout` seconds; returns False if it was not in
        time."""
        return self._wait_for(lambda: self.released, timeout)

    def wait_released_or_denied(self, timeout: float) -> bool:
        """Block until released, or denied once, for at most `timeout` seconds; returns False if
        neither."""
        return self._wait_for(lambda: self.released or self.denied, timeout)

    def cancel(self, reason: str = "") -> None:
        """Ask for the end; returns at once. `done` follows when no byte can be touched any more."""
        self._cancel(self, reason)

    def release(self) -> None:
        """Release the caller's memory; engine only, under its lock."""
        self.released = True
        self._tell()

    def deny(self) -> None:
        """Note that the receiver has no room now; engine only, under its lock."""
        if not self.denied:
            self.denied = True
            self._tell()

    def end(self, error: P2pError | None = None) -> None:
        """Set the outcome; engine only, under its lock. A second call does nothing."""
        if not self.done:
            self.error = error
            self.done = self.released = True
            self._tell()
            if self.on_end is not None:
                self.on_end()

    def _tell(self) -> None:
        self._changed.notify_all()
        if self.group is not None:
            self.group.refresh()

    def _wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(predicate, max(0.0, deadline - time.monotonic()))


class TransferGroup(Transfer):
    """One transfer to or from several ranks; released, or done, when all of its members are.

    `error` is that of the first member that failed, from that moment on.
    """

    members: list[Transfer] | None = None  # None: not known yet

    def join(self, members: list[Transfer]) -> None:
        """Set the members; engine only, under its lock."""
        self.members = members
        for member in members:
            member.group = self
        self.refresh()

    def refresh(self) -> None:
        """Note that a member has changed; engine only, under its lock."""
        members = self.members
        if members is None or self.done:
            return
        self.nbytes = sum(member.nbytes for member in members)
        failures = [member.error for member in members if member.error is not None]
        if failures and self.error is None:
            # The other ranks still wait for a chunk that one rank refused.
            text = f"{self.key}: {failures[0]}"
            self.error = failures[0] if len(members) == 1 else TransferError(text)
        self.denied = self.denied or any(member.denied for member in members)
        if all(member.done for member in members):
            self.end(self.error)
        elif not self.released and all(member.released for member in members):
            self.release()
