"""The start of a data connection: the dialler sends its epoch and a token, the listener answers.

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
from dataclasses import dataclass, field

from p2p_engine.bounded import RateLimitedWarnings
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.resolver import Answer
from p2p_engine.errors import PeerUnreachable, TransportError
from p2p_engine.wire.addresses import family_of

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
PREAMBLE = struct.Struct(f"<Q{TOKEN_BYTES}s")  # the dialler's epoch and its token
_CREDENTIALS = struct.Struct("iII")  # of the process at a Unix socket: pid, uid, gid
ACCEPTED = b"\x01"
PATIENCE_SECONDS = 5.0
TOKEN_SECONDS = 30.0
REST_SECONDS = 1.0
MAX_SILENCE_SECONDS = 3600.0  # enough for any kernel's timers
MAX_PENDING = 128
MAX_PENDING_OF_ONE = 32  # address, or process where it is known


class Tokens:
    """One token for each sender that was welcomed. It allows one connection, for TOKEN_SECONDS.

    It crosses the network in clear text. A stranger that reads it in use cannot use it again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[int, tuple[bytes, float]] = {}  # with the time of its making

    def __len__(self) -> int:
        """Return how many tokens are stored, expired ones included."""
        return len(self._tokens)

    def make(self, epoch: int) -> str:
        """Return the token of an epoch. It stays the same until it is used, or half of its time is
        over."""
        now = self._clock()
        token, drawn_at = self._tokens.get(epoch, (b"", -TOKEN_SECONDS))
        if now - drawn_at >= TOKEN_SECONDS / 2:
            token = os.urandom(TOKEN_BYTES)
            self._tokens[epoch] = token, now
        return token.hex()

    def redeem(self, epoch: int, token: bytes) -> bool:
        """Use a token up; returns whether it is the epoch's and still valid. Compares in constant
        time."""
        known, drawn_at = self._tokens.get(epoch, (b"", 0.0))
        if not hmac.compare_digest(known, token) or self._clock() - drawn_at >= TOKEN_SECONDS:
            return False
        del self._tokens[epoch]
        return True

    def forget(self, epoch: int) -> None:
        """Drop an epoch's token."""
        self._tokens.pop(epoch, None)


@dataclass
class Stranger:
    """A connection that has not sent its token yet."""

    address: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)


