"""Dialler: dials every address through one ZMQ socket.

A ROUTER may connect to many addresses, under a name that we choose for each connection. On the wire
it looks like a DEALER. A DEALER for each address, with the two sockets that report its events,
would cost three sockets and four descriptors, and libzmq allows 1,023 sockets in all.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from p2p_engine.bounded import BoundedMap
from p2p_engine.control.auth import (
    Curve,
    Handshakes,
    close_monitor,
    open_monitor,
    open_router,
    read_events,
    send,
)
from p2p_engine.control.intake import Intake
from p2p_engine.wire.addresses import join_address, split_address

SEND_QUEUE_FRAMES = 10_000  # for one address: questions to it, and OFFERs of many transfers at once
IDLE_SECONDS = 300.0  # a dialled connection on which we send nothing for so long is closed
MAX_RECONNECT_MILLISECONDS = 1_000
Refused: TypeAlias = Callable[[str, str], None]
Ended: TypeAlias = Callable[[str], None]


@dataclass(eq=False)
class Dialled:
    """A dialled address, the name of its connection, and the results of its handshakes."""

    number: int  # of the dial
    address: str
    name: bytes
    endpoint: str
    handshakes: Handshakes
    turn: int  # which of our keys it uses
    said_at: float  # when a frame was last sent


class Dialler:
    """One dialling socket. Call everything with the lock of the sockets held; nothing blocks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        curve: Curve,
        on_refused: Refused,
        on_ended: Ended,
    ) -> None:
        """`on_refused` is called with an address that breaks our handshakes off, and the reason.
        `on_ended` is called with an address whose connection has ended, unless we closed it; libzmq
        dials it again."""
        self.intake = Intake()
        self._curve = curve
        self._on_refused = on_refused
        self._on_ended = on_ended
        self._turns: BoundedMap[str, int] = BoundedMap(
            1024
        )  # by address, while secrets are replaced
        self._dialled: OrderedDict[str, Dialled] = OrderedDict()  # the least recently used first
        self._by_name: dict[bytes, Dialled] = {}
        self._by_endpoint: dict[str, Dialled] = {}
        self._num_dials = 0
        self.socket = open_router(context, SEND_QUEUE_FRAMES)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MILLISECONDS)
        events = Handshakes.EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        try:
            self.monitor = open_monitor(context, self.socket, events)
        except BaseException:
            self.socket.close()
            raise

    def address_of(self, name: bytes) -> str:
        """Return the address that a connection's name stands for; "" if we have closed it."""
        dialled = self._by_name.get(name)
        return dialled.address if dialled is not None else ""

    def send(self, address: str, frame: bytes) -> None:
        """Send a frame; dials the address first if there is no connection. Never blocks.

        Raises:
            zmq.ZMQError: the address is invalid, or too many frames wait for it.
        """
        if address not in self._dialled:
            self._dial(address, self._turns.get(address) or 0, Handshakes(len(self._curve)))
        dialled = self._dialled[address]
        dialled.said_at = time.monotonic()
        self._dialled.move_to_end(address)
        try:
            send(self.socket, dialled.name, frame)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # libzmq does not reconnect after a protocol error.
            self.hang_up(address, linger_milliseconds=0)
            self._dial(address, dialled.turn, dialled.handshakes)
            send(self.socket, self._dialled[address].name, frame)

    def hang_up(self, address: str, *, linger_milliseconds: int = 100) -> None:
        """Close the connection to an address after its queued frames are sent, or after the linger
        time. The next frame dials again."""
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            del self._by_name[dialled.name]
            self._by_endpoint.pop(dialled.endpoint, None)
            self.socket.setsockopt(zmq.LINGER, linger_milliseconds)
            self.socket.disconnect(dialled.endpoint)

    def close_idle(self, now: float) -> None:
        """Close connections on which we sent nothing for long: their peers may be gone."""
        while self._dialled:
            oldest = next(iter(self._dialled.values()))
            if now - oldest.said_at < IDLE_SECONDS:
                break
            self.hang_up(oldest.address)

    def serve(self) -> None:
        """Handle the waiting events: handshakes that have ended, connections made and lost.

        An address that is dialled during this call has no events of its own yet. The events read
        now belong to its previous connection.
        """
        num_dials = self._num_dials
        for event, value, endpoint in read_events(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self.intake.add(value)
                continue
            dialled = self._by_endpoint.get(endpoint)
            is_current = dialled is not None and dialled.number <= num_dials
            if event == zmq.EVENT_DISCONNECTED:
                self.intake.remove(value)
                if dialled is not None and is_current:
                    self._on_ended(dialled.address)
            elif dialled is not None and is_current:
                self._shaken(dialled, event, value)

    def close(self, linger_milliseconds: int) -> None:
        """Close every connection once its queue is sent, or after the linger time; idempotent."""
        close_monitor(self.socket, self.monitor)
        self.socket.close(linger=linger_milliseconds)
        self.intake.close()

    def _dial(self, address: str, turn: int, handshakes: Handshakes) -> None:
        self._num_dials += 1
        name = f"{self._num_dials} {address}".encode()[:255]  # libzmq aborts if two are equal
        endpoint, is_ipv4 = _endpoint(address)
        self._curve.dial(self.socket, turn)  # applies to the connections that follow
        self.socket.setsockopt(zmq.IPV6, int(not is_ipv4))  # else events name ::ffff:10.0.0.1
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        self.socket.connect(endpoint)
        said_at = time.monotonic()
        dialled = Dialled(self._num_dials, address, name, endpoint, handshakes, turn, said_at)
        self._dialled[address] = self._by_name[name] = self._by_endpoint[endpoint] = dialled

    def _shaken(self, dialled: Dialled, event: int, value: int) -> None:
        """Handle the result of a handshake."""
        address, handshakes = dialled.address, dialled.handshakes
        reason = handshakes.take(event, value)
        if reason:
            self.hang_up(address, linger_milliseconds=0)
            self._turns.pop(address)
            self._on_refused(address, reason)
        elif handshakes.failures and len(self._curve) > 1:  # the peer may serve another of our keys
            self.hang_up(address, linger_milliseconds=0)
            self._dial(address, dialled.turn + 1, handshakes)
        elif not handshakes.failures and dialled.turn:
            self._turns.put(address, dialled.turn)


def _endpoint(address: str) -> tuple[str, bool]:
    """Return the name that libzmq gives an address in its events, and whether that is IPv4."""
    try:
        host, port = split_address(address)
        ip = ipaddress.ip_address(host)
    except ValueError:  # a host name
        return f"tcp://{address}", False
    return f"tcp://{join_address(str(ip), port)}", ip.version == 4
