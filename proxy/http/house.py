"""ClientHouse: the connections of clients, how long each may stay, and which one makes room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from proxy.http.caller import Caller
from proxy.http.origins import origin_of
from proxy.http.reading import Rest, Rests
from proxy.http.silence import Silence
from proxy.http.strict import StrictConnection
from proxy.http.turns import TURN_SECONDS, Turns

# Bytes in a row that are neither a head nor a body: trailers, chunk extensions, empty lines.
MAX_DRY_BYTES = 128 << 10
# What a client sends is parsed in slices, each twice as large as the one before, until its turn is
# over: it may all be tiny chunks.
LEAST_SLICE_BYTES = 2 << 10
MOST_SLICE_BYTES = 16 << 10
# Of what all clients send, so much is parsed in each round of the loop.
TURNS_TO_PARSE = 4
# So many newcomers at a time are told that the house is full; more are closed unheard.
MAX_TURNED_AWAY = 64
# A client has this long to send its request, and to take more of an answer that it let pile up,
# before it may have to make room for another.
SENDING_SECONDS = 5.0
# So many of those that seem to be silent are looked at for each newcomer to a full house.
MOST_LOOKS = 8
# After a limit has passed, what came while the process did not run is still read for this long.
LAST_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Rules:
    """How many connections there may be, and for how many seconds one may have no request, half
    of a head, or an answer that the client does not take."""

    max_connections: int
    idle_seconds: float
    head_seconds: float
    stall_seconds: float


class ClientHouse:
    """All connections of clients.

    If the house is full, one connection is closed for the newcomer: of those that never had an
    answer, the one that has been without a request for the longest; else of the others; else of
    those whose request comes slowly; else of those that do not take their answer; else of those
    that have spoken and are not read yet. If there is none, the newcomer is turned away.

    Invariant: num_guests <= rules.max_connections.
    """

    def __init__(
        self,
        rules: Rules,
        turn_away: Any,
        count: Callable[[str], None] = lambda limit: None,
        count_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`turn_away` is the ASGI application for newcomers to a full house; `count` is told why
        a connection is closed, `count_refused` why a request is not read."""
        self.rules = rules
        self.turn_away = turn_away
        self._count = count
        self.count_refused = count_refused
        self.parsing = Turns(TURNS_TO_PARSE, least=0)
        self.silence = Silence()
        self.rests = Rests(self.silence, lambda: len(self._guests))
        self._guests: set[Visitor] = set()
        self._turned_away: set[Visitor] = set()
        # Without a request and never answered, without a request, with half of one, with an answer
        # that they do not take, and with what is not read yet: since when, the longest first. A
        # visitor is in one of them, or in none.
        self._strangers: dict[Visitor, float] = {}
        self._idle: dict[Visitor, float] = {}
        self._sending: dict[Visitor, float] = {}
        self._stalled: dict[Visitor, float] = {}
        self._spoken: dict[Visitor, float] = {}
        self._line_of: dict[Visitor, dict[Visitor, float]] = {}

    @property
    def num_guests(self) -> int:
        """The number of connections, without those that are turned away."""
        return len(self._guests)

    def open_door(self, **options: Any) -> Guest:
        """Make the protocol of a connection; uvicorn calls it as it calls its own."""
        return Guest(self, **options)

    def replace(self, caller: Caller, guest: Guest) -> float:
        """Give a guest the place of the caller that it was; return how long it may have no
        request."""
        was_let_in, was_turned_away = caller in self._guests, caller in self._turned_away
        has_spoken = self._line_of.get(caller) is self._spoken
        self.leave(caller)
        if was_let_in:
            self._guests.add(guest)
            self._move(guest, self._spoken if has_spoken else self._strangers)
            return self.rules.idle_seconds
        if was_turned_away:
            self._turned_away.add(guest)
            guest.application = self.turn_away
        else:
            guest.drop()
        return SENDING_SECONDS

    def enter(self, guest: Visitor) -> float:
        """Let a connection in, or turn it away; return how long it may have no request."""
        if len(self._guests) >= self.rules.max_connections:
            self._make_room(guest.loop.time())
        if len(self._guests) < self.rules.max_connections:
            self._guests.add(guest)
            self.note_idle(guest)
            return self.rules.idle_seconds
        if len(self._turned_away) < MAX_TURNED_AWAY:
            self._count("full")
            self._turned_away.add(guest)
            guest.application = self.turn_away
        else:
            self.close(guest, "full")
        return SENDING_SECONDS

    def note_idle(self, guest: Visitor) -> None:
        """Note that a connection has no request."""
        self._move(guest, self._idle if guest.was_answered else self._strangers)

    def note_spoken(self, guest: Visitor) -> None:
        """Note that somebody without a request has said something that is not read yet."""
        line = self._line_of.get(guest)
        if line is self._strangers or line is self._idle:
            self._move(guest, self._spoken)

    def note_read(self, guest: Visitor) -> None:
        """Note that all is read that somebody without a request has said."""
        if self._line_of.get(guest) is self._spoken:
            self.note_idle(guest)

    def note_request(self, guest: Visitor) -> None:
        """Note that a request has begun to arrive."""
        line = self._line_of.get(guest)
        if line is self._strangers or line is self._idle or line is self._spoken:
            self.note_sending(guest)

    def note_sending(self, guest: Visitor) -> None:
        """Note that the request in progress has not arrived yet."""
        self._move(guest, self._sending)

    def note_arrival(self, guest: Visitor) -> None:
        """Note that a request has arrived."""
        self._leave_line(guest, self._sending)

    def note_stall(self, guest: Visitor) -> None:
        """Note that a client does not take its answer."""
        self._move(guest, self._stalled)

    def note_taken(self, guest: Visitor) -> None:
        """Note that a client has taken what it had let pile up."""
        self._leave_line(guest, self._stalled)

    def end(self, guest: Guest, reason: str) -> None:
        """Close a connection when its client has taken all that it was told."""
        self._count(reason)
        guest.finish()

    def close(self, guest: Visitor, reason: str) -> None:
        """Close a connection at once, whatever has not been sent on it."""
        self._count(reason)
        self.leave(guest)
        guest.drop()

    def leave(self, guest: Visitor) -> None:
        """Forget a connection; idempotent."""
        self._guests.discard(guest)
        self._turned_away.discard(guest)
        self._leave_line(guest, self._line_of.get(guest))

    def _move(self, guest: Visitor, line: dict[Visitor, float]) -> None:
        self._leave_line(guest, self._line_of.get(guest))
        if guest in self._guests:
            line[guest] = guest.loop.time()
            self._line_of[guest] = line

    def _leave_line(self, guest: Visitor, line: dict[Visitor, float] | None) -> None:
        """Leave a line, if the visitor is in it."""
        if line is not None and line.pop(guest, None) is not None:
            del self._line_of[guest]

    def _make_room(self, now: float) -> None:
        guest = (
            self._first_silent(self._strangers)
            or self._first_silent(self._idle)
            or _first(self._sending, now - SENDING_SECONDS)
            or _first(self._stalled, now - SENDING_SECONDS)
            or _first(self._spoken, now)
        )
        if guest is not None:
            self.close(guest, "room")

    def _first_silent(self, line: dict[Visitor, float]) -> Visitor | None:
        """Return who has been silent in a line for the longest, as far as a few looks tell."""
        for each in list(islice(line, MOST_LOOKS)):
            if not each.has_spoken:
                return each
            self.note_spoken(each)
        return None


