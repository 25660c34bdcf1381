"""Collections with a bounded cost: a map that forgets its oldest entries, a budget for what peers
make us remember, an index for look-ups without a scan, and rate-limited warnings for events that
strangers can cause."""

from __future__ import annotations

import hashlib
import logging
import resource
import secrets
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
HashableV = TypeVar("HashableV", bound=Hashable)

MAX_ENTRIES = 1 << 16
OFFERED_BYTES = 80 << 20  # the budget for offered chunks
BUDGET_BYTES = 48 << 20  # the budget for all else
NOTES_SHARE = 2  # notes take one part in so many
NOTE_BYTES = 448  # of a note with its name and its place in the budget
NUMBER_BYTES = 32
FORGET_AT_ONCE = 256  # notes
GROUPS = 1024  # of peers, whose notes are counted together
WARNING_SECONDS = 10.0


class BoundedMap(Generic[K, V]):
    """A map that forgets its oldest entries beyond `limit`."""

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        """Store a value; the key becomes the newest."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        """Remove a key; returns its value, or None."""
        return self._entries.pop(key, None)

    def __contains__(self, key: K) -> bool:
        """Whether a key is in the map."""
        return key in self._entries

    def __len__(self) -> int:
        """Return how many keys are in the map."""
        return len(self._entries)


def heap_bytes(value: object) -> int:
    """Return how many bytes a part of a decoded message takes in memory at the most. What Python
    shares, such as small numbers, counts wherever it occurs. A list that begins with a number has
    nothing but numbers."""
    if isinstance(value, str):  # an encoded copy may be kept with it
        return 80 + len(value) * (1 if value.isascii() else 8)
    if isinstance(value, msgspec.Struct):
        return sys.getsizeof(value) + sum(
            heap_bytes(getattr(value, name)) for name in value.__struct_fields__
        )
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int):
            return sys.getsizeof(value) + len(value) * NUMBER_BYTES
        return sys.getsizeof(value) + sum(map(heap_bytes, value))
    return sys.getsizeof(value)


@dataclass(eq=False, slots=True)
class Note(Generic[V]):
    """An entry of Notes: `home` has it under `name`."""

    value: V
    home: dict[bytes, Note[V]]
    name: bytes
    group: int
    nbytes: int


class Budget:
    """The bytes that peers make an engine remember: what is open for them, and notes.

    What is open is refused if there is no room. A peer may have as much as it leaves free: alone
    half of the budget, and beside n others that want more than they get 1 / (n + 2).

    A note says what has ended or was said before. To forget one costs a wait or a computation. So
    notes take what is left, up to NOTES_SHARE, and give way: the peer with most loses its oldest
    first. For this, peers are counted in GROUPS, by a hash that no peer knows. The engine's lock
    guards all of it.
    """

    def __init__(self, nbytes: int = BUDGET_BYTES) -> None:
        self._nbytes = nbytes
        self._open: Counter[int] = Counter()
        self._open_bytes = 0
        self._notes: dict[int, OrderedDict[Note[Any], None]] = {}  # by group, oldest first
        self._note_bytes: Counter[int] = Counter()
        self._all_note_bytes = 0
        self._secret = secrets.randbits(62)
        self._warnings = RateLimitedWarnings(logger)
        self.num_refused = 0

    @property
    def used_bytes(self) -> int:
        """Return how many bytes are remembered."""
        return self._open_bytes + self._all_note_bytes

    def take(self, peer: int, nbytes: int, *, is_owed: bool = False) -> bool:
        """Count what is opened for a peer; False if there is no room for it. What `is_owed` is
        counted, too, but never refused."""
        free = self._nbytes - self._open_bytes - nbytes
        if not is_owed and self._open[peer] + nbytes > free:
            self.num_refused += 1
            text = "a peer asks for more than may be remembered: peer=%x bytes=%d"
            self._warnings.warn(text, peer, nbytes)
            return False
        self._change(peer, nbytes)
        self._make_room()
        return True

    def give_back(self, peer: int, nbytes: int) -> None:
        """Note that what was opened for a peer has ended."""
        self._change(peer, -nbytes)

    def add_note(self, note: Note[Any], peer: int) -> None:
        """Count a note that a peer has caused (0: this engine); it may be forgotten at once."""
        note.group = hash((self._secret, peer)) % GROUPS
        self._notes.setdefault(note.group, OrderedDict())[note] = None
        self._count_note(note, note.nbytes)
        self._make_room()

    def forget(self, note: Note[Any]) -> None:
        """Remove a note from its map and from the budget."""
        del note.home[note.name]
        notes = self._notes[note.group]
        del notes[note]
        self._count_note(note, -note.nbytes)
        if not notes:
            del self._notes[note.group], self._note_bytes[note.group]

    def _change(self, peer: int, nbytes: int) -> None:
        self._open_bytes += nbytes
        self._open[peer] += nbytes
        if not self._open[peer]:
            del self._open[peer]

    def _count_note(self, note: Note[Any], nbytes: int) -> None:
        self._all_note_bytes += nbytes
        self._note_bytes[note.group] += nbytes

    def _make_room(self) -> None:
        """Forget the oldest notes of the group that has most; several at a time, because to find
        the group takes a look at each."""
        most = max(0, min(self._nbytes // NOTES_SHARE, self._nbytes - self._open_bytes))
        while self._all_note_bytes > most:
            notes = self._notes[max(self._note_bytes, key=self._note_bytes.__getitem__)]
            for _ in range(min(len(notes) // 8 + 1, FORGET_AT_ONCE)):
                self.forget(next(iter(notes)))


class Notes(Generic[K, V]):
    """Notes by their names, as far as the budget allows. Of a name, only a digest is kept: peers
    choose names of up to 4 KiB."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._notes: dict[bytes, Note[V]] = {}

    def put(self, key: K, value: V, peer: int = 0, nbytes: int = 0) -> None:
        """Note a value that a peer has caused (0: this engine), and that takes `nbytes` beside
        NOTE_BYTES; the note becomes the newest of that peer."""
        name = digest(key)
        if name in self._notes:
            self._budget.forget(self._notes[name])
        note = self._notes[name] = Note(value, self._notes, name, 0, NOTE_BYTES + nbytes)
        self._budget.add_note(note, peer)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        note = self._notes.get(digest(key))
        return note.value if note is not None else None

    def pop(self, key: K) -> V | None:
        """Remove a key; returns its value, or None."""
        note = self._notes.get(digest(key))
        if note is None:
            return None
        self._budget.forget(note)
        return note.value

    def __contains__(self, key: K) -> bool:
        """Whether a key is in the map."""
        return digest(key) in self._notes

    def __len__(self) -> int:
        """Return how many keys are in the map."""
        return len(self._notes)


