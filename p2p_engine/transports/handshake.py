"""How a data connection begins: the dialler shows its epoch and a token, the listener answers.

Everything is non-blocking and runs in callbacks of the control plane.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import logging
import os
import socket
import struct
import time
from collections.abc import Callable

from p2p_engine.control import ControlPlane
from p2p_engine.errors import TransportError

logger = logging.getLogger(__name__)

PREAMBLE = struct.Struct("<Q16s")  # epoch of the dialler, token that the listener gave it
ACCEPTED = b"\x01"
PATIENCE_SECONDS = 5.0
MAX_PENDING = 256


class Tokens:
    """One secret for each sender's epoch that was welcomed."""

    def __init__(self) -> None:
        self._tokens: dict[int, bytes] = {}

    def make(self, epoch: int) -> str:
        """Return the token of an epoch, always the same one."""
        return self._tokens.setdefault(epoch, os.urandom(16)).hex()

    def matches(self, epoch: int, token: bytes) -> bool:
        """Compare in constant time."""
        known = self._tokens.get(epoch)
        return known is not None and hmac.compare_digest(known, token)

    def forget(self, epoch: int) -> None:
        """Drop an epoch's token."""
        self._tokens.pop(epoch, None)


class Door:
    """The listening side: lets in who shows a token that matches."""

    def __init__(
        self,
        control: ControlPlane,
        listener: socket.socket,
        tokens: Tokens,
        admitted: Callable[[socket.socket, int], None],
    ) -> None:
        """`admitted(connection, epoch)` owns the connection from then on."""
        self._control = control
        self._listener = listener
        self._tokens = tokens
        self._admitted = admitted
        self._pending: dict[socket.socket, tuple[float, bytearray]] = {}
        listener.setblocking(False)
        control.watch(listener.fileno(), self._accept)

    def close(self) -> None:
        """Close the listener and whoever still waits in front of it."""
        for connection in [*self._pending, self._listener]:
            self._drop(connection)

    def _accept(self) -> None:
        now = time.monotonic()
        for connection, (since, _) in list(self._pending.items()):
            if now - since > PATIENCE_SECONDS or len(self._pending) >= MAX_PENDING:
                self._drop(connection)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._pending[connection] = (now, bytearray())
            self._control.watch(connection.fileno(), lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        received = self._pending[connection][1]
        try:
            data = connection.recv(PREAMBLE.size - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if not data:
            self._drop(connection)
        elif len(received) == PREAMBLE.size:
            self._check(connection, *PREAMBLE.unpack(bytes(received)))

    def _check(self, connection: socket.socket, epoch: int, token: bytes) -> None:
        if not self._tokens.matches(epoch, token):
            logger.warning("data connection refused: epoch=%x shows a wrong token", epoch)
            self._drop(connection)
            return
        del self._pending[connection]
        self._control.unwatch(connection.fileno())
        self._admitted(connection, epoch)

    def _drop(self, connection: socket.socket) -> None:
        self._pending.pop(connection, None)
        if connection.fileno() >= 0:
            self._control.unwatch(connection.fileno())
            connection.close()


class Dials:
    """The connections of one transport that are still being made."""

    def __init__(self) -> None:
        self._pending: dict[Dial, float] = {}

    def add(self, dial: Dial) -> None:
        """Keep a dial; those that were left without an answer for long are dropped."""
        now = time.monotonic()
        for other, since in list(self._pending.items()):
            if now - since > 2 * PATIENCE_SECONDS:
                other.close()
        self._pending[dial] = now

    def discard(self, dial: Dial) -> None:
        """Forget a dial that has its outcome."""
        self._pending.pop(dial, None)

    def close(self) -> None:
        """Close whatever has no answer yet; nobody is called back."""
        for dial in list(self._pending):
            dial.close()


class Dial:
    """The dialling side: connects, shows epoch and token, waits for the answer."""

    def __init__(
        self,
        dials: Dials,
        control: ControlPlane,
        family: int,
        address: str | tuple[str, int],
        preamble: bytes,
        answered: Callable[[socket.socket, list[int]], None],
        failed: Callable[[TransportError], None],
    ) -> None:
        """Start to connect; one of `answered(connection, descriptors)` and `failed` is called."""
        self._dials = dials
        self._control = control
        self._preamble = preamble
        self._answered = answered
        self._failed = failed
        self._connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._connection.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                self._connection.connect(address)
        except OSError as error:
            self._connection.close()
            failed(TransportError(f"connect {address!r}: {error}"))
            return
        control.watch(self._connection.fileno(), self._connected, writable=True)
        dials.add(self)

    def close(self) -> None:
        """Give up without calling back; idempotent; control thread, or after its end."""
        self._dials.discard(self)
        if self._connection.fileno() >= 0:
            self._control.unwatch(self._connection.fileno())
            self._connection.close()

    def _connected(self) -> None:
        error = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(f"connect: {os.strerror(error)}")
            return
        try:
            self._connection.sendall(self._preamble)  # 24 bytes fit an empty socket buffer
        except OSError as refusal:
            self._fail(f"send: {refusal}")
            return
        self._control.watch(self._connection.fileno(), self._read)

    def _read(self) -> None:
        try:
            data, descriptors = receive_descriptors(self._connection)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"recv: {error}")
            return
        if data != ACCEPTED:
            for descriptor in descriptors:
                os.close(descriptor)
            self._fail("the peer did not accept the data connection")
            return
        self._dials.discard(self)
        self._control.unwatch(self._connection.fileno())
        self._answered(self._connection, descriptors)

    def _fail(self, reason: str) -> None:
        self.close()
        self._failed(TransportError(reason))


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """Answer the dialler, with a file descriptor beside it."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    connection.sendmsg([ACCEPTED], [rights])


def receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read the listener's one-byte answer and the descriptors that came beside it.

    Raises:
        OSError: the connection is broken, or nothing is there yet.
    """
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(descriptors.itemsize) if connection.family == socket.AF_UNIX else 0
    data, ancillary, _, _ = connection.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, descriptors.tolist()
