"""Reach: sends frames to addresses whose host may be a name.

The sockets dial numeric addresses only: libzmq would look a name up in its one I/O thread, and
block all other traffic. The layers above know a peer by the address that was configured. A name in
use is looked up again from time to time, because it may move to another address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from p2p_engine.control.dialler import Refused
from p2p_engine.control.resolver import Answer, Resolver, is_numeric
from p2p_engine.control.sockets import Ended, Handler, Route, Sockets
from p2p_engine.errors import PeerUnreachable
from p2p_engine.wire.addresses import join_address, split_address

IDLE_SECONDS = 300.0  # a name that we send nothing to for so long is forgotten
MAX_FRAMES = 8  # that wait for one name; more are dropped: senders repeat them

Unresolved: TypeAlias = Callable[[str, PeerUnreachable], None]


@dataclass(eq=False)
class Lead:
    """The numeric address of a name ("" until it is known), and the frames that wait for it."""

    numeric: str = ""
    resolved_at: float = 0.0
    said_at: float = 0.0  # when a frame was last sent to it
    is_asking: bool = False
    frames: list[bytes] = field(default_factory=list)


class Reach:
    """Names and their numeric addresses. Only the holder of the sockets may call it; nothing
    blocks."""

    def __init__(
        self,
        names: Resolver,
        refresh_seconds: float,
        clock: Callable[[], float],
        on_frame: Handler,
        on_refused: Refused,
        on_unresolved: Unresolved,
        on_ended: Ended = lambda route: None,
    ) -> None:
        """`on_unresolved` is called with an address whose name has no known host, and the error.
        Set `sockets` before the first frame."""
        self.sockets: Sockets
        self._names = names
        self._refresh_seconds = refresh_seconds
        self._clock = clock
        self._on_frame = on_frame
        self._on_refused = on_refused
        self._on_unresolved = on_unresolved
        self._on_ended = on_ended
        self._tick_at = 0.0
        self._leads: dict[str, Lead] = {}
        self._by_numeric: dict[str, set[str]] = {}

    def send(self, route: Route, frame: bytes) -> bool:
        """Send a frame, now or when its address is known; a frame that cannot be delivered is
        dropped and counted. False: the connection that the route replies to has ended."""
        address = route.address
        if not address or _is_numeric(address):
            return self.sockets.send(route, frame)
        lead = self._leads.setdefault(address, Lead())
        lead.said_at = self._clock()
        if not lead.numeric:
            if len(lead.frames) >= MAX_FRAMES:
                self.sockets.dropped_frames += 1
            elif frame not in lead.frames:  # else it is a repetition
                lead.frames.append(frame)
        else:
            self.sockets.send(Route(lead.numeric), frame)
        if not lead.numeric or lead.said_at - lead.resolved_at >= self._refresh_seconds:
            self._ask(address, lead)
        return True

    def hang_up(self, address: str) -> None:
        """Close the connection to an address; the next frame dials again."""
        lead = self._leads.pop(address, None)
        if lead is None:
            self.sockets.hang_up(address)
            for name in list(self._by_numeric.get(address, ())):
                self._on_ended(Route(name))
        elif lead.numeric:
            self._leave(address, lead)

    def tick(self, now: float) -> None:
        """Forget names to which nothing was sent for IDLE_SECONDS, and close their connections."""
        if now >= self._tick_at:
            self._tick_at = now + 1.0
            for address, lead in list(self._leads.items()):
                if now - lead.said_at >= IDLE_SECONDS:
                    self.hang_up(address)

    def hear(self, route: Route, frame: bytes) -> None:
        """Hand a frame on, once for each name of its sender and once for its numeric address."""
        names = self._by_numeric.get(route.address, ()) if route.address else ()
        for name in list(names):
            self._on_frame(Route(name), frame)
        self._on_frame(route, frame)

    def refused(self, address: str, reason: str) -> None:
        """Report, for each name of an address, that it breaks our handshakes off."""
        for name in [*self._by_numeric.get(address, ()), address]:
            self._on_refused(name, reason)

    def ended(self, route: Route) -> None:
        """Report, for each name of a route, that its connection has ended, not by us."""
        for name in list(self._by_numeric.get(route.address, ())):
            self._on_ended(Route(name))
        self._on_ended(route)

    def _ask(self, address: str, lead: Lead) -> None:
        if lead.is_asking:
            return
        lead.is_asking = True
        host, port = split_address(address)
        self._names.resolve(host, lambda answer: self._resolved(address, lead, port, answer))

    def _resolved(self, address: str, lead: Lead, port: int, answer: Answer) -> None:
        lead.is_asking = False
        if self._leads.get(address) is not lead:
            return  # hung up meanwhile
        lead.resolved_at = self._clock()
        if isinstance(answer, PeerUnreachable):
            if not lead.numeric:  # else keep the last known address
                self.sockets.dropped_frames += len(lead.frames)
                del self._leads[address]
                self._on_unresolved(address, answer)
            return
        numerics = [join_address(host, port) for host in answer]
        if lead.numeric in numerics:
            return
        has_moved = bool(lead.numeric)
        if has_moved:
            self._leave(address, lead)
        lead.numeric = numerics[0]
        self._by_numeric.setdefault(lead.numeric, set()).add(address)
        frames, lead.frames = lead.frames, []
        for frame in frames:
            self.sockets.send(Route(lead.numeric), frame)
        if has_moved:
            self._on_ended(Route(address))

    def _leave(self, address: str, lead: Lead) -> None:
        names = self._by_numeric[lead.numeric]
        names.discard(address)
        if not names:
            del self._by_numeric[lead.numeric]
            self.sockets.hang_up(lead.numeric)


def _is_numeric(address: str) -> bool:
    try:
        return is_numeric(split_address(address)[0])
    except ValueError:
        return True  # not an address at all: the sockets drop the frame
