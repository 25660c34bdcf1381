"""An engine, a directory or a proxy's registration port in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from p2p_engine import EngineConfig, P2pNcclEngine
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.wire.messages import CacheSpec
from tests.processes import Child
from tests.rigs.proxies import LoopThread, running_proxy

LAYERS = 80


@contextlib.contextmanager
def victim(kind: str) -> Iterator[tuple[str, int]]:
    """Start one; its address and its process."""
    with Child(KINDS[kind], through=()) as child:
        yield child.ask("address"), child.pid
        child.end()


class LoneEngine:
    """An engine."""

    def __init__(self) -> None:
        config = EngineConfig(host="127.0.0.1", kv_buffer_size=1 << 22, mem_pool_size_gb=0.001)
        self._engine = P2pNcclEngine(config)
        self.close = self._engine.close

    def address(self) -> str:
        """Where it listens."""
        return self._engine.zmq_address


class LoneDirectory:
    """A directory that has much to tell."""

    def __init__(self) -> None:
        spec = CacheSpec(
            identity=b"model", dtype="bfloat16", block_size=16, num_kv_heads=8, head_size=128,
            layer_cuts=(0, LAYERS), page_bytes=[65536] * LAYERS, layers=tuple(range(LAYERS)),
        )  # fmt: skip
        rank = RankAddress(0, "127.0.0.1:5", 1, spec)
        self._directory = Directory(EngineConfig(host="127.0.0.1"), [rank], kv_port=0, role="D")
        self.close = self._directory.close

    def address(self) -> str:
        """Where it listens."""
        return self._directory.address


class LoneProxy:
    """A proxy, of which only the registration port matters."""

    def __init__(self) -> None:
        self._loop, self._running = LoopThread(), running_proxy()
        self._proxy = self._loop.run(self._running.__aenter__())

    def address(self) -> str:
        """Where instances register."""
        return self._proxy.registration_address

    def close(self) -> None:
        """End it."""
        self._loop.run(self._running.__aexit__(None, None, None))
        self._loop.close()


KINDS = {"engine": LoneEngine, "directory": LoneDirectory, "proxy": LoneProxy}
