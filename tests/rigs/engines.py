"""Real engines for tests: settings that end quickly, tensors, and peers in child processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import CacheSpec
from tests.doubles.gpu import GpuDouble
from tests.processes import Child
from tests.rigs.tensors import pattern
from tests.support import SeededRandom, eventually

MIB = 1 << 20
BLOCKS = 16  # of `patterned`
PAGE_BYTES = 1 << 17


def settings(transport: str = "shm", **changes: Any) -> EngineConfig:
    """Return settings with little memory and short waits; a GPU is the double of one."""
    gpu: dict[str, Any] = {}
    if transport in GPU_TRANSPORTS:
        path = GpuDouble().path
        gpu = {"device": "cuda", "nccl_library": path}
    defaults: dict[str, Any] = {
        **gpu,
        "transports": transport,
        "kv_buffer_size": 8 * MIB,
        "mem_pool_size_gb": 8 * MIB / (1 << 30),
        "transfer_timeout_seconds": 20,
        "lease_seconds": 20,
        "connect_timeout_seconds": 10,
        "peer_timeout_seconds": 10,
        "retry_seconds": 0.1,
    }
    return EngineConfig(**{**defaults, **changes})


def start(config: EngineConfig, **options: Any) -> P2pNcclEngine:
    """Start an engine; memory of the double of a GPU is the host's, and so are its tensors."""
    if config.device != "cpu":
        GpuDouble()  # a child has none yet
    engine = P2pNcclEngine(config, **options)
    engine._tensor_device = "cpu"
    return engine


@contextlib.contextmanager
def engines(count: int, transport: str = "shm", **changes: Any) -> Iterator[list[P2pNcclEngine]]:
    """Start engines of equal settings and close them all."""
    with contextlib.ExitStack() as stack:
        made = settings(transport, **changes)
        yield [stack.enter_context(start(made)) for _ in range(count)]


class PagedMemory:
    """A paged cache of `num_layers` equal layers over memory of its own."""

    def __init__(self, num_blocks: int, num_layers: int = 2, page_bytes: int = 4096) -> None:
        self.data = np.zeros((num_layers, num_blocks, page_bytes), np.uint8)
        layers = np.arange(num_layers, dtype=np.int64) * num_blocks * page_bytes
        self.cache = PagedCache(
            self.data.ctypes.data + layers,
            np.full(num_layers, page_bytes, np.int64),
            np.full(num_layers, page_bytes, np.int64),
            num_blocks,
        )

    def fill(self, rng: SeededRandom) -> PagedMemory:
        """Fill with random bytes."""
        self.data[:] = rng.numpy.integers(1, 256, self.data.shape, np.uint8)
        return self

    def source(self, ids: list[int], first_block: int = 0, num_tokens: int = 64) -> PagedSource:
        """Return these blocks as a request's blocks from first_block on."""
        return PagedSource(self.cache, np.array(ids, np.int64), first_block, num_tokens)

    def sink(self, ids: list[int], first_block: int = 0, num_tokens: int = 64) -> PagedSink:
        """Return these blocks as the place of a request's blocks from first_block on."""
        return PagedSink(self.cache, np.array(ids, np.int64), first_block, num_tokens)


def is_idle(engine: P2pNcclEngine) -> bool:
    """Whether nothing is open and nothing is reserved."""
    stats = engine.stats()
    return (stats["open_transfers"], stats["live_bytes"]) == (0, 0)


def assert_idle(*parties: P2pNcclEngine) -> None:
    """Wait until nothing is open anywhere, and no control thread has met a bug."""
    for engine in parties:
        eventually(lambda e=engine: is_idle(e), what=f"open: {engine.stats()}")  # type: ignore[misc]
        assert engine.stats()["control_errors"] == 0


def patterned(name: str) -> PagedMemory:
    """Return a cache of BLOCKS blocks whose bytes depend on a name."""
    memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
    memory.data[:] = pattern(name, memory.data.nbytes).numpy().reshape(memory.data.shape)
    return memory


class PeerEngine:
    """The commands of a Peer."""

    def __init__(
        self,
        config: EngineConfig,
        spec: CacheSpec | None = None,
        faults: Mapping[str, int] | None = None,
    ) -> None:
        """`faults` of this process's double of a GPU are there before the engine."""
        for name, value in (faults or {}).items():
            self.set_fault(name, value)
        self.engine = start(config, spec=spec)
        self._kept: list[Any] = []  # transfers, and what they read

    def address(self) -> str:
        """Where it listens."""
        return self.engine.zmq_address

    def stats(self) -> dict[str, Any]:
        """What the engine counts."""
        return self.engine.stats()

    def send(self, name: str, nbytes: int, peer: str) -> None:
        """Begin to send a tensor."""
        self._kept.append(self.engine.send_tensor(TransferKey(name), pattern(name, nbytes), peer))

    def receive(self, name: str, nbytes: int, peer: str, timeout: float) -> bool:
        """Receive a tensor; whether it is the right one."""
        tensor = self.engine.recv_tensor(TransferKey(name), peer, timeout=timeout)
        return bool(torch.equal(tensor, pattern(name, nbytes)))

    def keep(self, names: list[str], peer: str) -> None:
        """Say that these will be received."""
        for name in names:
            self.engine.keep(TransferKey(name), peer=PeerAddress(peer))

    def send_blocks(self, name: str, peer: str) -> None:
        """Begin to send a cache."""
        memory = patterned(name)
        source = memory.source(list(range(BLOCKS)))
        self._kept += [memory, self.engine.send(TransferKey(name), PeerAddress(peer), source)]

    def receive_blocks(self, name: str, timeout: float) -> bool:
        """Receive a cache; whether it is the right one."""
        memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
        self.engine.receive(TransferKey(name), memory.sink(list(range(BLOCKS)))).wait(timeout)
        return bool((memory.data == patterned(name).data).all())

    def set_fault(self, name: str, value: int) -> None:
        """Set a fault of this process's double of a GPU."""
        GpuDouble()[name] = value

    def forge(self, said: Mapping[str, str]) -> None:
        """Say other things to senders about the buffer on the GPU."""
        transport = self.engine._parts.transports["cuda_ipc"]
        transport._extra |= said  # type: ignore[attr-defined]

    def die(self, milliseconds: int) -> None:
        """Die so slowly; there is no answer."""
        GpuDouble().die(milliseconds)

    def epoch(self) -> int:
        """The engine's epoch."""
        return self.engine._parts.epoch

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class Peer(Child):
    """An engine in a child process."""

    def __init__(
        self,
        config: EngineConfig,
        spec: CacheSpec | None = None,
        faults: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(PeerEngine, config, spec, faults)
        self.address: str = self.ask("address")
