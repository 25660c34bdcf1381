"""The proof that what a sender writes into a receiver's memory by itself arrives there.

The transport's library reports that such writes have ended well also where they vanish, or lie
elsewhere: with access control between PCIe bridges, with an IOMMU that translates, with a wrong
registration. Then nobody is told. Only the receiver can tell, so it does, before KV goes that way.
On the connection of the handshake:

    ASK ────────────────►
        ◄──────── a seed    when the proof's memory is lent to nobody else
    writes the pattern of the seed there: one half in many small pieces, the other half in one
    WRITTEN ────────────►   reads its own memory, and compares each byte
        ◄── ARRIVED, LOST

Each proof has a new seed, so what an older one has left does not pass. No byte of a seed is one of
the others that a transport says on that connection.
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
from numpy.random import PCG64  # now: the first use would load it, for 100 ms

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import PROOF_BYTES

logger = logging.getLogger(__name__)

Pattern = npt.NDArray[np.uint64]

ASK, WRITTEN = b"\x05", b"\x06"
ARRIVED, LOST = b"\x07", b"\x08"
LENT_SECONDS = 6.0  # to one sender: longer than the attempt of which the proof is a part
SEED_BYTES = 32  # hexadecimal digits
PIECE_BYTES = 16 << 10  # of the half in small pieces
PATTERN_BYTES = PROOF_BYTES  # it fills the memory
HALF_BYTES = PATTERN_BYTES // 2


def make_pattern(seed: bytes) -> Pattern:
    """Return the bytes that prove a way; equal seeds give equal bytes with any NumPy."""
    return PCG64(int.from_bytes(seed, "little")).random_raw(PATTERN_BYTES // 8)


@dataclass(eq=False)
class Proof:
    """The proof of one sender, from its ASK on."""

    epoch: int
    connection: socket.socket
    seed: bytes
    lent_until: float = 0.0


class ProofDesk:
    """The receiving half: lends the memory to one sender at a time, until that one cannot write
    there any more, or has given up. In callbacks of the control plane, or when its thread has
    ended."""

    def __init__(
        self,
        control: ControlPlane,
        has_arrived: Callable[[bytes], bool],
        is_gone: Callable[[int], bool],
    ) -> None:
        """`has_arrived(seed)` reads the memory, in a thread of its own, and may raise
        TransportError; `is_gone(epoch)` says that a sender cannot write any more."""
        self._control = control
        self._has_arrived = has_arrived
        self._is_gone = is_gone
        self._waiting: dict[int, Proof] = {}
        self._lent: Proof | None = None
        self._check: threading.Thread | None = None

    def hear(self, epoch: int, connection: socket.socket, said: bytes) -> None:
        """Take what a sender says. One that asks again has ended its earlier writes."""
        if ASK in said:
            seed = secrets.token_hex(SEED_BYTES // 2).encode()
            self._waiting[epoch] = Proof(epoch, connection, seed)
        lent = self._lent
        if lent is not None and lent.epoch == epoch and self._check is None:
            if ASK in said:
                self._lent = None
            elif WRITTEN in said:
                self._start_check(lent)
        self._lend()

    def has_lent_to(self, epoch: int) -> bool:
        """Whether a sender may be writing its proof."""
        return self._lent is not None and self._lent.epoch == epoch

    def look(self, now: float) -> None:
        """Lend the memory to the next sender if the last one is gone, which may cost the transport
        something to prove, or has given up. What that one writes late can only make another proof
        fail: no earlier seed passes."""
        lent = self._lent
        if self._waiting and lent is not None and self._check is None:
            if self._is_gone(lent.epoch):
                self._lent = None
            elif now >= lent.lent_until:
                logger.warning("sender %x has not proven its mapping in time", lent.epoch)
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
                proof.lent_until = time.monotonic() + LENT_SECONDS
                self._lent = proof

    def _start_check(self, proof: Proof) -> None:
        def check() -> None:
            restore_affinity()
            has_arrived: bool | None = None
            try:
                has_arrived = self._has_arrived(proof.seed)
            except (TransportError, MemoryError) as error:
                logger.warning("what a sender has written cannot be read: %s", str(error))
            self._control.call_soon(lambda: self._tell(proof, has_arrived))

        thread = threading.Thread(target=check, name="p2p-prove", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many
            logger.warning("what a sender has written is not read: %s", str(error))
            self._tell(proof, None)
            return
        self._check = thread

    def _tell(self, proof: Proof, has_arrived: bool | None) -> None:
        """Tell the sender; None, if nobody knows, ends its connection."""
        self._check = self._lent = None
        if has_arrived is None:
            with contextlib.suppress(OSError):  # it is gone
                proof.connection.shutdown(socket.SHUT_WR)
        else:
            _say(proof, ARRIVED if has_arrived else LOST)
        if has_arrived is False:
            logger.warning("what sender %x writes into our memory does not arrive", proof.epoch)
        self._lend()


def _say(proof: Proof, data: bytes) -> bool:
    with contextlib.suppress(OSError):  # it is gone
        return proof.connection.send(data) == len(data)
    return False