def most_descriptors() -> int:
    """Return how many descriptors this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def most_peers(limit: int) -> int:
    """Return how many peers may be here at once: at most `limit`, and one for each four descriptors
    that this process may have, because a peer takes three."""
    return min(limit, most_descriptors() // 4)


def digest(key: object) -> bytes:
    """Return a digest that names what a message can carry, or what our caller thinks one could."""
    try:
        text = msgspec.msgpack.encode(key)
    except UnicodeEncodeError:  # half a character: no peer can say it
        text = repr(key).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def put_newest(entries: dict[K, V], key: K, value: V, limit: int) -> None:
    """Store a value as the newest of a map; beyond the limit, forget the oldest. For the many small
    maps in another one, where a BoundedMap each would take half as much memory again."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > limit:
        del entries[next(iter(entries))]


class Index(Generic[K, HashableV]):
    """A map from names to ordered sets of values. Names without values take no memory."""

    def __init__(self) -> None:
        self._values: dict[K, dict[HashableV, None]] = {}

    def add(self, name: K, value: HashableV) -> None:
        """Add a value to a name; idempotent."""
        self._values.setdefault(name, {})[value] = None

    def discard(self, name: K, value: HashableV) -> None:
        """Remove a value from a name; idempotent."""
        values = self._values.get(name)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._values[name]

    def get(self, name: K) -> list[HashableV]:
        """Return a copy of a name's values."""
        return list(self._values.get(name, ()))

    def pop(self, name: K) -> list[HashableV]:
        """Remove all values of a name, and return them."""
        return list(self._values.pop(name, ()))

    def count(self, name: K) -> int:
        """Return how many values a name has."""
        return len(self._values.get(name, ()))

    def names(self) -> list[K]:
        """Return a copy of the names that have values."""
        return list(self._values)


class RateLimitedWarnings:
    """Logs at most one warning in ten seconds; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until = 0.0
        self._num_left_out = 0

    def warn(self, text: str, *values: object) -> bool:
        """Log a warning, or count it; tell whether it was logged."""
        now = self._clock()
        if now < self._silent_until:
            self._num_left_out += 1
            return False
        self._silent_until = now + WARNING_SECONDS
        more = f" (and {self._num_left_out} such lines before)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.warning("%s%s", text % values, more)
        return True
