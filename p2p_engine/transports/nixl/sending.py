"""The sending half: one thread writes all orders of an engine, piece by piece.

The mover gathers a piece into a slab, which is registered; NIXL writes the slab into the peer's
arena. So NIXL never reads the caller's memory, many small regions cost it one write, and a peer
that stands still keeps nothing but slabs. When all pieces of an order lie in the peer's memory, a
notification says so: NIXL delivers it after the bytes; a message on another way could overtake
them.

A write of NIXL cannot be taken back. A cancelled job ends when the pieces that NIXL has are
written. If one fails, bytes may still be on their way: the job fails, and its channel does not say
farewell, so the receiver fences it (landing.py).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mempool import Arena, Mover
from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.memory.jobs import Job, still_running
from p2p_engine.memory.layout import Int64s
from p2p_engine.transports.base import Broken, Order, check_grant
from p2p_engine.transports.nixl.library import NixlAgent

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
PIECES_OF_ONE = 2  # slabs of one job: one is gathered while the other one is written
MAX_SLABS = 64  # 256 MiB, used only if so many peers stand still
PAUSE_SECONDS = 50e-6  # between two looks at what is on its way
STOP_SECONDS = 2.0
WORD = struct.Struct("<QQ")  # a notification: the offset of a completion word, and its value
# On the connection beside NIXL's:
FAREWELL = b"\x02"  # the sender: all my writes have ended, and all went well
PROBE = b"\x03"  # the receiver: have all writes ended well that you call ended?
INTACT = b"\x04"  # the sender: yes; if not, it says nothing and closes
# And what a proof says (p2p_engine/transports/proof.py).


@dataclass(frozen=True)
class RemoteArena:
    """A peer's landing memory, as its introduction names it."""

    metadata: bytes
    base: int
    nbytes: int
    proof_offset: int  # of the memory for proofs; names their notifications, too


def mark_of(seed: bytes) -> int:
    """Return the value of the notification that ends a proof."""
    return int(seed[:15], 16)


@dataclass(eq=False)
class Piece:
    """A part of an order in a slab: gathered until it has a `handle`, then written."""

    slab: int
    start: int
    nbytes: int
    gather: Job
    handle: int | None = None


