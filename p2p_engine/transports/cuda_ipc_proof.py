"""The proof over CUDA IPC: how a mapping is written through, and how the buffer is read.

CUDA opens the handle of a buffer, and reports that copies into it have ended well, also where the
bus leads them elsewhere. `proof.py` says what the two sides tell each other. The kernel copies the
half in small pieces, the copy engine the other one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device
from p2p_engine.memory.layout import Int64s
from p2p_engine.transports.base import ConnectionInterrupted, WritesLost
from p2p_engine.transports.proof import (
    ARRIVED,
    ASK,
    HALF_BYTES,
    PATTERN_BYTES,
    PIECE_BYTES,
    SEED_BYTES,
    WRITTEN,
    Pattern,
    make_pattern,
)


def prove(connection: socket.socket, deadline: float, write: Callable[[Pattern], None]) -> None:
    """Have the receiver check what `write` writes into its memory. Blocks until `deadline`, on the
    monotonic clock, and for `write`.

    Raises:
        ConnectionInterrupted: the receiver does not answer.
        WritesLost: it does not arrive.
    """
    try:
        connection.send(ASK)
        write(make_pattern(_receive(connection, SEED_BYTES, deadline)))
        connection.send(WRITTEN)
        verdict = _receive(connection, len(ARRIVED), deadline)
    except OSError as error:
        text = f"the peer does not check what we write: {error}"
        raise ConnectionInterrupted(text) from error
    finally:
        connection.setblocking(False)
    if verdict != ARRIVED:
        raise WritesLost(
            "copies into the peer's memory do not arrive, though CUDA reports success; NCCL's own "
            "may not either: start both instances with NCCL_P2P_DISABLE=1"
        )


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(nbytes - len(received))
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
    return received


class ProofWriter:
    """The sending half of one engine: device memory to copy from. For threads that may block."""

    def __init__(self, device: Device) -> None:
        """Allocate the memory. Blocks.

        Raises:
            TransportError: the device has too little.
        """
        self._device = device
        self._lock = threading.Lock()  # one proof at a time
        self._memory = device.run(lambda: device.cuda.allocate(PATTERN_BYTES), 10.0)

    def write(self, destination: int, pattern: Pattern, deadline: float) -> None:
        """Copy a pattern to a peer's memory as KV is copied. Returns, or raises, only when nothing
        of it runs any more; waits until `deadline` for another proof.

        Raises:
            ConnectionInterrupted: another proof has not ended.
            TransportError: the device refuses.
        """
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ConnectionInterrupted("another peer's proof has not ended")
        try:
            _copy(self._device, self._memory, pattern.ctypes.data)
            starts = np.arange(0, HALF_BYTES, PIECE_BYTES, dtype=np.int64)
            half = np.array([HALF_BYTES], np.int64)
            self._push(destination, starts, np.full(len(starts), PIECE_BYTES, np.int64))
            self._push(destination, half, half)
        finally:
            self._lock.release()

    def _push(self, destination: int, starts: Int64s, lengths: Int64s) -> None:
        word = np.zeros(1, np.int64)  # ours: with one, the device knows that a peer is written to
        job = self._device.copy(
            starts + self._memory, starts + destination, lengths,
            word_address=word.ctypes.data, word_value=1, keep=word,
        )  # fmt: skip
        job.wait(threading.TIMEOUT_MAX)
        if job.state != "done":
            raise TransportError(f"a copy into the peer's memory: {job.error or job.state}")

    def close(self) -> None:
        """Free the memory, unless a proof still runs."""
        if self._lock.acquire(blocking=False):
            cuda = self._device.cuda
            with contextlib.suppress(TransportError):  # the device has failed
                self._device.run(lambda: cuda.free(self._memory), 10.0)


def has_arrived(device: Device, address: int, seed: bytes) -> bool:
    """Whether a seed's pattern lies in our device's memory. Blocks.

    Raises:
        TransportError: the memory cannot be read.
    """
    found = np.zeros(PATTERN_BYTES // 8, np.uint64)
    device.cuda.use(device.index)
    _copy(device, found.ctypes.data, address)
    return bool(np.array_equal(found, make_pattern(seed)))


def _copy(device: Device, destination: int, source: int) -> None:
    """Copy between the device and memory of this process that is not page-locked. Blocks."""
    cuda = device.cuda
    stream = cuda.create_stream()
    try:
        cuda.copy(destination, source, PATTERN_BYTES, stream)
        cuda.synchronize(stream)
    finally:
        cuda.destroy_stream(stream)