def listen(
    family: socket.AddressFamily, address: tuple[str, int] | str, receive_buffer_bytes: int = 0
) -> socket.socket:
    """Return a listener on an address. If `receive_buffer_bytes` is set, accepted connections have
    a buffer of that size.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if receive_buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


class Door:
    """The listening side: admits connections that send a valid token."""

    def __init__(
        self,
        control: ControlPlane,
        listener: socket.socket,
        tokens: Tokens,
        admitted: Callable[[socket.socket, int], None],
    ) -> None:
        """`admitted(connection, epoch)` owns the connection from then on. If it cannot take it
        over, it raises OSError, and the connection ends."""
        self._control = control
        self._listener = listener
        self._tokens = tokens
        self._admitted = admitted
        self._pending: dict[socket.socket, Stranger] = {}  # the oldest first
        self._warnings = RateLimitedWarnings(logger)
        self._rest_until = 0.0  # if no descriptor is left, accepting pauses
        listener.setblocking(False)
        control.watch(listener.fileno(), self._accept)
        control.watch_time(self._tick)

    def __len__(self) -> int:
        """Return how many connections have not sent their token yet."""
        return len(self._pending)

    def close(self) -> None:
        """Close the listener and the connections that were not admitted."""
        self._control.unwatch_time(self._tick)
        for connection in [*self._pending, self._listener]:
            self._drop(connection)

    def _tick(self, now: float) -> None:
        for connection, stranger in list(self._pending.items()):
            if now < stranger.deadline:
                break
            self._drop(connection)
        if 0 < self._rest_until <= now:
            self._wake(now)

    def _wake(self, now: float) -> None:
        try:
            self._control.watch(self._listener.fileno(), self._accept)
            self._rest_until = 0.0
        except OSError as error:  # the kernel has no room for it yet
            logger.error("no data connection can be taken for %g s: %s", REST_SECONDS, str(error))
            self._rest_until = now + REST_SECONDS

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptor, or no memory
            logger.error("no data connection can be taken for %g s: %s", REST_SECONDS, str(error))
            self._control.unwatch(self._listener.fileno())
            self._rest_until = time.monotonic() + REST_SECONDS
            return
        address = _address_of(connection)
        same = sum(stranger.address == address for stranger in self._pending.values())
        if len(self._pending) >= MAX_PENDING or same >= MAX_PENDING_OF_ONE:
            connection.close()
            return
        connection.setblocking(False)
        self._pending[connection] = Stranger(address, time.monotonic() + PATIENCE_SECONDS)
        try:
            self._control.watch(connection.fileno(), lambda: self._read(connection))
        except OSError as error:  # the kernel bounds what may be watched
            self._warnings.warn("data connection refused: %s", str(error))
            self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        received = self._pending[connection].received
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
        if not self._tokens.redeem(epoch, token):
            self._warnings.warn("data connection refused: epoch=%x shows a wrong token", epoch)
            self._drop(connection)
            return
        del self._pending[connection]
        self._control.unwatch(connection.fileno())
        try:
            self._admitted(connection, epoch)
        except OSError as error:  # no descriptor, or no memory
            logger.error("epoch %x cannot be let in: %s", epoch, str(error))
            connection.close()

    def _drop(self, connection: socket.socket) -> None:
        self._pending.pop(connection, None)
        if connection.fileno() >= 0:
            self._control.unwatch(connection.fileno())
            connection.close()


class Dials:
    """The dials of one transport that have no outcome yet."""

    def __init__(self) -> None:
        self._pending: dict[Dial, float] = {}

    def add(self, dial: Dial) -> None:
        """Keep a dial; closes those that have had no answer for long."""
        now = time.monotonic()
        for other, since in list(self._pending.items()):
            if now - since > 2 * PATIENCE_SECONDS:
                other.close()
        self._pending[dial] = now

    def discard(self, dial: Dial) -> None:
        """Forget a dial that has its outcome."""
        self._pending.pop(dial, None)

    def close(self) -> None:
        """Close all dials without an outcome; nothing is called back."""
        for dial in list(self._pending):
            dial.close()


class Dial:
    """The dialling side: connects, sends epoch and token, waits for the answer."""

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
        """Start to connect; either `answered(connection, descriptors)` or `failed` is called, once.
        If `answered` cannot take the connection over, it raises OSError, and `failed` is called."""
        self._dials = dials
        self._control = control
        self._preamble = preamble
        self._answered = answered
        self._failed = failed
        try:
            self._connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            failed(TransportError(f"socket: {error}"))
            return
        self._connection.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                self._connection.connect(address)
        except (OSError, ValueError, OverflowError) as error:  # the address may be invalid
            self._connection.close()
            failed(TransportError(f"connect {address!r}: {error}"))
            return
        dials.add(self)
        self._watch(self._connected, writable=True)

    def close(self) -> None:
        """Give up without calling back; idempotent. In the control thread, or after it has
        ended."""
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
        self._watch(self._read)

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
        try:
            self._answered(self._connection, descriptors)
        except OSError as error:  # no descriptor, or no memory
            self._fail(f"take over: {error}")

    def _watch(self, callback: Callable[[], None], *, writable: bool = False) -> None:
        try:
            self._control.watch(self._connection.fileno(), callback, writable=writable)
        except OSError as error:  # the kernel bounds what may be watched
            self._fail(f"watch: {error}")

    def _fail(self, reason: str) -> None:
        self.close()
        self._failed(TransportError(reason))


def dial(
    dials: Dials,
    control: ControlPlane,
    host: str,
    port: int,
    preamble: bytes,
    answered: Callable[[socket.socket, list[int]], None],
    failed: Callable[[TransportError], None],
) -> None:
    """Resolve a host's name, then dial its port; never blocks."""

    def resolved(answer: Answer) -> None:
        if isinstance(answer, PeerUnreachable):
            failed(TransportError(f"connect: {answer}"))
            return
        address = (answer[0], port)
        Dial(dials, control, family_of(answer[0]), address, preamble, answered, failed)

    control.resolve(host, resolved)


def end_by_silence(connection: socket.socket, seconds: float) -> None:
    """Let the kernel probe an idle connection: a firewall may drop it without telling either
    end."""
    seconds = min(seconds, MAX_SILENCE_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 10)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def _address_of(connection: socket.socket) -> str:
    """Return the name under which a dialler's connections are counted."""
    with contextlib.suppress(OSError):
        if connection.family != socket.AF_UNIX:
            return str(connection.getpeername()[0])
        size = _CREDENTIALS.size
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return f"process {_CREDENTIALS.unpack(credentials)[0]}"
    return ""


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """Answer the dialler, and pass it a file descriptor."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    connection.sendmsg([ACCEPTED], [rights])


def receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read the listener's one-byte answer and the descriptors that came with it.

    Raises:
        OSError: the connection is broken, or nothing has arrived yet.
    """
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(descriptors.itemsize) if connection.family == socket.AF_UNIX else 0
    data, ancillary, _, _ = connection.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, descriptors.tolist()
