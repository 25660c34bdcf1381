"""Names: which addresses a host name stands for, found out in threads of their own.

`getaddrinfo` blocks for 10 s and more where no name server answers, and cannot be stopped. So each
look-up has a thread, and there are few of them. A name is looked up once at a time, however many
ask for it. Whoever asks waits until a deadline. A stranger may name many hosts that nobody knows:
their look-ups leave some threads to names that have been resolved before.
"""

from __future__ import annotations

import collections
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from p2p_engine.affinity import restore_affinity
from p2p_engine.errors import PeerUnreachable
from p2p_engine.recent import Recent

MAX_LOOKUPS = 16  # threads at a time
RESERVED_LOOKUPS = 4  # of these, for names that have been resolved before
MAX_NAMES = 1024  # that are being looked up, or wait for a thread; and that are remembered
FRESH_SECONDS = 2.0  # an answer is good for so long
FAILURE_SECONDS = 5.0  # and a failure

Answer: TypeAlias = tuple[str, ...] | PeerUnreachable
Told: TypeAlias = Callable[[Answer], None]


@dataclass(eq=False)
class Lookup:
    """A name that is being looked up, or waits for a thread; and who is told, until when."""

    is_known: bool  # it has been resolved before
    has_thread: bool = False
    told: list[tuple[float, Told]] = field(default_factory=list)


class Names:
    """The names that one event loop asks for. Everything but `_work` runs in that loop."""

    def __init__(
        self,
        timeout_seconds: float,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` runs a call in the loop, from any thread; whoever asks waits `timeout_seconds`."""
        self._timeout = timeout_seconds
        self._post = post
        self._clock = clock
        self._lookups: dict[str, Lookup] = {}
        self._waiting: collections.deque[str] = collections.deque()  # for a thread
        self._waiting_known: collections.deque[str] = collections.deque()
        self._num_threads = 0
        self._num_strangers = 0  # threads that look up what was never resolved
        self._known: Recent[str, None] = Recent(MAX_NAMES)
        self._answers: Recent[str, tuple[Answer, float]] = Recent(MAX_NAMES)  # good until
        self._is_closed = False
        self._closing = threading.Lock()  # guards _is_closed against posting after it

    def resolve(self, host: str, told: Told) -> None:
        """Call `told` once with a host's addresses, the best first, or why there are none: at once
        where that is known, else soon. Never blocks."""
        if is_numeric(host):
            told((host,))
            return
        now = self._clock()
        answer, until = self._answers.get(host) or ((), 0.0)
        if now < until:
            told(answer)
            return
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= MAX_NAMES:
                told(PeerUnreachable(f"name {host!r}: {MAX_NAMES} others are being resolved"))
                return
            lookup = self._lookups[host] = Lookup(host in self._known)
            (self._waiting_known if lookup.is_known else self._waiting).append(host)
        lookup.told.append((now + self._timeout, told))
        self._start()

    def tick(self, now: float) -> None:
        """Tell who has waited for too long."""
        for host, lookup in list(self._lookups.items()):
            late = [told for deadline, told in lookup.told if now >= deadline]
            if not late:
                continue
            lookup.told = [item for item in lookup.told if now < item[0]]
            if not lookup.has_thread and not lookup.told:
                del self._lookups[host]
                (self._waiting_known if lookup.is_known else self._waiting).remove(host)
            error = PeerUnreachable(f"name {host!r} was not resolved within {self._timeout:g} s")
            self._answers.put(host, (error, now + FAILURE_SECONDS))
            for told in late:
                told(error)

    def close(self) -> None:
        """Tell nobody any more; a thread that hangs in the resolver ends with it, or with the
        process. Idempotent, from any thread."""
        with self._closing:
            self._is_closed = True

    def _start(self) -> None:
        while self._num_threads < MAX_LOOKUPS:
            is_full = self._num_strangers >= MAX_LOOKUPS - RESERVED_LOOKUPS
            if self._waiting_known:
                host = self._waiting_known.popleft()
            elif self._waiting and not is_full:
                host = self._waiting.popleft()
                self._num_strangers += 1
            else:
                return
            self._lookups[host].has_thread = True
            self._num_threads += 1
            work = partial(self._work, host)
            try:
                threading.Thread(target=work, name="p2p-name", daemon=True).start()
            except RuntimeError as error:  # the process may have no more threads
                self._post(partial(self._found, host, PeerUnreachable(f"name {host!r}: {error}")))

    def _work(self, host: str) -> None:
        restore_affinity()
        answer = look_up(host)
        with self._closing:
            if not self._is_closed:
                self._post(lambda: self._found(host, answer))

    def _found(self, host: str, answer: Answer) -> None:
        lookup = self._lookups.pop(host)
        self._num_threads -= 1
        self._num_strangers -= not lookup.is_known
        is_good = not isinstance(answer, PeerUnreachable)
        good_for = FRESH_SECONDS if is_good else FAILURE_SECONDS
        self._answers.put(host, (answer, self._clock() + good_for))
        if is_good:
            self._known.put(host, None)
        self._start()
        for _, told in lookup.told:
            told(answer)


def look_up(host: str) -> Answer:
    """Return a name's addresses, those of IPv4 first, or why there are none; blocks."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a UnicodeError where no host can have such a name
        return PeerUnreachable(f"name {host!r}: {error}")
    ordered = sorted(found, key=lambda item: item[0] is not socket.AF_INET)
    return tuple(dict.fromkeys(str(item[4][0]) for item in ordered))


def is_numeric(host: str) -> bool:
    """Whether a host is an address, without brackets, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
