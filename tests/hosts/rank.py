"""One rank of an instance, in a process that may be on a host of its own."""

from __future__ import annotations

import contextlib

import numpy as np

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import P2pError
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.transfer import Transfer
from tests.rigs.caches import Model, RankCache, Split
from tests.rigs.engines import settings

MODEL, KEY, NUM_TOKENS = Model(2, 2, 8), TransferKey("request-1"), 32
IDS = np.arange(8, dtype=np.int64)
NUM_RANKS = {"prefill": 2, "decode": 1}


class HostRank:
    """The engine, its cache, and the directory where it is here."""

    def __init__(self, host: str, role: str, rank: int) -> None:
        self._host, self._role, self._rank = host, role, rank
        self._side = Split(NUM_RANKS[role])
        self._stack = contextlib.ExitStack()

    def open(self, transports: str) -> tuple[str, int]:
        """Start an engine; returns where it listens, and its epoch."""
        self._config = settings(
            transports, host=self._host, connect_timeout_seconds=5, transfer_timeout_seconds=30
        )
        self._cache = RankCache(MODEL, self._side, self._rank, 8)
        if self._role == "prefill":
            self._cache.fill(IDS, MODEL.values(NUM_TOKENS))
        engine = P2pNcclEngine(self._config, spec=self._cache.spec)
        self._engine = self._stack.enter_context(engine)
        return engine.zmq_address, engine.epoch

    def serve(self, port: int, ranks: list[tuple[str, int]]) -> None:
        """Be the directory of these ranks."""
        known = [
            RankAddress(rank, address, epoch, RankCache(MODEL, self._side, rank, 8).spec)
            for rank, (address, epoch) in enumerate(ranks)
        ]
        directory = Directory(self._config, known, kv_port=port, role="P")
        self._stack.enter_context(directory)

    def send(self, peer: str) -> str:
        """Push the cache to an instance; returns why it did not arrive."""
        source = self._cache.source(IDS, 0, NUM_TOKENS)
        return _outcome(self._engine.send(KEY, InstanceAddress(peer), source))

    def hold(self, peer: str) -> str:
        """Keep the cache until it was pulled."""
        return _outcome(self._engine.hold(KEY, self._cache.source(IDS, 0, NUM_TOKENS)))

    def receive(self, peer: str, pull: bool) -> str:
        """Fill the cache from an instance; returns why it is not what it must be."""
        sink = self._cache.sink(IDS, 0, NUM_TOKENS)
        outcome = _outcome(self._engine.receive(KEY, sink, peer=InstanceAddress(peer), pull=pull))
        expected = self._cache.of_mine(MODEL.values(NUM_TOKENS))
        is_right = bool((self._cache.token_views(IDS) == expected).all())
        return outcome or ("" if is_right else "other bytes")

    def sent_bytes(self) -> int:
        """How much has left."""
        sent: int = self._engine.stats()["sent_bytes"]
        return sent

    def close(self) -> None:
        """Close everything; another engine may be opened."""
        self._stack.close()


def _outcome(transfer: Transfer) -> str:
    try:
        transfer.wait(40)
    except P2pError as error:
        return f"{type(error).__name__}: {error}"
    return ""
