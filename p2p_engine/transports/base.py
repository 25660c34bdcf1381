"""The protocol of a transport: a receiving half where bytes may land, and a sending half that
writes.

All methods run under the engine's lock. Those marked so may be called in callbacks of the control
plane only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mempool import Mover
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import HEADER_BYTES
from p2p_engine.memory.jobs import Job, Moment, still_running
from p2p_engine.memory.layout import Regions
from p2p_engine.wire.messages import Grant

Endpoint: TypeAlias = dict[str, str]
Broken: TypeAlias = Callable[[TransportError], None]


class ConnectionInterrupted(TransportError):
    """A peer that had let us in ended the connection while it was made, or something was not done
    in time; the next may succeed."""


class TransportUnusable(TransportError):
    """This host or process cannot have the transport at all; another one may do."""


class WritesLost(TransportError):
    """What is written into a peer's memory does not arrive there, and nothing else tells so."""


def check_word(offset: int, arena_bytes: int) -> None:
    """Check the offset of a grant's completion word in the peer's arena.

    Raises:
        TransportError: it is not in the arena, is in its header, or is not aligned to 8 bytes.
    """
    if not HEADER_BYTES <= offset <= arena_bytes - 8 or offset % 8:
        raise TransportError(f"write: a completion word at {offset} of the arena is refused")


def check_grant(grant: Grant, nbytes: int, arena_bytes: int) -> None:
    """Check that a write of so many bytes stays in the peer's arena, as does its completion word.

    Raises:
        TransportError: it does not.
    """
    end = grant.offset + nbytes
    if end > arena_bytes:
        raise TransportError(f"write: the grant ends at {end}, the arena at {arena_bytes}")
    if grant.offset < HEADER_BYTES:
        raise TransportError(f"write: the grant at {grant.offset} is in the arena's header")
    check_word(grant.word_offset, arena_bytes)


@dataclass(frozen=True, eq=False)
class Order:
    """The work of a channel: move `source` into the granted region."""

    source: Regions
    grant: Grant
    # Orders of one lane end in the order of their starts, where that is faster for all of them.
    lane: int = 1
    # If set, the job has the checksum of the sent bytes.
    checked: bool = False
    # Passed to the job's owner, with the job, at its end.
    tag: object = None
    # Kept alive until the job has ended.
    keep: object = None
    # On a GPU: the source is read after all of these moments.
    after: tuple[Moment, ...] = ()


@dataclass(frozen=True, eq=False)
class Arrival:
    """The bytes that a transport is to receive: transfer `seq` of a sender, into `regions`."""

    source_epoch: int
    seq: int
    regions: Regions
    # These three are as in an Order.
    checked: bool = False
    tag: object = None
    keep: object = None


class Channel(Protocol):
    """The sending half of one peer pair."""

    def write(self, order: Order) -> Job:
        """Start to carry out an order; never blocks.

        The receiver learns of the end from the data path: by a completion word, or by the stream's
        last segment.

        Raises:
            TransportError: the channel is broken or closed.
        """
        ...

    def watch(self, broken: Broken) -> None:
        """Call `broken` once if the connection ends by itself; not after close."""
        ...

    def close(self, timeout: float = 1.0) -> bool:
        """End every job, then the connection; idempotent. Blocks for at most `timeout` seconds.

        Returns False if a job did not stop, so that its memory may still be read or written.
        Nothing is freed then: call it again.
        """
        ...


Connected: TypeAlias = Callable[["Channel | TransportError"], None]


class Transport(Protocol):
    """One kind of transport of one engine."""

    name: str
    receiver_writes: bool
    """The receiver's own process writes the bytes: its jobs tell when it has stopped."""
    scatters: bool
    """It can write to many regions at once, so the bytes may go straight to final memory."""
    checks: bool
    """Its writes have checksums."""

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return the endpoint that a WELCOME tells a sender; None if nothing can be received."""
        ...

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Dial a peer's endpoint; `connected` is called once, with a Channel or the error.

        In callbacks only; never blocks.
        """
        ...

    def patience(self, endpoint: Endpoint) -> float:
        """Return the seconds that `connect` may take, if that is more than the setting for a first
        answer, which is the limit otherwise."""
        ...

    def expect(self, arrival: Arrival) -> Job:
        """Start to receive; only if `receiver_writes`. Never blocks.

        Raises:
            TransportError: the sender is not connected.
        """
        ...

    def is_gone(self, source_epoch: int) -> bool:
        """Whether the sender is proven unable to write here ever again."""
        ...

    def confirm(self, source_epoch: int, confirmed: Callable[[], None]) -> None:
        """Call `confirmed`, now or later, once a sender is proven right that writes have ended
        which it has called ended before this call; perhaps never, but then it will be gone."""
        ...

    def look(self) -> None:
        """Publish the completion words of what has come, where senders cannot do so."""
        ...

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Drop the connection from a sender; idempotent; in callbacks only. If the sender's process
        writes here itself and `may_write` still, its connection stays: its end is a proof."""
        ...

    def close(self) -> bool | None:
        """Close everything; idempotent. The mover must have stopped.

        Returns False if something did not end in time, so that its memory may still be used.
        """
        ...


class PlainTransport:
    """The answers that most transports give."""

    def patience(self, endpoint: Endpoint) -> float:
        """Return 0.0: nothing takes longer than a first answer."""
        return 0.0

    def confirm(self, source_epoch: int, confirmed: Callable[[], None]) -> None:
        """Believe the sender: nothing carries its bytes on after it has stopped."""
        confirmed()

    def look(self) -> None:
        """Do nothing: senders publish their words themselves, or jobs end."""


class SenderWrites(PlainTransport):
    """The common part of transports whose senders write into the receiver's memory."""

    receiver_writes = False
    scatters = False

    def expect(self, arrival: Arrival) -> Job:
        """Raise TransportError: the sender writes."""
        raise TransportError("expect: the sender writes")


class ArenaChannel:
    """Writes straight into an arena at `base` in this process's address space, then publishes the
    word."""

    def __init__(self, mover: Mover, base: int, nbytes: int) -> None:
        self._mover = mover
        self._base = base
        self._nbytes = nbytes
        self._jobs: set[Job] = set()
        self._closed = False

    def write(self, order: Order) -> Job:
        """Copy the source, then publish the grant's completion word."""
        source, grant = order.source, order.grant
        if self._closed:
            raise TransportError("write: the channel is closed")
        check_grant(grant, source.nbytes, self._nbytes)
        self._jobs = {job for job in self._jobs if not job.done}
        job = self._mover.copy(
            source.addresses,
            source.starts + (self._base + grant.offset),
            source.lengths,
            word_address=self._base + grant.word_offset,
            word_value=grant.trailer,
            lane=order.lane,
            checked=order.checked,
            tag=order.tag,
            keep=order.keep,
        )
        self._jobs.add(job)
        return job

    def watch(self, broken: Broken) -> None:
        """Do nothing: a mapping of one's own memory never breaks."""

    def close(self, timeout: float = 1.0) -> bool:
        """Cancel and join the copies; each stops at its next slice."""
        self._closed = True
        for job in self._jobs:
            job.cancel()
        self._jobs = still_running(self._jobs, timeout)
        return not self._jobs