class NixlJob:
    """One order. The writer's thread moves it on; `cancel` and `wait` are for all threads."""

    def __init__(self, order: Order, channel: NixlChannel, piece_bytes: int) -> None:
        """Take an order, to be cut into pieces of at most `piece_bytes`.

        Raises:
            ValueError: the source's regions are impossible; the thread must not find out.
        """
        self.order = order
        self.tag = order.tag
        self.channel = channel
        self.piece_bytes = piece_bytes
        self.source = order.source.coalesced()
        addresses, lengths = self.source.addresses, self.source.lengths
        is_possible = addresses.dtype == lengths.dtype == np.int64 and (lengths >= 0).all()
        if not is_possible or (addresses <= 0).any():
            raise ValueError("regions have a negative length, or an address that is none")
        self.starts = self.source.starts
        self.total = self.source.nbytes
        self.nbytes = 0  # that NIXL has written
        self.begun = 0
        self.pieces: list[Piece] = []
        self.check: Job | None = None  # computes the checksum of the source
        self.state = "queued"
        self.error: str | None = None
        self._is_cancelled = False
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._ended.is_set()

    @property
    def checksum(self) -> int | None:
        """Return the CRC-32C of the bytes; None if not asked for, or not done."""
        return self.check.checksum if self.check is not None else None

    @property
    def is_stopping(self) -> bool:
        """Whether no more pieces are begun."""
        return self._is_cancelled or self.error is not None or self.channel.has_failed

    def cancel(self) -> None:
        """Ask the job to end; returns at once."""
        self._is_cancelled = True

    def wait(self, timeout: float, /) -> bool:
        """Block until the job has ended, for at most `timeout` seconds; returns whether it has."""
        return self._ended.wait(timeout)

    def fail(self, error: object) -> None:
        """Stop because the connection has failed: bytes may still be on their way."""
        self.channel.has_failed = True
        self.error = self.error or str(error)

    def end(self, state: str) -> None:
        """End the job."""
        self.state = state
        self._ended.set()

    def cut(self, start: int, nbytes: int, slab: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return what to copy to gather the bytes [start, start + nbytes) in a slab."""
        ends = self.starts + self.source.lengths
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(self.starts, start + nbytes, side="left"))
        begins = np.maximum(self.starts[first:last], start)
        lengths = np.minimum(ends[first:last], start + nbytes) - begins
        skipped = begins - self.starts[first:last]
        return self.source.addresses[first:last] + skipped, begins - start + slab, lengths


class StagingSlabs:
    """Equal pieces of registered memory, made when they are first needed."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._free: list[int] = []

    def take(self, agent: NixlAgent) -> int | None:
        """Return the address of a free slab; None if all are in use.

        Raises:
            TransportError: there is no memory, or it cannot be registered.
        """
        if not self._free and len(self._arenas) < MAX_SLABS:
            try:
                arena = Arena(PIECE_BYTES)
            except OSError as error:
                raise TransportError(f"a slab of {PIECE_BYTES} bytes: {error}") from error
            self._arenas.append(arena)
            agent.register(arena.address, PIECE_BYTES)
            self._free.append(arena.address)
        return self._free.pop() if self._free else None

    def give_back(self, address: int) -> None:
        """Free a slab that nobody reads any more."""
        self._free.append(address)

    def close(self) -> None:
        """Unmap all slabs; the agent must be closed."""
        for arena in self._arenas:
            arena.close()


class NixlWriter:
    """The sending agent of one engine, and its thread, which owns everything here but `_steps`. It
    sleeps while there is no job."""

    def __init__(self, mover: Mover, make_agent: Callable[[], NixlAgent]) -> None:
        """The agent is made for the first peer."""
        self._mover = mover
        self._make_agent = make_agent
        self._changed = threading.Condition()  # guards _steps and _is_stopping
        self._steps: collections.deque[Callable[[], None]] = collections.deque()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._agent: NixlAgent | None = None
        self._slabs = StagingSlabs()
        self._jobs: list[NixlJob] = []

    def do(self, step: Callable[[], None]) -> None:
        """Take a step in the thread; never blocks."""
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()
            if self._thread is None and not self._is_stopping:
                self._thread = threading.Thread(target=self._run, name="p2p-nixl", daemon=True)
                self._thread.start()

    def connect(self, arena: RemoteArena, told: Callable[[str | TransportError], None]) -> None:
        """Make a connection soon; `told` is called in the thread with the peer's name there."""

        def step() -> None:
            try:
                self._agent = self._agent or self._make_agent()
                told(self._agent.connect(arena.metadata))
            except TransportError as error:
                told(error)

        self.do(step)

    def forget(self, peer: str) -> None:
        """Remove a peer soon. Its jobs have ended."""
        self.do(lambda: self._agent.forget(peer) if self._agent is not None else None)

    def start(self, job: NixlJob) -> None:
        """Write an order."""
        if job.order.checked:
            source = job.source
            job.check = self._mover.check(source.addresses, source.lengths, lane=job.order.lane)
        self.do(lambda: self._jobs.append(job))

    def close(self) -> bool:
        """End the thread, then the agent and with it all writes; idempotent. Returns False if the
        thread did not end in time."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                return False
        if self._agent is not None:
            self._agent.close()
        self._slabs.close()
        for job in self._jobs:
            job.end("cancelled")
        return True

    def _run(self) -> None:
        restore_affinity()
        while self._take_steps():
            jobs = self._jobs
            has_moved = [self._advance(job) for job in jobs]
            self._jobs = [job for job in jobs if not job.done]
            if self._jobs and not any(has_moved):
                time.sleep(PAUSE_SECONDS)

    def _take_steps(self) -> bool:
        """Take the steps, or wait for one if there is no job; returns False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._jobs or self._is_stopping)
            steps = list(self._steps)
            self._steps.clear()
            if self._is_stopping:
                return False
        for step in steps:
            step()
        return True

    def _advance(self, job: NixlJob) -> bool:
        """Take one look at a job; returns whether anything has changed."""
        try:
            has_moved = sum(self._follow(job, piece) for piece in list(job.pieces)) > 0
            while self._begin(job):
                has_moved = True
            return self._finish(job) or has_moved
        except TransportError as error:
            job.fail(error)
        except Exception as error:
            logger.exception("nixl: a write failed in a way that nobody expected")
            job.fail(error)
        return True

    def _begin(self, job: NixlJob) -> bool:
        """Gather the next piece, if there is one and room for it."""
        is_full = len(job.pieces) >= PIECES_OF_ONE
        if job.is_stopping or is_full or job.begun == job.total or self._agent is None:
            return False
        slab = self._slabs.take(self._agent)
        if slab is None:
            return False
        nbytes = min(job.piece_bytes, job.total - job.begun)
        cut = job.cut(job.begun, nbytes, slab)
        gather = self._mover.copy(*cut, lane=job.order.lane, keep=(job.order, self._slabs))
        job.pieces.append(Piece(slab, job.begun, nbytes, gather))
        job.begun, job.state = job.begun + nbytes, "running"
        return True

    def _follow(self, job: NixlJob, piece: Piece) -> bool:
        """Move a piece on: from the gathering to the writing, from there to its end."""
        agent = self._agent
        if agent is None or (piece.handle is None and not piece.gather.done):
            return False
        if piece.handle is None and not job.is_stopping and piece.gather.state == "done":
            grant, arena = job.order.grant, job.channel.arena
            destination = arena.base + grant.offset + piece.start
            piece.handle = agent.write(piece.slab, destination, piece.nbytes, job.channel.peer)
            return True
        if piece.handle is not None:
            try:
                if not agent.is_complete(piece.handle):
                    return False
                job.nbytes += piece.nbytes
            except TransportError as error:
                job.fail(error)
            agent.release(piece.handle)
        job.pieces.remove(piece)
        self._slabs.give_back(piece.slab)
        return True

    def _finish(self, job: NixlJob) -> bool:
        """End a job that has nothing on its way; returns whether it has ended."""
        is_whole = job.nbytes == job.total and not job.channel.has_failed
        if job.pieces or not (is_whole or job.is_stopping):
            return False
        if job.check is not None and not job.check.done:
            return False
        if is_whole and not (job.check is not None and job.check.checksum is None):
            self._publish(job)
        elif job.error is None and not job.channel.has_failed:
            job.end("cancelled")
        if not job.done:
            job.error = job.error or "the connection has failed"
            job.end("failed")
        self._tell(job)
        return True

    def _publish(self, job: NixlJob) -> None:
        """Notify the peer, behind the last byte."""
        grant = job.order.grant
        try:
            if self._agent is not None:
                word = WORD.pack(grant.word_offset, grant.trailer)
                self._agent.notify(job.channel.peer, word)
            job.end("done")
        except TransportError as error:
            job.fail(error)

    def _tell(self, job: NixlJob) -> None:
        """Let the mover report the end, by a job that copies nothing: it wakes whoever collects."""
        if job.tag is not None:
            nothing = np.zeros(0, np.int64)
            with contextlib.suppress(ValueError):  # the mover is closed, and the engine with it
                tag = job.tag
                self._mover.copy(nothing, nothing, nothing, tag=lambda _: tag(job))  # type: ignore[operator]


