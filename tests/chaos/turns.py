"""A chaos child's part in turns of a session: what prefill keeps back of a prompt, and what decode
has stashed of an earlier one.

A name is NUM_BLOCKS blocks over two layers. What they hold, and what an engine is told of them,
follows from the name, so both sides know what is right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from p2p_engine import EngineConfig, TransferKey
from p2p_engine.connector.intent import stash_key
from p2p_engine.errors import P2pError
from p2p_engine.memory.paged import Beginning, PagedSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.peers.stash_notes import RECALL_SECONDS, Recalling
from p2p_engine.transfer import Transfer
from tests.chaos.child import REAL_CLOCK, ChaosEngine, Open, after, before
from tests.rigs.engines import PagedMemory
from tests.rigs.tensors import pattern
from tests.support import eventually

NUM_BLOCKS, NUM_KEPT_BACK = 16, 10
NUM_LAYERS, BLOCK_TOKENS = 2, 8
CUTS = (6, 11, NUM_BLOCKS)  # blocks at which a stash can be cut
GARBAGE = 0xEE


def memory_of(name: str, page_bytes: int) -> PagedMemory:
    """The blocks of a name."""
    memory = PagedMemory(NUM_BLOCKS, NUM_LAYERS, page_bytes)
    memory.data[:] = pattern(name, memory.data.nbytes).numpy().reshape(memory.data.shape)
    return memory


def binding_of(name: str, num_blocks: int = NUM_BLOCKS) -> bytes:
    """What stands for the tokens of so many of its blocks."""
    return f"{num_blocks} of {name}".encode()[:64]


class Claimed:
    """The place for some blocks of a name, of which the first ones are known otherwise."""

    def __init__(self, name: str, page_bytes: int, first: int, end: int = NUM_BLOCKS) -> None:
        self._name, self._page_bytes = name, page_bytes
        self._wanted = np.arange(first, end)
        self._memory = PagedMemory(NUM_BLOCKS, NUM_LAYERS, page_bytes)
        self.sink = self._memory.sink(self._wanted.tolist(), first, end * BLOCK_TOKENS)

    def is_right(self, is_whole: bool) -> bool:
        """Whether each wanted block is right, unless it is called missing, and no other one was
        touched."""
        here, right = self._memory.data, memory_of(self._name, self._page_bytes).data
        # No set functions of numpy: they import, for which there may be no descriptor left.
        wanted = set(self._wanted.tolist())
        missing = set() if is_whole else set(self.sink.missing_blocks().tolist())
        landed, others = sorted(wanted - missing), sorted(set(range(NUM_BLOCKS)) - wanted)
        return bool((here[:, landed] == right[:, landed]).all() and not here[:, others].any())


class TurnsEngine(ChaosEngine):
    """The commands of a ChaosChild, with those of turns."""

    def __init__(self, config: EngineConfig, trap: Connection) -> None:
        super().__init__(config, trap)
        self._kept_back: dict[str, tuple[Open, PagedSource]] = {}
        self._stashes: list[Transfer] = []
        self._promises: list[Callable[[], bool]] = []  # whether each stands, or is lost
        reach, holds = self._trap.reach, self.engine._parts.holds
        holds.hold = after(holds.hold, lambda *_, **__: reach("hold"))  # type: ignore[method-assign]
        holds.stash = after(holds.stash, lambda *_, **__: reach("stash"))  # type: ignore[method-assign]
        holds._copied = before(holds._copied, lambda *_: reach("copied"))  # type: ignore[method-assign]
        withdraw = holds._cancel_transfer
        holds._cancel_transfer = after(withdraw, lambda *_: reach("withdraw"))  # type: ignore[method-assign]

    # Who promises

    def keep_back(self, names: Sequence[str], page_bytes: int, peer: str) -> None:
        """Push prompts, but for their beginnings, and hold these."""
        to = PeerAddress(peer)
        for name in names:
            memory, key, binding = memory_of(name, page_bytes), TransferKey(name), binding_of(name)
            source = _blocks(memory, NUM_KEPT_BACK, NUM_BLOCKS)
            pushed = self.engine.send(key, to, source, binding=binding, generation=1)
            self._promise(name, pushed, memory, source)
            self._promises.append(lambda pushed=pushed: pushed.done)  # type: ignore[misc]
            source = _blocks(memory, 0, NUM_KEPT_BACK)
            held = self.engine.hold(key, source, binding=binding, generation=1)
            self._kept_back[name] = self._promise(name, held, memory, source), source

    def press(self, names: Sequence[str], peer: str) -> None:
        """Push what was kept back after all: its blocks are needed."""
        for name in names:
            held, source = self._kept_back[name]
            held.reuse, reuse = None, held.reuse
            held.transfer.cancel("its blocks are needed")
            pushed = self.engine.send(
                TransferKey(name), PeerAddress(peer), source, binding=binding_of(name), generation=1
            )
            self._open.append(Open(name, pushed, reuse=reuse))

    def stash(self, names: Sequence[str], page_bytes: int) -> None:
        """Note stashes in the directory, and make them."""
        for name in names:
            memory, key = memory_of(name, page_bytes), stash_key(TransferKey(name))
            marks = [(cut * BLOCK_TOKENS, binding_of(name, cut)) for cut in CUTS]
            self.directory.stashed.note(key, marks, self.engine.config.lease_seconds)
            source = _blocks(memory, 0, NUM_BLOCKS)
            stashed = self.engine.stash(
                key, source, binding=binding_of(name),
                beginnings={name: Beginning(end // BLOCK_TOKENS, end) for end, name in marks},
            )  # fmt: skip
            self._promise(name, stashed, memory, source)
            self._promises.append(lambda stashed=stashed: stashed.released)  # type: ignore[misc]
            self._stashes.append(stashed)

    def evict(self) -> None:
        """Let go what is stashed; the directory does not hear of it."""
        for stashed in self._stashes:
            stashed.cancel("evicted")

    def await_promises(self) -> None:
        """Wait until what was promised is there, and its memory is somebody else's."""
        eventually(lambda: all(promise() for promise in self._promises))
        for item in self._open:
            item.look()
        self._promises.clear()

    def _promise(
        self, name: str, transfer: Transfer, memory: PagedMemory, source: PagedSource
    ) -> Open:
        def reuse() -> None:
            memory.data[:, source.block_ids] = GARBAGE

        self._open.append(Open(name, transfer, reuse=reuse))
        return self._open[-1]

    # Who claims

    def claim(
        self, names: Sequence[str], page_bytes: int, peer: str, num_known: int, is_kept: bool
    ) -> None:
        """Receive prompts of which a beginning is kept back, and so many blocks are here."""
        for name in names:
            place = Claimed(name, page_bytes, num_known)
            self._claim(
                name, TransferKey(name), binding_of(name), place, PeerAddress(peer),
                pull=num_known < NUM_KEPT_BACK, has_held=True, is_kept=is_kept,
            )  # fmt: skip

    def recall(
        self,
        names: Sequence[str],
        page_bytes: int,
        addresses: tuple[str, str],
        num_known: int,
        num_shared: int,
        num_claims: int,
        is_kept: bool,
    ) -> None:
        """Ask a directory for stashes, and pull what both prompts share of each, so many times; or
        say that nothing of it is needed. `addresses`: of the directory and of the engine."""
        directory, peer = addresses[0], PeerAddress(addresses[1])
        for name, marks in self._marks(names, directory).items():
            key = stash_key(TransferKey(name))
            ends = [end // BLOCK_TOKENS for end in marks if end <= num_shared * BLOCK_TOKENS]
            end = max(
                (e for e in ends if marks[e * BLOCK_TOKENS] == binding_of(name, e)), default=0
            )
            binding = binding_of(name, end)
            if end and not num_claims:
                self.engine.discard(key, binding=binding, peer=peer, pull=True)
            for _ in range(num_claims if end else 0):
                place = Claimed(name, page_bytes, num_known, end)
                self._claim(name, key, binding, place, peer, pull=True, is_kept=is_kept)

    def _marks(self, names: Sequence[str], directory: str) -> dict[str, dict[int, bytes]]:
        """What a directory says in time, by name."""
        asked: dict[str, Recalling] = {
            name: self.directory.recall(directory, stash_key(TransferKey(name))) for name in names
        }
        deadline = REAL_CLOCK() + RECALL_SECONDS
        while any(item.marks is None for item in asked.values()) and REAL_CLOCK() < deadline:
            time.sleep(0.001)
        return {name: dict(item.marks or ()) for name, item in asked.items()}

    def _claim(
        self,
        name: str,
        key: TransferKey,
        binding: bytes,
        place: Claimed,
        peer: PeerAddress,
        *,
        pull: bool,
        is_kept: bool,
        has_held: bool = False,
    ) -> None:
        """Claim what the peer has promised."""
        if is_kept:
            self.engine.keep(key, binding=binding, peer=peer)
            self._kept.append((key, binding))
        with contextlib.suppress(P2pError):  # refused at once: it came and went, or comes already
            transfer = self.engine.receive(
                key, place.sink, binding=binding, peer=peer, pull=pull, has_held=has_held,
                is_promised=True,
            )  # fmt: skip
            self._open.append(Open(name, transfer, place.is_right))


def _blocks(memory: PagedMemory, first: int, end: int) -> PagedSource:
    return memory.source(list(range(first, end)), first, NUM_BLOCKS * BLOCK_TOKENS)
