"""Proving: the sending half of a proof over NIXL, on a new channel.

The pattern goes the way of KV: gathered into slabs, written, and followed by a notification. NIXL
delivers that behind the bytes; the message on the connection only says that there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from p2p_engine.errors import TransportError
from p2p_engine.memory.jobs import Job
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.base import Connected, ConnectionInterrupted, Order, WritesLost
from p2p_engine.transports.nixl.sending import NixlChannel, mark_of
from p2p_engine.transports.proof import (
    ARRIVED,
    ASK,
    HALF_BYTES,
    LOST,
    PIECE_BYTES,
    SEED_BYTES,
    WRITTEN,
    make_pattern,
)
from p2p_engine.wire.messages import Grant

PROOF_SECONDS = 5.0  # then the next transport is tried
DIGITS = b"0123456789abcdef"


class Proving:
    """The proof of one channel, in callbacks of the control plane. Its outcome is told once, after
    PROOF_SECONDS for the seed and as many for the rest at the latest: the receiver may have lent
    the memory to a sender that stands still."""

    def __init__(self, channel: NixlChannel, connected: Connected) -> None:
        """Ask the receiver for a seed; `connected` gets the channel if what it writes arrives."""
        self._channel = channel
        self._connected = connected
        self._deadline = time.monotonic() + PROOF_SECONDS
        self._seed = b""
        self._is_over = self._is_closing = False
        channel.told = self._hear
        channel.watch(lambda error: self._end(ConnectionInterrupted(str(error))))
        channel.say(ASK)

    def look(self, now: float) -> bool:
        """Give up at the deadline; returns whether nothing is left to be done or closed."""
        if now >= self._deadline:
            text = f"the peer has not checked within {PROOF_SECONDS:g} s what we write"
            self._end(ConnectionInterrupted(text))
        return self._is_over and (not self._is_closing or self._channel.close(0.0))

    def close(self) -> None:
        """Tell nothing any more, and close the channel unless it was given away. The writer has
        ended."""
        if self._is_closing or not self._is_over:
            self._is_over = True
            self._channel.close(0.0)

    def _end(self, outcome: NixlChannel | TransportError) -> None:
        if self._is_over:
            return
        self._is_over, self._channel.told = True, None
        if isinstance(outcome, TransportError):
            self._is_closing = True
            self._channel.close(0.0)  # else `look` closes it, when its last write has ended
        self._connected(outcome)

    def _hear(self, said: bytes) -> None:
        if ARRIVED in said:
            self._end(self._channel)
        elif LOST in said:
            text = "writes into the peer's memory do not arrive, though NIXL reports success"
            self._end(WritesLost(text))
        elif len(self._seed) < SEED_BYTES:
            self._seed += bytes(byte for byte in said if byte in DIGITS)
            if len(self._seed) >= SEED_BYTES:
                self._deadline = time.monotonic() + PROOF_SECONDS  # others had the memory before
                self._write_halves()

    def _write_halves(self) -> None:
        pattern = make_pattern(self._seed)

        def write(start: int, mark: int, piece_bytes: int | None, then: Callable[[], None]) -> None:
            def ended(job: Job) -> None:
                if job.state == "done" and not self._is_over:
                    then()
                elif job.state != "done":
                    self._end(ConnectionInterrupted(f"the proof is not written: {job.error}"))

            source = one_region(pattern.ctypes.data + start, HALF_BYTES)
            offset = self._channel.arena.proof_offset
            grant = Grant(0, 0, 0, 0, 0, 0, offset + start, mark, offset)
            order = Order(source, grant, lane=0, tag=ended, keep=pattern)
            try:
                self._channel.write(order, piece_bytes)
            except TransportError as error:  # there is no such place
                self._end(error)

        def write_rest() -> None:
            write(HALF_BYTES, mark_of(self._seed), None, lambda: self._channel.say(WRITTEN))

        write(0, 0, PIECE_BYTES, write_rest)