class NixlChannel:
    """A channel into a peer's arena. The connection beside NIXL's proves when it has ended."""

    def __init__(
        self,
        writer: NixlWriter,
        control: ControlPlane,
        connection: socket.socket,
        peer: str,
        arena: RemoteArena,
    ) -> None:
        self._writer = writer
        self._control = control
        self._connection = connection
        self.peer = peer
        self.arena = arena
        self.has_failed = False  # for good: bytes of ended jobs may still be on their way
        self._jobs: set[Job] = set()
        self.told: Callable[[bytes], None] | None = None  # gets what the receiver says of a proof
        self._broken: Broken | None = None
        self._is_closed = False
        control.watch(connection.fileno(), self._hear)

    def say(self, data: bytes) -> None:
        """Tell the receiver a few bytes; whether it is there, `watch` tells."""
        with contextlib.suppress(OSError):
            self._connection.send(data)

    def write(self, order: Order, piece_bytes: int | None = None) -> NixlJob:
        """Start to write the source in pieces, which fit a slab, then to notify the peer."""
        if self._is_closed or self.has_failed:
            raise TransportError("write: the channel is closed")
        check_grant(order.grant, order.source.nbytes, self.arena.nbytes)
        job = NixlJob(order, self, min(piece_bytes or PIECE_BYTES, PIECE_BYTES))
        self._jobs = {each for each in self._jobs if not each.done} | {job}
        self._writer.start(job)
        return job

    def watch(self, broken: Broken) -> None:
        """Call `broken` if the receiver closes the connection."""
        self._broken = broken

    def close(self, timeout: float = 1.0) -> bool:
        """End the jobs, remove the peer, then say farewell if nothing is on its way."""
        self._is_closed = True
        for job in self._jobs:
            job.cancel()
        self._jobs = still_running(self._jobs, timeout)
        if self._jobs:
            return False
        if self._connection.fileno() >= 0:
            self._writer.forget(self.peer)
            self._control.unwatch(self._connection.fileno())
            self.say(b"" if self.has_failed else FAREWELL)
            self._connection.close()
        return True

    def _hear(self) -> None:
        """Answer the receiver's probes, pass on what else it says, and report the end of the
        connection."""
        said = heard(self._connection)
        if said and not self.has_failed:
            try:
                self._connection.sendall(INTACT * said.count(PROBE))
            except BlockingIOError:
                pass
            except OSError:
                said = b""
        if said and self.told is not None:
            self.told(said)
        if said == b"":
            self._control.unwatch(self._connection.fileno())
            self._is_closed = True
            if self._broken is not None:
                self._broken(TransportError("the receiver closed the connection"))


def heard(connection: socket.socket) -> bytes | None:
    """Return what the other end has said; b"" if it has ended, None if nothing came. Never
    blocks."""
    try:
        return connection.recv(64)
    except BlockingIOError:
        return None
    except OSError:
        return b""
