"""Sender and store over a network that loses, doubles and reorders: a state machine of everything
that callers, peers and time can do, with the promises of the store checked after every step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2p_engine.errors import TransferError, TransportError
from p2p_engine.memory.arena import MIN_BLOCK_BYTES, SHARE_OF_LANDING, WINDOW
from p2p_engine.receive.ledger import LandingState
from p2p_engine.send.shipment import ChunkState
from p2p_engine.wire.messages import Grant, TransferKey, decode
from tests.doubles.world import MAX_BLOCKS, PAGES, PEER, SETTINGS, Receiving, World, WorldJob

KEYS = [TransferKey("request-1"), TransferKey("request-2")]
keys = st.sampled_from(KEYS)
bindings = st.sampled_from([b"", b"", b"", b"other"])
CHUNKS = [(0, 4), (0, 2), (2, 2), (1, 1), (3, 1), (0, 1), (1, 3)]  # first block, number
DISASTERS = ["broken", "lost", "stuck", "silent", "restarted", "corrupted"]
index = st.integers(0, 1 << 16)


class TransferMachine(RuleBasedStateMachine):
    """The rules; a subclass says who writes the bytes."""

    receiver_writes = False
    checksum = False
    chunk_bytes = SETTINGS.chunk_bytes
    kv_buffer_size = SETTINGS.kv_buffer_size
    largest_landing = 0  # that the receiver names: 0 says that it has no limit
    scale = 1  # so many blocks of the world are one of a rule's
    num_walks = 300

    def __init__(self) -> None:
        super().__init__()
        config = dataclasses.replace(
            SETTINGS,
            checksum=self.checksum,
            chunk_bytes=self.chunk_bytes,
            kv_buffer_size=self.kv_buffer_size,
        )
        self.world = World(
            receiver_writes=self.receiver_writes,
            config=config,
            num_blocks=self.scale * MAX_BLOCKS,
        )
        self.world.largest_landing = self.largest_landing

    # Callers

    @rule(
        key=keys,
        binding=bindings,
        blocks=st.sampled_from(CHUNKS),
        ready=st.sampled_from([True, True, False]),
        is_held=st.booleans(),
    )
    def send(
        self,
        key: TransferKey,
        binding: bytes,
        blocks: tuple[int, int],
        ready: bool,
        is_held: bool,
    ) -> None:
        first, num = (self.scale * block for block in blocks)
        self.world.send(key, binding, first, num, ready=ready, is_held=is_held)

    @rule(
        key=keys,
        binding=bindings,
        first=st.integers(0, MAX_BLOCKS - 1),
        is_pulled=st.booleans(),
    )
    def receive(self, key: TransferKey, binding: bytes, first: int, is_pulled: bool) -> None:
        with contextlib.suppress(TransferError):
            self.world.receive(key, binding, self.scale * first, is_pulled=is_pulled)

    @precondition(lambda self: self.world.sendings)
    @rule(which=index)
    def mark_ready(self, which: int) -> None:
        self.world.mark_ready(_choose(self.world.sendings, which))

    @precondition(lambda self: self.world.sendings or self.world.receivings)
    @rule(which=index)
    def cancel(self, which: int) -> None:
        _choose(self.world.transfers(), which).cancel("the test says so")

    @rule(
        key=keys,
        binding=bindings,
        kind=st.sampled_from(["discard", "leave", "abandon", "drop landed"]),
    )
    def let_go(self, key: TransferKey, binding: bytes, kind: str) -> None:
        if kind == "discard":
            self.world.store.discard((key, binding), "not wanted")
        elif kind == "leave":
            self.world.store.leave((key, binding), is_pulled=True)
        elif kind == "abandon":
            self.world.sender.abandon((key, binding), PEER, "it will never be complete")
        else:
            self.world.store.drop_landed()

    @rule(key=keys, binding=bindings, kind=st.sampled_from(["keep", "drop", "renew", "want"]))
    def keep(self, key: TransferKey, binding: bytes, kind: str) -> None:
        if kind == "keep":
            self.world.keep((key, binding))
        elif kind == "drop":
            self.world.drop((key, binding))
        elif kind == "renew":
            self.world.renew()
        else:
            self.world.want((key, binding))

    # Time, memory, network

    @rule(seconds=st.sampled_from([0.3, 1.0, 7.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.jobs)
    @rule(which=index, limit=st.sampled_from([512, 1 << 20]))
    def move(self, which: int, limit: int) -> None:
        self.world.move(_choose(self.world.jobs, which), limit)

    @precondition(lambda self: self.world.channels)
    @rule(which=index)
    def move_stream(self, which: int) -> None:
        self.world.move_stream(_choose(sorted(self.world.channels), which))

    @precondition(lambda self: self.world.ended)
    @rule()
    def drain(self) -> None:
        self.world.drain()

    @rule(turns=st.integers(1, 3))
    def converse(self, turns: int) -> None:
        self.world.connect()
        for _ in range(turns):
            self.world.deliver_all()

    @precondition(lambda self: self.world.network)
    @rule(which=index, fate=st.sampled_from(["overtakes", "is doubled", "is lost"]))
    def one_message(self, which: int, fate: str) -> None:
        which %= len(self.world.network)
        if fate == "is lost":
            self.world.network.pop(which)
        else:
            self.world.deliver(which, keep=fate == "is doubled")

    @rule(disaster=st.sampled_from(["", "", "", *DISASTERS]))
    def meet_with_disaster(self, disaster: str) -> None:
        if disaster == "broken":
            self.world.break_channel(TransportError("the data connection broke"))
        elif disaster == "lost":
            self.world.lose_connection()
        elif disaster == "stuck":
            self.world.is_stuck = not self.world.is_stuck
        elif disaster == "silent":
            self.world.forget_session(self.world.epoch)
        elif disaster == "restarted":
            self.world.restart_sender()
        elif disaster == "corrupted" and self.checksum:
            self.world.num_to_corrupt = 1

    # Promises

    @invariant()
    def accounted_is_live(self) -> None:
        world = self.world
        world.arena.check()
        landings = world.landings()
        live = world.store.live_bytes()
        in_blocks = sum(item.nbytes for item in landings if item.space is None)
        in_arena = sum(item.space.nbytes for item in landings if item.space is not None)
        assert live["blocks"] == in_blocks
        assert live["buffer"] + live["pool"] == in_arena

    @invariant()
    def what_a_sender_may_write_is_reserved(self) -> None:
        for epoch, seq, offset, nbytes in self._writable():
            owner = next((item for item in self.world.landings() if item.id == (epoch, seq)), None)
            assert owner is not None, f"chunk {seq} may write into a free region"
            assert owner.state in (LandingState.GRANTED, LandingState.QUARANTINED) or _is_over(
                self.world, owner
            )
            assert owner.space.offset == offset
            assert owner.space.nbytes >= nbytes

    @invariant()
    def no_byte_after_the_end(self) -> None:
        for receiving in self.world.receivings:
            if receiving.at_end is not None:
                assert (receiving.memory == receiving.at_end).all()
        for job in self.world.jobs:
            if job.destinations is not None and not job.done:
                for receiving in self.world.receivings:
                    assert not (receiving.transfer.released and _touches(job, receiving))

    @invariant()
    def one_writer_of_a_final_byte(self) -> None:
        writers = [job for job in self.world.jobs if job.kind in ("expect", "scatter")]
        open_ends = [job.destinations for job in writers if not job.done and job.destinations]
        pieces = sorted(
            (start, start + length)
            for regions in open_ends
            for start, length in zip(regions.addresses, regions.lengths, strict=True)
        )
        for (_, end), (start, _) in itertools.pairwise(pieces):
            assert end <= start, "two jobs write the same memory"

    @invariant()
    def what_has_landed_stays_right(self) -> None:
        """vLLM goes on with the blocks of a failed load that are not reported as missing."""
        for receiving in self.world.receivings:
            assert receiving.landed_blocks_are_right()

    @invariant()
    def no_read_after_release(self) -> None:
        for job in self.world.jobs:
            if job.kind == "write" and not job.done:
                for sending in self.world.sendings:
                    is_free = (
                        sending.transfer.done if sending.is_held else sending.transfer.released
                    )
                    assert not (is_free and reads(job, sending.memory))

    @invariant()
    def few_chunks_of_a_send_are_open(self) -> None:
        for shipment in self.world.sender._shipments.values():
            assert 0 < len(shipment.chunks) <= SHARE_OF_LANDING
            first_tries = [chunk.state for chunk in shipment.chunks.values() if not chunk.attempt]
            assert sum(state is not ChunkState.WRITTEN for state in first_tries) <= WINDOW
            assert shipment.num_taken <= shipment.manifest.num_blocks

    @invariant()
    def only_what_is_kept_is_left_for_the_next(self) -> None:
        assert self.world.store._left.keys() <= set(self.world.kept())

    @invariant()
    def success_means_right(self) -> None:
        for receiving in self.world.receivings:
            if receiving.transfer.done and receiving.transfer.error is None:
                assert receiving.is_right()

    @invariant()
    def each_transfer_ends_once(self) -> None:
        ended = [item for item in self.world.receivings if item.transfer.done]
        assert sum(self.world.counters.outcomes.values()) == len(ended)
        for sending in self.world.sendings:
            assert len(sending.ended_with) == sending.transfer.done

    def check_promises(self) -> None:
        """Check every invariant, outside hypothesis."""
        self.accounted_is_live()
        self.what_a_sender_may_write_is_reserved()
        self.no_byte_after_the_end()
        self.one_writer_of_a_final_byte()
        self.what_has_landed_stays_right()
        self.no_read_after_release()
        self.few_chunks_of_a_send_are_open()
        self.only_what_is_kept_is_left_for_the_next()
        self.success_means_right()
        self.each_transfer_ends_once()

    def teardown(self) -> None:
        """Whatever happened, everything ends once the world works as it should."""
        try:
            self.world.is_stuck = False
            self.world.settle()
            self.check_promises()
            assert sum(self.world.store.live_bytes().values()) == 0
        finally:
            self.world.close()

    def _writable(self) -> list[tuple[int, int, int, int]]:
        """(epoch, seq, offset, bytes) of every region that a sender writes, or will if it likes."""
        if self.receiver_writes:
            return []
        base = self.world.arena.arena.address
        writable = [
            (job.epoch, job.seq, int(job.destinations.addresses[0]) - base, job.nbytes)
            for job in self.world.jobs
            if job.kind == "write" and not job.done and job.destinations is not None
        ]
        grants = [chunk.grant for chunk in self.world.sender._chunks.values()
                  if chunk.state is ChunkState.GRANTED and chunk.grant is not None]  # fmt: skip
        grants += [message for message in self._in_flight() if self._is_acceptable(message)]
        return writable + [
            (self.world.epoch, grant.seq, grant.offset, 0) for grant in grants if grant.num_blocks
        ]

    def _in_flight(self) -> list[Any]:
        return [decode(frame) for to, frame in self.world.network if to == "sender"]

    def _is_acceptable(self, message: Any) -> bool:
        if not isinstance(message, Grant) or message.destination_epoch != self.world.epoch:
            return False
        chunk = self.world.sender._chunks.get(message.seq)
        return (
            chunk is not None
            and chunk.state is ChunkState.OFFERED
            and chunk.attempt == message.attempt
        )


def _choose(items: list[Any], which: int) -> Any:
    return items[which % len(items)]


def _is_over(world: World, landing: Any) -> bool:
    """Whether the landing's word is there: its writer has finished, or is about to say so."""
    return bool(world.store._placement.is_whole(landing))


