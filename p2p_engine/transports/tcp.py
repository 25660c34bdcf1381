"""TCP between two hosts: the native mover gathers framed streams from memory and scatters them to
it."""

from __future__ import annotations

import itertools
import socket

import numpy as np

from mempool import Mover
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.memory.host import socket_buffer_bytes
from p2p_engine.memory.jobs import Job, still_running
from p2p_engine.transports.base import Arrival, Broken, Connected, Endpoint, Order, PlainTransport
from p2p_engine.transports.handshake import (
    ACCEPTED,
    PREAMBLE,
    Dials,
    Door,
    Tokens,
    dial,
    end_by_silence,
    listen,
)
from p2p_engine.wire.addresses import family_of, join_address, split_address

WATCH_SEQ = (1 << 63) - 1


class TcpChannel:
    """The sending half of one connection."""

    def __init__(self, mover: Mover, channel: int) -> None:
        self._mover = mover
        self._channel = channel
        self._jobs: set[Job] = set()
        self._closed = False

    def write(self, order: Order) -> Job:
        """Send the source as segments with the grant's sequence number."""
        self._jobs = {job for job in self._jobs if not job.done}
        try:
            job = self._mover.send(
                self._channel,
                order.grant.seq,
                order.source.addresses,
                order.source.lengths,
                checked=order.checked,
                tag=order.tag,
                keep=order.keep,
            )
        except (ValueError, OSError) as error:
            raise TransportError(f"send: {error}") from error
        self._jobs.add(job)
        return job

    def watch(self, broken: Broken) -> None:
        """Expect a segment that is never sent: the job ends when the connection does."""

        def ended(job: Job) -> None:
            if not self._closed:
                broken(TransportError(f"recv: {job.error or 'a segment that nobody sends'}"))

        nothing = np.zeros(0, np.int64)
        self._mover.expect(self._channel, WATCH_SEQ, nothing, nothing, tag=ended)

    def close(self, timeout: float = 1.0) -> bool:
        """Close the connection, which ends its jobs."""
        self._closed = True
        self._mover.detach(self._channel)
        self._jobs = still_running(self._jobs, timeout)
        return not self._jobs


class TcpTransport(PlainTransport):
    """TCP between any two hosts; the receiver's mover scatters straight into final memory."""

    name = "tcp"
    receiver_writes = True
    scatters = True
    checks = True

    def __init__(
        self, mover: Mover, control: ControlPlane, epoch: int, host: str, silence_seconds: float
    ) -> None:
        """Listen on an ephemeral port of host. A connection breaks when the other host has
        acknowledged nothing for `silence_seconds`.

        Raises:
            OSError: host cannot be bound.
        """
        self._mover = mover
        self._control = control
        self._epoch = epoch
        self._silence_seconds = silence_seconds
        self._tokens = Tokens()
        self._dials = Dials()
        self._channels = itertools.count(1)
        self._senders: dict[int, int] = {}
        self._send_buffer_bytes = socket_buffer_bytes(socket.SO_SNDBUF)
        listener = listen(family_of(host), (host, 0), socket_buffer_bytes(socket.SO_RCVBUF))
        self._address = join_address(host, listener.getsockname()[1])
        self._door = Door(control, listener, self._tokens, self._admit)

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return the data address and a token."""
        return {"address": self._address, "token": self._tokens.make(source_epoch)}

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Dial the peer's data address."""
        try:
            host, port = split_address(endpoint["address"])
            preamble = PREAMBLE.pack(self._epoch, bytes.fromhex(endpoint["token"]))
        except (KeyError, ValueError) as error:
            connected(TransportError(f"connect: bad tcp endpoint: {error!r}"))
            return

        def answered(connection: socket.socket, _: list[int]) -> None:
            with connection:
                channel = self._hand_over(connection)
            connected(TcpChannel(self._mover, channel))

        dial(self._dials, self._control, host, port, preamble, answered, connected)

    def expect(self, arrival: Arrival) -> Job:
        """Let the mover scatter the stream's payload `seq` into the regions."""
        channel = self._senders.get(arrival.source_epoch)
        if channel is None:
            raise TransportError("expect: the sender has no data connection")
        try:
            return self._mover.expect(
                channel,
                arrival.seq,
                arrival.regions.addresses,
                arrival.regions.lengths,
                checked=arrival.checked,
                tag=arrival.tag,
                keep=arrival.keep,
            )
        except (ValueError, OSError) as error:
            raise TransportError(f"expect: {error}") from error

    def is_gone(self, source_epoch: int) -> bool:
        """Return True: only our own process writes, and its jobs report their own end."""
        return True

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Close the sender's connection."""
        self._tokens.forget(source_epoch)
        channel = self._senders.pop(source_epoch, None)
        if channel is not None:
            self._mover.detach(channel)

    def close(self) -> None:
        """Close the listener and the open dials. The mover has closed the connections."""
        self._dials.close()
        self._door.close()

    def _admit(self, connection: socket.socket, epoch: int) -> None:
        previous = self._senders.pop(epoch, None)  # the sender dialled again: the old one is dead
        if previous is not None:
            self._mover.detach(previous)
        with connection:
            self._senders[epoch] = self._hand_over(connection)
            try:
                connection.sendall(ACCEPTED)  # last: regions may be granted from now on
            except OSError:
                self._mover.detach(self._senders.pop(epoch))

    def _hand_over(self, connection: socket.socket) -> int:
        """Give the connection to the mover, which keeps a duplicate of the descriptor."""
        channel = next(self._channels)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._send_buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        end_by_silence(connection, self._silence_seconds)
        self._mover.attach(connection.fileno(), channel)
        return channel
