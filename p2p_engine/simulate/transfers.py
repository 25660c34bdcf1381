"""Transfers: KV that leaves a stand-in or comes to it, by a real engine."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2p_engine.engine import P2pNcclEngine
from p2p_engine.errors import P2pError
from p2p_engine.memory.paged import PagedSink, PagedSource
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.simulate.prompts import MadeUpModel, SimulatedPrompt, Words
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import TransferKey

# Seconds between two polls of the engine while a transfer is open: a step of a fast model.
STEP_SECONDS = 0.002


class WrongKv(P2pError):
    """The KV that arrived is not the prompt's: a fault of routing or of the transfer."""


@dataclass(eq=False)
class SimulatedSend:
    """The KV of one prompt that leaves. Without a peer, it is held until a peer asks for it."""

    key: TransferKey
    peer: str | None
    source: PagedSource
    memory: Words
    transfer: Transfer | None = None


@dataclass(eq=False)
class _Open:
    """One transfer, its memory, and the future that waits for its end."""

    transfer: Transfer
    memory: Words
    ended: asyncio.Future[None]


class Transfers:
    """The transfers of one stand-in. Made and used in one event loop."""

    def __init__(self, engine: P2pNcclEngine, model: MadeUpModel) -> None:
        self._engine = engine
        self._model = model
        self._open: set[_Open] = set()
        self._has_open = asyncio.Event()
        self._steps = asyncio.ensure_future(self._step())
        self._steps.add_done_callback(self._end_all)
        self.num_verified = 0
        self.num_wrong = 0

    def offer(self, key: TransferKey, peer: str | None, prompt: SimulatedPrompt) -> SimulatedSend:
        """Offer the KV of a prompt before it is computed. Without a peer, only prepare it.

        Raises:
            P2pError: the engine refuses.
        """
        memory = self._model.compute(prompt)
        blocks = np.arange(prompt.num_blocks)
        source = PagedSource(self._model.cache(memory), blocks, 0, prompt.num_tokens)
        outgoing = SimulatedSend(key, peer, source, memory)
        if peer is not None:
            address = InstanceAddress(peer)
            outgoing.transfer = self._engine.send(key, address, source, ready=False)
            self._watch(outgoing.transfer, memory)
        return outgoing

    def computed(self, outgoing: SimulatedSend) -> None:
        """Let the bytes of an offer move. Without a peer, hold them until one asks.

        Raises:
            P2pError: the engine refuses.
        """
        if outgoing.transfer is None:
            outgoing.transfer = self._engine.hold(outgoing.key, outgoing.source)
            self._watch(outgoing.transfer, outgoing.memory)
        elif not outgoing.transfer.done:
            self._engine.mark_ready(outgoing.transfer)

    def withdraw(self, outgoing: SimulatedSend) -> None:
        """Abandon KV that will not be computed, and tell the peers that wait for it."""
        if outgoing.transfer is not None:
            outgoing.transfer.cancel("the request ended")
        with suppress(P2pError):
            peer = InstanceAddress(outgoing.peer) if outgoing.peer is not None else None
            self._engine.abandon(outgoing.key, peer, "the request ended")

    async def fetch(
        self, key: TransferKey, peer: str, prompt: SimulatedPrompt, *, pull: bool
    ) -> None:
        """Wait for the KV of a prompt, and compare every word of it.

        Raises:
            WrongKv: it is not the prompt's.
            P2pError: it will not come; says why.
        """
        memory = self._model.blank(prompt)
        blocks = np.arange(prompt.num_blocks)
        sink = PagedSink(self._model.cache(memory), blocks, 0, prompt.num_tokens)
        transfer = self._engine.receive(key, sink, peer=InstanceAddress(peer), pull=pull)
        opened = self._watch(transfer, memory)
        try:
            await asyncio.shield(opened.ended)
        except asyncio.CancelledError:
            transfer.cancel("the client left")
            raise
        if not transfer.done:
            transfer.cancel("the engine is not polled")
            raise P2pError(f"the engine of this stand-in is not polled any more: {key}")
        if transfer.error is not None:
            raise transfer.error
        if not np.array_equal(memory, self._model.compute(prompt)):
            self.num_wrong += 1
            raise WrongKv(f"the KV of {key} is not that of the prompt")
        self.num_verified += 1

    def stats(self) -> dict[str, Any]:
        """Return counts since the start, and the engine's stats."""
        counts = {"verified": self.num_verified, "wrong": self.num_wrong, "open": len(self._open)}
        return {**counts, "engine": self._engine.stats()}

    async def broken(self) -> None:
        """Wait until the engine is not polled any more, which nothing but a fault or `close` ends.

        Raises:
            Exception: the fault.
        """
        await asyncio.shield(self._steps)

    async def close(self) -> None:
        """Stop polling; open transfers end when the engine is closed."""
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)

    def _watch(self, transfer: Transfer, memory: Words) -> _Open:
        opened = _Open(transfer, memory, asyncio.get_running_loop().create_future())
        self._open.add(opened)
        self._has_open.set()
        if self._steps.done():
            self._end_all()
        return opened

    def _end_all(self, *_: object) -> None:
        """End every wait for a transfer: without polls, none would."""
        while self._open:
            self._open.pop().ended.set_result(None)

    async def _step(self) -> None:
        """Poll the engine while a transfer is open, as vLLM's worker does in its steps."""
        while True:
            await self._has_open.wait()
            self._engine.poll()
            for opened in [opened for opened in self._open if opened.transfer.done]:
                self._open.remove(opened)
                opened.ended.set_result(None)
            if not self._open:
                self._has_open.clear()
            await asyncio.sleep(STEP_SECONDS)
