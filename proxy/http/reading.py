"""When a connection is read: while nobody has paused it, and in a crowd, or after much of it, when
it is its turn."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from proxy.http.silence import Silence
from proxy.http.turns import Turns

# With more connections than these, each rests between two reads.
CROWD = 128
# Of whom so much was read at once, each rests, too: the system takes 0.1 ms to copy it.
LARGE_READ_BYTES = 64 << 10
# So many turns may be taken in each round of the loop, and so much of one counts a connection that
# is read: what it wakes takes its time later.
NUM_TURNS = 4
READ_TURN = 0.5


class Sluice:
    """Reads from a transport while nobody has paused it. Each pause is ended by who began it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_pauses = 0

    def pause_reading(self) -> None:
        """Read no more."""
        self._num_pauses += 1
        if self._num_pauses == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, if nobody else has paused."""
        self._num_pauses -= 1
        if self._num_pauses == 0 and not self._transport.is_closing():
            self._transport.resume_reading()


class Rests:
    """The rests of connections of one kind.

    A loop that waits for a thousand connections may find all of them readable, and reads them all
    in one round, while others wait for that round at each step of their requests. In a crowd, a
    connection that was read is therefore not read on: what comes is awaited in `Silence`, and then
    for a turn. So a round reads a few. It is the same with who sends much.
    """

    def __init__(self, silence: Silence, count: Callable[[], int]) -> None:
        """`count` tells how many connections there are."""
        self.silence = silence
        self.turns = Turns(NUM_TURNS, least=READ_TURN)
        self._count = count

    def are_needed(self, num_read: int) -> bool:
        """Tell whether there is a crowd, or whether so much was read at once."""
        is_much = num_read >= LARGE_READ_BYTES or self._count() > CROWD
        return is_much and self.silence.is_open


class Rest:
    """The rests of one connection."""

    def __init__(
        self,
        rests: Rests,
        origin: str,
        transport: asyncio.BaseTransport,
        pause: Callable[[], object],
        resume: Callable[[], object],
        heard: Callable[[], bool],
    ) -> None:
        """`heard` is called when something has come that is not read yet. It tells whether that
        goes on with what has begun: it is read behind all that begins."""
        self._rests = rests
        self.origin = origin
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._pause = pause
        self._resume = resume
        self._heard = heard
        self._is_resting = self._is_over = False

    @property
    def is_on(self) -> bool:
        """Tell whether the connection rests."""
        return self._is_resting

    @property
    def has_spoken(self) -> bool:
        """Tell whether something may have come that nobody has heard of."""
        if not self._is_resting or self._is_over:
            return False
        look = select.poll()
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))

    def begin(self, num_read: int = 0) -> None:
        """In a crowd, or after so much was read at once, read no more until something has come and
        others had their turns."""
        if not self._is_resting and not self._is_over and self._rests.are_needed(num_read):
            self._is_resting = True
            self._pause()
            self._rests.silence.add(self._descriptor, self)

    def hear(self) -> None:
        """Note that something came; wait for a turn to read it."""
        self._rests.turns.ask(self.origin, self, self._end, goes_on=self._heard())

    def leave(self) -> None:
        """Rest no more, because the connection has ended; idempotent."""
        self._is_over = True
        self._rests.silence.remove(self._descriptor, self)
        self._rests.turns.leave(self.origin, self)
        self._pause = self._resume = self._heard = _nothing  # no circle of references

    def _end(self) -> None:
        self._is_resting = False
        self._resume()


def _nothing() -> bool:
    return False
