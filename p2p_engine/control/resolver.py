"""Resolver: looks host names up, in threads of their own.

`getaddrinfo` blocks for 10 s and more if no name server answers, and cannot be interrupted. So each
look-up has a thread. A name has one look-up at a time, however many callers ask for it. A caller
gets the answer, an error when its deadline passes, or the last known answer if a new one does not
come soon.

A stranger may name many hosts that do not exist, and names that resolved may begin to hang. So
there are three kinds of names, each with a limit of its own on threads. A look-up that hangs moves
to the kind SLOW with its thread, so that it does not hold up its former kind.
"""

from __future__ import annotations

import collections
import enum
import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from p2p_engine.bounded import BoundedMap
from p2p_engine.control.affinity import restore_affinity
from p2p_engine.errors import PeerUnreachable

MAX_NAMES = 1024  # being looked up or waiting for a thread; also the number remembered
MAX_THREADS = 64  # in all: only if many names begin to hang at the same time
SLOW_SECONDS = 1.0  # until a caller gets the last known answer instead of a new one
FRESH_SECONDS = 2.0  # for which an answer is reused
FAILURE_SECONDS = 5.0  # for which an error is reused

Addresses: TypeAlias = tuple[str, ...]
Answer: TypeAlias = Addresses | PeerUnreachable
Told: TypeAlias = Callable[[Answer], None]


class LookupKind(enum.Enum):
    """How the earlier look-ups of a name went."""

    SWIFT = enum.auto()  # the last one was fast and found an address
    NEW = enum.auto()  # none has ever found an address
    SLOW = enum.auto()  # one has found an address, but the last one was slow


MAX_LOOKUPS = {LookupKind.SWIFT: 16, LookupKind.NEW: 12, LookupKind.SLOW: 4}  # threads at a time


@dataclass(eq=False)
class NameLookup:
    """A name that is looked up or waits for a thread, with its callers and their deadlines."""

    kind: LookupKind
    asked_at: float
    started_at: float | None = None  # when it got its thread
    told: list[tuple[float, Told]] = field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """A name that was resolved: its last addresses, and how its last look-up went."""

    addresses: Addresses
    kind: LookupKind