class Guest(StrictConnection):
    """One connection of a client."""

    _rest: Rest | None = None

    def __init__(self, house: ClientHouse, caller: Caller | None = None, **options: Any) -> None:
        """`caller` is what the connection was before, if it came by a door."""
        super().__init__(**options)
        self._house = house
        self._caller = caller
        self.timeout_keep_alive = house.rules.idle_seconds  # type: ignore[assignment]
        self.was_answered = False
        self._num_dry_bytes = 0  # since the last head or piece of a body
        self._origin = ""
        self._unread = memoryview(b"")  # what came and waits for its turn to be parsed
        self._is_behind = False
        self._head_due: float | None = None
        self._stall: asyncio.TimerHandle | None = None

    @property
    def has_spoken(self) -> bool:
        """Tell whether something may have come that is not read yet."""
        return bool(self._unread) or (self._rest is not None and self._rest.has_spoken)

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is being answered."""
        return self._running is None or self._running.response_complete

    def rest_between_reads(
        self,
        origin: str,
        transport: asyncio.BaseTransport,
        pause: Callable[[], object],
        resume: Callable[[], object],
    ) -> Rest:
        """Return the rests of this connection; `transport` is that of the bare connection."""
        self._rest = Rest(self._house.rests, origin, transport, pause, resume, self.hear)
        return self._rest

    def refuse(self) -> None:
        """Close the connection at once: too much came that is neither a head nor a body."""
        self._house.close(self, "refused")

    def drop(self) -> None:
        """Close the connection at once, whatever has not been sent on it."""
        self.abandon()
        self.transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enter the house."""
        super().connection_made(transport)
        self._origin, _ = origin_of(self.client[0] if self.client else "")
        caller, self._caller = self._caller, None
        house = self._house
        if transport.get_extra_info("sslcontext") is None:
            pause, resume = self.sluice.pause_reading, self.sluice.resume_reading
            self.rest_between_reads(self._origin, transport, pause, resume)
        self._close_after(house.replace(caller, self) if caller else house.enter(self), "idle")

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the house."""
        self._house.leave(self)
        self._house.parsing.leave(self._origin, self)
        if self._rest is not None:
            self._rest.leave()
        super().connection_lost(exc)
        self._end_stall()

    def dissolve(self) -> None:
        """Let go of what the connection was before, too."""
        super().dissolve()
        self._caller = None

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse what came, or as much of it as there is time for in this round."""
        if self._rest is not None:
            self._rest.begin(len(data))
        if self._unread:
            self._unread = memoryview(bytes(self._unread) + data)
            return
        self._unread = memoryview(data)
        if not self._house.parsing.do_now(self._read_on):
            if not self._is_over:  # else the timer is that of its end
                self._unset_keepalive_if_required()
            self._fall_behind(goes_on=self.hear())

    def hear(self) -> bool:
        """Tell whether a request goes on with what came and is not read yet.

        Then it has its turn after others: a crowd that sends bodies in crumbs would else be before
        a request for ever.
        """
        return not self.is_idle

    def note_read(self) -> None:
        """Note that all that came is read, and that it may have been nothing of HTTP."""
        self._house.note_read(self)

    def _read_on(self) -> None:
        """Parse for one turn."""
        end, size = time.perf_counter() + TURN_SECONDS, LEAST_SLICE_BYTES
        while self._unread and not self.transport.is_closing():
            data, self._unread = self._unread[:size], self._unread[size:]
            self._take(data)
            if time.perf_counter() > end:
                break
            size = min(2 * size, MOST_SLICE_BYTES)
        if self.transport.is_closing():
            self._unread = memoryview(b"")
        elif self._unread:
            self._fall_behind(goes_on=True)
        elif self._is_behind:
            self._is_behind = False
            self.sluice.resume_reading()

    def _fall_behind(self, *, goes_on: bool) -> None:
        if not self._is_behind:
            self._is_behind = True
            self.sluice.pause_reading()
        self._house.parsing.ask(self._origin, self, self._read_on, goes_on=goes_on)

    def _take(self, data: memoryview) -> None:
        """Parse a slice; limit how much, and how slowly, comes without a request."""
        self._house.note_read(self)
        self._num_dry_bytes += len(data)
        super().data_received(data)
        if self._is_over or self.transport.is_closing():
            return
        if self._num_dry_bytes > MAX_DRY_BYTES:
            self.refuse()
        elif self.is_idle:
            self._expect_head()

    def eof_received(self) -> None:
        """Limit how long a client that has left may take for what is not sent."""
        self._begin_stall()

    def pause_writing(self) -> None:
        """Wait for the client to take its answer, but not for ever."""
        super().pause_writing()
        self._begin_stall()

    def resume_writing(self) -> None:
        """Note that the client takes its answer. What is left of the last one is limited still."""
        super().resume_writing()
        if self.transport.is_closing():
            self._begin_stall()
            return
        self._end_stall()
        self._house.note_taken(self)
        self._stand_in_line()

    # Called by the parser.

    def on_headers_complete(self) -> None:
        """Begin a request."""
        super().on_headers_complete()
        self._num_dry_bytes, self._head_due = 0, None
        self._house.note_request(self)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._num_dry_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request has arrived."""
        self._house.note_arrival(self)
        super().on_message_complete()

    # Called by uvicorn, and by cycles.

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self.is_idle and not self._is_over and not self.transport.is_closing():
            self.was_answered, self._head_due = True, None
        self._stand_in_line()

    def count_refused(self, reason: str) -> None:
        """Count a request that is not clear."""
        self._house.count_refused(reason)

    def end(self) -> None:
        """Close the connection when the client has taken all, or is late."""
        super().end()
        self._begin_stall()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was without a request for too long."""
        self._last_look("idle")

    def _stand_in_line(self) -> None:
        """Stand among those that make room, behind an answer that the client has taken."""
        if self._stall is not None or self._is_over or self.transport.is_closing():
            return
        if self._running is not None and self._running.more_body and not self.is_idle:
            self._house.note_sending(self)
        elif self.is_idle and self.was_answered:
            self._house.note_idle(self)

    def _expect_head(self) -> None:
        """Limit the time from a head's first byte to its end."""
        now = self.loop.time()
        self._head_due = self._head_due or now + self._house.rules.head_seconds
        if now < self._head_due + LAST_LOOK_SECONDS:
            self._close_after(max(0.0, self._head_due - now), "slow")
        else:  # each byte would put the last look off again
            self._house.close(self, "slow")

    def _close_after(self, seconds: float, reason: str) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._last_look, reason)

    def _last_look(self, reason: str) -> None:
        # If the process did not run, the client may have sent its request in time: it is read
        # before this, and cancels it.
        self.timeout_keep_alive_task = self.loop.call_later(
            LAST_LOOK_SECONDS, self._close_if_silent, reason
        )

    def _close_if_silent(self, reason: str) -> None:
        # What it has said is read soon. If that is a part of a request, the timer is set anew.
        if self.has_spoken:
            self._last_look(reason)
        elif reason == "idle":
            self._house.end(self, reason)
        else:
            self._house.close(self, reason)

    def _begin_stall(self) -> None:
        self._end_stall()
        self._house.note_stall(self)
        self._stall = self.loop.call_later(self._house.rules.stall_seconds, self._look_at_stall)

    def _look_at_stall(self) -> None:
        self._stall = self.loop.call_later(LAST_LOOK_SECONDS, self._house.close, self, "stalled")

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


Visitor: TypeAlias = Guest | Caller


def _first(line: dict[Visitor, float], until: float) -> Visitor | None:
    """Return the first in a line, if it has been there since then."""
    first = next(iter(line), None)
    return first if first is not None and line[first] <= until else None
