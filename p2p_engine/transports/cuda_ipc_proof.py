"""The proof that what a sender writes through a new mapping arrives in the receiver's memory.

CUDA opens the handle of a buffer, and reports that copies into it have ended well, also where the
bus leads them elsewhere: with access control between PCIe bridges, or with an IOMMU that
translates. Then no byte arrives, and nobody is told. Only the receiver can tell, so it does, before
KV goes that way. On the connection of the handshake:

    ASK ────────────────►
        ◄──────── a seed    when the proof's memory is lent to nobody else
    writes the pattern of the seed there: one half in many small pieces, by the kernel; the other
    half in one piece, by the copy engine
    WRITTEN ────────────►   reads its own memory, and compares each byte
        ◄── ARRIVED, LOST

Each proof has a new seed, so what an older one has left does not pass.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.landing import PROOF_BYTES
from p2p_engine.memory.layout import Int64s
from p2p_engine.transports.base import ConnectionInterrupted, WritesLost

logger = logging.getLogger(__name__)

Pattern = npt.NDArray[np.uint64]

ASK, WRITTEN = b"\x05", b"\x06"
ARRIVED, LOST = b"\x07", b"\x08"
SEED_BYTES = 16
PIECE_BYTES = 16 << 10


def make_pattern(seed: bytes) -> Pattern:
    """Return the bytes that prove a mapping; equal seeds give equal bytes with any NumPy."""
    return np.random.PCG64(int.from_bytes(seed, "little")).random_raw(PROOF_BYTES // 8)


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
        raise WritesLost("copies into the peer's memory do not arrive, though CUDA reports success")


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
        self._memory = device.run(lambda: device.cuda.allocate(PROOF_BYTES), 10.0)

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
            starts = np.arange(0, PROOF_BYTES // 2, PIECE_BYTES, dtype=np.int64)
            half = np.array([PROOF_BYTES // 2], np.int64)
            self._push(destination, starts, np.full(len(starts), PIECE_BYTES, np.int64))
            self._push(destination, half, PROOF_BYTES - half)
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


@dataclass(eq=False)
class Proof:
    """The proof of one sender, from its ASK on."""

    epoch: int
    connection: socket.socket
    seed: bytes


class ProofDesk:
    """The receiving half: lends the memory to one sender at a time, until that one cannot write
    there any more. In callbacks of the control plane, or when its thread has ended."""

    def __init__(
        self,
        device: Device,
        address: int,
        control: ControlPlane,
        is_gone: Callable[[int], bool],
    ) -> None:
        """`is_gone(epoch)` says that a sender cannot write any more."""
        self._device = device
        self._address = address
        self._control = control
        self._is_gone = is_gone
        self._waiting: dict[int, Proof] = {}
        self._lent: Proof | None = None
        self._check: threading.Thread | None = None

    def hear(self, epoch: int, connection: socket.socket, said: bytes) -> None:
        """Take what a sender says. One that asks again has ended its earlier copies."""
        if ASK in said:
            self._waiting[epoch] = Proof(epoch, connection, secrets.token_bytes(SEED_BYTES))
        lent = self._lent
        if lent is not None and lent.epoch == epoch and self._check is None:
            if ASK in said:
                self._lent = None
            elif WRITTEN in said:
                self._start_check(lent)
        self._lend()

    def look(self) -> None:
        """Lend the memory to the next sender if the last one is gone."""
        lent = self._lent
        if lent is not None and self._check is None and self._is_gone(lent.epoch):
            self._lent = None
        self._lend()

    def close(self, timeout: float) -> bool:
        """Lend nothing any more; returns whether nothing reads the memory. Blocks for at most
        `timeout` seconds."""
        self._waiting.clear()
        if self._check is not None:
            self._check.join(timeout)
        return self._check is None or not self._check.is_alive()

    def _lend(self) -> None:
        while self._lent is None and self._waiting:
            proof = self._waiting.pop(next(iter(self._waiting)))
            if _say(proof, proof.seed):
                self._lent = proof

    def _start_check(self, proof: Proof) -> None:
        def check() -> None:
            restore_affinity()
            try:
                has_arrived = self._compare(proof.seed)
            except TransportError as error:
                logger.warning("what a sender has written cannot be read: %s", str(error))
                has_arrived = False
            self._control.call_soon(lambda: self._tell(proof, has_arrived=has_arrived))

        self._check = threading.Thread(target=check, name="p2p-prove", daemon=True)
        self._check.start()

    def _compare(self, seed: bytes) -> bool:
        found = np.zeros(PROOF_BYTES // 8, np.uint64)
        self._device.cuda.use(self._device.index)
        _copy(self._device, found.ctypes.data, self._address)
        return bool(np.array_equal(found, make_pattern(seed)))

    def _tell(self, proof: Proof, *, has_arrived: bool) -> None:
        self._check = self._lent = None
        _say(proof, ARRIVED if has_arrived else LOST)
        if not has_arrived:
            logger.warning("what sender %x copies into our GPU does not arrive", proof.epoch)
        self._lend()


def _say(proof: Proof, data: bytes) -> bool:
    with contextlib.suppress(OSError):  # it is gone
        return proof.connection.send(data) == len(data)
    return False


def _copy(device: Device, destination: int, source: int) -> None:
    """Copy between the device and memory of this process that is not page-locked. Blocks."""
    cuda = device.cuda
    stream = cuda.create_stream()
    try:
        cuda.copy(destination, source, PROOF_BYTES, stream)
        cuda.synchronize(stream)
    finally:
        cuda.destroy_stream(stream)