class Resolver:
    """The names that one event loop asks for. All but `_work` and `close` runs in that loop."""

    def __init__(
        self,
        timeout_seconds: float,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` runs a call in the loop, from any thread. A caller waits `timeout_seconds` at
        most."""
        self._timeout = timeout_seconds
        self._post = post
        self._clock = clock
        self._lookups: dict[str, NameLookup] = {}
        self._waiting: dict[LookupKind, collections.deque[str]] = {  # for a thread
            kind: collections.deque() for kind in LookupKind
        }
        self._num_threads: collections.Counter[LookupKind] = collections.Counter()
        self._known: BoundedMap[str, Known] = BoundedMap(MAX_NAMES)
        self._answers: BoundedMap[str, tuple[Answer, float]] = BoundedMap(MAX_NAMES)  # good until
        self._is_closed = False
        self._closing = threading.Lock()  # guards _is_closed: nothing is posted after it is set

    def resolve(self, host: str, told: Told) -> None:
        """Call `told` once with a host's addresses, the best first, or with the error. It is called
        at once if the answer is known, else later. Never blocks."""
        if is_numeric(host):
            told((host,))
            return
        now = self._clock()
        answer, until = self._answers.get(host) or ((), 0.0)
        if now < until:
            told(answer)
            return
        lookup, known = self._lookups.get(host), self._known.get(host)
        if lookup is None:
            if len(self._lookups) >= MAX_NAMES:
                told(PeerUnreachable(f"name {host!r}: {MAX_NAMES} others are being resolved"))
                return
            kind = known.kind if known is not None else LookupKind.NEW
            lookup = self._lookups[host] = NameLookup(kind, now)
            self._waiting[kind].append(host)
        if known is not None and now - lookup.asked_at >= SLOW_SECONDS:
            told(known.addresses)
            return
        lookup.told.append((now + self._timeout, told))
        self._start()

    def due_at(self) -> float:
        """Return when the next tick has something to do; 0 means that each tick has."""
        return 0.0 if self._lookups else math.inf

    def tick(self, now: float) -> None:
        """Answer the callers that have waited too long."""
        for host, lookup in list(self._lookups.items()):
            known = self._known.get(host)
            if known is not None and now - lookup.asked_at >= SLOW_SECONDS:
                self._call_slow(host, lookup, known, now)
            else:
                self._tell_late(host, lookup, now)

    def _call_slow(self, host: str, lookup: NameLookup, known: Known, now: float) -> None:
        """Answer with the last known addresses. A look-up that hangs moves to SLOW."""
        hangs = lookup.started_at is not None and now - lookup.started_at >= SLOW_SECONDS
        if hangs and lookup.kind is not LookupKind.SLOW:
            self._num_threads[lookup.kind] -= 1
            self._num_threads[LookupKind.SLOW] += 1
            lookup.kind = LookupKind.SLOW
            self._start()
        told, lookup.told = lookup.told, []
        self._let_go(host, lookup)
        if told:
            self._answers.put(host, (known.addresses, now + FAILURE_SECONDS))
        for _, tell in told:
            tell(known.addresses)

    def _tell_late(self, host: str, lookup: NameLookup, now: float) -> None:
        late = [told for deadline, told in lookup.told if now >= deadline]
        if not late:
            return
        lookup.told = [item for item in lookup.told if now < item[0]]
        self._let_go(host, lookup)
        error = PeerUnreachable(f"name {host!r} was not resolved within {self._timeout:g} s")
        self._answers.put(host, (error, now + FAILURE_SECONDS))
        for told in late:
            told(error)

    def _let_go(self, host: str, lookup: NameLookup) -> None:
        """Forget a look-up that nobody waits for, unless it has its thread."""
        if lookup.started_at is None and not lookup.told:
            del self._lookups[host]
            self._waiting[lookup.kind].remove(host)

    def close(self) -> None:
        """Call no callback any more; idempotent, from any thread. A thread that hangs in the
        resolver ends when the look-up does, or with the process."""
        with self._closing:
            self._is_closed = True

    def _start(self) -> None:
        for kind, limit in MAX_LOOKUPS.items():
            while (
                self._waiting[kind]
                and self._num_threads[kind] < limit
                and self._num_threads.total() < MAX_THREADS
            ):
                self._num_threads[kind] += 1
                self._start_one(self._waiting[kind].popleft())

    def _start_one(self, host: str) -> None:
        self._lookups[host].started_at = self._clock()
        work = partial(self._work, host)
        try:
            threading.Thread(target=work, name="p2p-name", daemon=True).start()
        except RuntimeError as error:  # the process has reached its limit of threads
            self._post(partial(self._found, host, PeerUnreachable(f"name {host!r}: {error}")))

    def _work(self, host: str) -> None:
        restore_affinity()
        answer = look_up(host)
        with self._closing:
            if not self._is_closed:
                self._post(lambda: self._found(host, answer))

    def _found(self, host: str, answer: Answer) -> None:
        lookup, known, now = self._lookups.pop(host), self._known.get(host), self._clock()
        self._num_threads[lookup.kind] -= 1
        is_slow = lookup.started_at is not None and now - lookup.started_at >= SLOW_SECONDS
        good_for = FAILURE_SECONDS if isinstance(answer, PeerUnreachable) else FRESH_SECONDS
        addresses = () if isinstance(answer, PeerUnreachable) else answer
        if known is not None and is_slow and not addresses:
            answer = addresses = known.addresses  # a slow failure proves nothing
        if addresses:
            self._known.put(
                host, Known(addresses, LookupKind.SLOW if is_slow else LookupKind.SWIFT)
            )
        self._answers.put(host, (answer, now + good_for))
        self._start()
        for _, told in lookup.told:
            told(answer)


def look_up(host: str) -> Answer:
    """Return a name's addresses, IPv4 first, or the error; blocks."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # UnicodeError: not a possible host name
        return PeerUnreachable(f"name {host!r}: {error}")
    ordered = sorted(found, key=lambda item: item[0] is not socket.AF_INET)
    return tuple(dict.fromkeys(str(item[4][0]) for item in ordered))


def is_numeric(host: str) -> bool:
    """Whether a host is a numeric address (without brackets), not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
