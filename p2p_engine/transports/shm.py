"""Shared memory between two processes of one host: the sender copies straight into the receiver's
arena.

The arena is an anonymous memory file. Its descriptor is passed over an abstract Unix socket, so
nothing is left behind after SIGKILL. Reading a nonce through the mapping proves that both are on
the same host. The Unix socket stays open: the sender closes it after its last write, or the kernel
closes it once the sender's address space is gone. End of file therefore proves that the sender
cannot write any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time

from mempool import Arena, Mover, read_word
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import LandingArena
from p2p_engine.transports.base import (
    ArenaChannel,
    Broken,
    Connected,
    Endpoint,
    SenderWrites,
)
from p2p_engine.transports.handshake import (
    PREAMBLE,
    Dial,
    Dials,
    Door,
    Tokens,
    listen,
    send_descriptor,
)


class ShmChannel(ArenaChannel):
    """A channel into the peer's arena, which is mapped here."""

    def __init__(
        self, mover: Mover, arena: Arena, connection: socket.socket, control: ControlPlane
    ) -> None:
        super().__init__(mover, arena.address, arena.nbytes)
        self._arena = arena
        self._connection = connection
        self._control = control
        self._broken: Broken | None = None
        control.watch(connection.fileno(), self._hung_up)

    def watch(self, broken: Broken) -> None:
        """Call `broken` if the receiver closes the connection."""
        self._broken = broken

    def close(self, timeout: float = 1.0) -> bool:
        """Join the copies, unmap, then close the connection. The order matters: the end of the
        connection proves that nothing is written any more."""
        if not super().close(timeout):
            return False
        self._arena.close()
        if self._connection.fileno() >= 0:
            self._control.unwatch(self._connection.fileno())
            with contextlib.suppress(OSError):  # the receiver has closed it
                self._connection.shutdown(socket.SHUT_RDWR)  # a forked child may have a duplicate
            self._connection.close()
        return True

    def _hung_up(self) -> None:
        """Report the end of the connection; the mapping stays valid until `close`."""
        self._control.unwatch(self._connection.fileno())
        self._closed = True
        if self._broken is not None:
            self._broken(TransportError("the receiver closed the connection"))


class ShmTransport(SenderWrites):
    """Shared memory on one host; the sender makes the only copy."""

    name = "shm"
    checks = True

    def __init__(
        self, mover: Mover, landing: LandingArena | None, control: ControlPlane, epoch: int
    ) -> None:
        self._mover = mover
        self._landing = landing
        self._control = control
        self._epoch = epoch
        self._tokens = Tokens()
        self._dials = Dials()
        self._senders: dict[int, socket.socket] = {}
        if landing is not None:
            self._name = f"p2p-engine-{epoch:x}-{secrets.token_hex(8)}"
            listener = listen(socket.AF_UNIX, "\0" + self._name)
            self._door = Door(control, listener, self._tokens, self._admit)

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return the socket's name, a token, and the place of the nonce."""
        if self._landing is None:
            return None
        return {
            "socket": self._name,
            "token": self._tokens.make(source_epoch),
            "nbytes": str(self._landing.arena.nbytes),
            "nonce_offset": str(self._landing.nonce_offset),
            "nonce": str(self._landing.nonce),
        }

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Fetch the peer's descriptor and map it."""
        try:
            nbytes, offset, nonce = (
                int(endpoint[key]) for key in ("nbytes", "nonce_offset", "nonce")
            )
            preamble = PREAMBLE.pack(self._epoch, bytes.fromhex(endpoint["token"]))
            name = "\0" + endpoint["socket"]
        except (KeyError, ValueError) as error:
            connected(TransportError(f"connect: bad shm endpoint: {error!r}"))
            return

        def answered(connection: socket.socket, descriptors: list[int]) -> None:
            try:
                arena = _map(descriptors, nbytes, offset, nonce)
            except TransportError as error:
                connection.close()
                connected(error)
                return
            self._make_channel(endpoint, arena, connection, connected)

        Dial(self._dials, self._control, socket.AF_UNIX, name, preamble, answered, connected)

    def is_gone(self, source_epoch: int) -> bool:
        """Whether the sender's end of the socket is closed. Only its holder can write here."""
        return source_epoch not in self._senders

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Refuse new connections of this epoch, and close the old one unless its end is awaited as
        a proof."""
        self._tokens.forget(source_epoch)
        if not may_write and source_epoch in self._senders:
            self._drop(source_epoch)

    def outlast_senders(self, timeout: float) -> bool:
        """Close our direction and wait until every sender has closed its end, which proves that it
        cannot write.

        Returns False if one has not within `timeout` seconds. Call it when the control thread has
        stopped.
        """
        deadline = time.monotonic() + timeout
        for connection in self._senders.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        while self._senders and (left := deadline - time.monotonic()) > 0:
            waiting = select.poll()
            for connection in self._senders.values():
                waiting.register(connection, select.POLLIN)
            waiting.poll(left * 1000)
            for epoch in list(self._senders):
                self._sender_ended(epoch)
        return not self._senders

    def close(self) -> None:
        """Close the listener, the open dials and every connection."""
        self._dials.close()
        if self._landing is not None:
            self._door.close()
        for connection in self._senders.values():
            self._control.unwatch(connection.fileno())
            connection.close()
        self._senders.clear()

    def _make_channel(
        self, endpoint: Endpoint, arena: Arena, connection: socket.socket, connected: Connected
    ) -> None:
        connected(ShmChannel(self._mover, arena, connection, self._control))

    def _admit(self, connection: socket.socket, epoch: int) -> None:
        if epoch in self._senders:
            self._sender_ended(epoch)  # its end of file may not have been read yet
        if self._landing is None or epoch in self._senders:
            connection.close()
            return
        try:
            self._control.watch(connection.fileno(), lambda: self._sender_ended(epoch))
            send_descriptor(connection, self._landing.arena.fileno())  # last: it may write then
        except OSError:
            self._control.unwatch(connection.fileno())
            connection.close()
            return
        self._senders[epoch] = connection

    def _sender_ended(self, epoch: int) -> None:
        connection = self._senders.get(epoch)
        if connection is None:
            return
        with contextlib.suppress(BlockingIOError):
            try:
                if said := connection.recv(64):
                    self._heard(epoch, said)
                    return  # only end of file is a proof
            except ConnectionError:
                pass  # reset: the other end is closed
            self._drop(epoch)
            self._left(epoch)

    def _drop(self, epoch: int) -> None:
        connection = self._senders.pop(epoch)
        self._control.unwatch(connection.fileno())
        connection.close()

    def _heard(self, epoch: int, said: bytes) -> None:
        """Take what a sender says after its handshake: nothing is expected."""

    def _left(self, epoch: int) -> None:
        """Note that a sender's connection has ended."""


def _map(descriptors: list[int], nbytes: int, nonce_offset: int, nonce: int) -> Arena:
    """Map the peer's memory file and check that it is the peer's.

    Raises:
        TransportError: there is no descriptor, it cannot be mapped, or the nonce differs.
    """
    try:
        if len(descriptors) != 1:
            raise TransportError(f"recvmsg: {len(descriptors)} descriptors came, not 1")
        arena = Arena.attach(descriptors[0], nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"mmap of the peer's memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if not 0 <= nonce_offset <= nbytes - 8 or read_word(arena.address + nonce_offset) != nonce:
        arena.close()
        raise TransportError("the mapped memory does not hold the peer's nonce")
    return arena
