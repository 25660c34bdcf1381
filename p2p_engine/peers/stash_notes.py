"""Stash notes: what the directories of two instances tell each other of stashed KV.

An instance that decodes notes what it has stashed; one that prefills asks for it. The notes are
hints: a stash may have ended on a rank that has not reported it yet, and the holder compares the
binding of what is pulled. Any thread may call; nothing blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from p2p_engine.bounded import BoundedMap
from p2p_engine.wire.messages import TransferKey

RECALL_SECONDS = 0.5
MAX_NOTES = 4096
Marks: TypeAlias = list[tuple[int, bytes]]  # lengths in tokens, and their bindings


@dataclass(eq=False)
class Recalling:
    """A question to another directory. `marks` is its answer: empty if it has stashed nothing."""

    deadline: float
    marks: Marks | None = None


class StashNotes:
    """What is stashed here, and what other instances are asked about; the oldest are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = (
            threading.Lock()
        )  # guards both maps: vLLM's thread and the directory's use them
        self._stashed: BoundedMap[TransferKey, tuple[float, Marks]] = BoundedMap(MAX_NOTES)
        self._asked: BoundedMap[tuple[str, TransferKey], Recalling] = BoundedMap(MAX_NOTES)

    def note(self, key: TransferKey, marks: Marks, seconds: float) -> None:
        """Note a stash, for as long as its lease."""
        with self._lock:
            self._stashed.put(key, (self._clock() + seconds, marks))

    def drop(self, key: TransferKey) -> None:
        """Forget a stash that has ended; idempotent."""
        with self._lock:
            self._stashed.pop(key)

    def __len__(self) -> int:
        """Return how many stashes are noted."""
        with self._lock:
            return len(self._stashed)

    def find(self, key: TransferKey) -> Marks:
        """Return where a stash can be cut; nothing if there is none."""
        with self._lock:
            until, marks = self._stashed.get(key) or (0.0, [])
        return marks if self._clock() < until else []

    def clear(self) -> None:
        """Forget what is stashed here."""
        with self._lock:
            self._stashed = BoundedMap(MAX_NOTES)

    def ask(self, address: str, key: TransferKey) -> Recalling:
        """Begin a question to the directory at an address, or share one that has no answer yet: of
        several, only one is answered."""
        now = self._clock()
        with self._lock:
            asking = self._asked.get((address, key))
            if asking is None or now >= asking.deadline:
                asking = Recalling(now + RECALL_SECONDS)
                self._asked.put((address, key), asking)
        return asking

    def answer(self, address: str, key: TransferKey, marks: Marks) -> None:
        """Take the answer of a directory; of one that was not asked, it is ignored."""
        with self._lock:
            asking = self._asked.pop((address, key))
        if asking is not None:
            asking.marks = marks
