"""Wire: the control messages of one pair of engines, over one TCP connection.

For the device's thread. A frame is 40 bytes; ID is followed by NCCL's unique id. Each direction has
one wire, which the sender dials. If it ends, the other side is gone or has given up.

    S → R  NEW group, channels       R → S  ACK group          the receiver will join
           order 1: the first one of either process, which may take longer to make
           seq 1: both sides register their memory
           offset: the bytes of a piece; the last one of a burst may be smaller
    S → R  ID group, unique id       R → S  UP group           its side of the communicator is made
    S → R  ASK order, seq, burst     R → S  GO or REFUSE order
    S → R  STOP seq                                            no more bursts will come
    S → R  SENT seq                                            its kernels ended, none was aborted
    S → R  END group                 R → S  IDLE group         end it, unless you need it
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device
from p2p_engine.transports.nccl.library import UNIQUE_ID_BYTES

_FRAME = struct.Struct("<BxxxIQQQQ")
_READ_BYTES = 1 << 16
_MOST_UNSENT_BYTES = 1 << 20


class FrameKind(enum.IntEnum):
    """See the module's docstring."""

    NEW = 1
    ACK = 2
    ID = 3
    UP = 4
    ASK = 5
    GO = 6
    REFUSE = 7
    STOP = 8
    END = 9
    IDLE = 10
    SENT = 11


class Frame(NamedTuple):
    """One message; fields that a kind does not use are zero."""

    kind: FrameKind
    group: int
    order: int = 0
    seq: int = 0
    offset: int = 0
    nbytes: int = 0
    unique_id: bytes = b""


class Wire:
    """One end of a connection; owns the socket."""

    def __init__(
        self,
        device: Device,
        connection: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[TransportError], None],
    ) -> None:
        """`on_end` is called once when the connection ends by itself."""
        self._device = device
        self._connection = connection
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)
        device.watch(connection.fileno(), self._serve)

    def say(self, frame: Frame) -> None:
        """Send a frame; never blocks. After the end, nothing is sent."""
        if self._connection.fileno() >= 0:
            self._unsent += _FRAME.pack(*frame[:-1]) + frame.unique_id
            self._flush()

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._connection.fileno() >= 0:
            self._device.unwatch(self._connection.fileno())
            self._connection.close()

    def _serve(self) -> None:
        self._flush()
        try:
            data = self._connection.recv(_READ_BYTES) if self._connection.fileno() >= 0 else b""
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"recv: {error}")
            return
        if not data:
            self._fail("the peer closed the connection")
            return
        self._received += data
        self._device.run_posted()  # posted calls first: the peer's frame may depend on them
        try:
            self._hear()
        except TransportError as error:
            self._fail(str(error))

    def _hear(self) -> None:
        while len(self._received) >= _FRAME.size and self._connection.fileno() >= 0:
            number, group, order, seq, offset, nbytes = _FRAME.unpack_from(self._received)
            try:
                kind = FrameKind(number)
            except ValueError:
                raise TransportError(f"a frame of unknown kind {number} came") from None
            end = _FRAME.size + (UNIQUE_ID_BYTES if kind is FrameKind.ID else 0)
            if len(self._received) < end:
                return
            unique_id = bytes(self._received[_FRAME.size : end])
            del self._received[:end]
            self._on_frame(Frame(kind, group, order, seq, offset, nbytes, unique_id))

    def _flush(self) -> None:
        if not self._unsent or self._connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # the next read reports the error
            del self._unsent[: self._connection.send(self._unsent)]
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            self._device.post(lambda: self._fail("the peer does not read"))
        self._device.watch(self._connection.fileno(), self._serve, writable=bool(self._unsent))

    def _fail(self, reason: str) -> None:
        if self._connection.fileno() >= 0:
            self.close()
            self._on_end(TransportError(reason))