def _touches(job: WorldJob, receiving: Receiving) -> bool:
    assert job.destinations is not None
    low = receiving.memory.ctypes.data
    inside = (job.destinations.addresses >= low) & (
        job.destinations.addresses < low + receiving.memory.nbytes
    )
    return bool(inside.any())


def reads(job: WorldJob, memory: Any) -> bool:
    """Whether a job reads some of this memory."""
    low = memory.ctypes.data
    return bool(
        ((job.addresses.addresses >= low) & (job.addresses.addresses < low + memory.nbytes)).any()
    )


class WhenSenderWrites(TransferMachine):
    """As shm: the sender writes into the store's arena."""


class WhenReceiverWrites(TransferMachine):
    """As tcp: a stream, scattered by the receiver, straight into final blocks where it can."""

    receiver_writes = True


class CheckedSenderWrites(WhenSenderWrites):
    """With checksums, and bytes that change on their way."""

    checksum = True


class CheckedReceiverWrites(WhenReceiverWrites):
    """With checksums, and bytes that change on their way."""

    checksum = True


class CutSenderWrites(WhenSenderWrites):
    """In chunks of one block each, because the receiver's memory is small."""

    largest_landing = 8192


class CutReceiverWrites(CheckedReceiverWrites):
    """In chunks of two blocks, with checksums."""

    chunk_bytes = 2 * sum(PAGES)


class _Windows:
    """In more chunks than a sender has open at a time."""

    chunk_bytes = sum(PAGES)
    kv_buffer_size = 2 * SHARE_OF_LANDING * MIN_BLOCK_BYTES
    scale = 3
    num_walks = 60


class WindowedSenderWrites(_Windows, WhenSenderWrites):
    """Chunk after chunk, each into memory that was offered for it."""


class WindowedReceiverWrites(_Windows, CheckedReceiverWrites):
    """Chunk after chunk of one stream, with checksums."""
