"""Real engines for tests: settings that end quickly, tensors, and peers in child processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import CacheSpec
from tests.doubles.gpu import GpuDouble
from tests.rigs.tensors import pattern
from tests.support import SeededRandom, eventually

MIB = 1 << 20
BLOCKS = 16  # of `patterned`
START_SECONDS = 120.0  # of a first child: all that it needs is imported then, on whatever is left
PAGE_BYTES = 1 << 17


def settings(transport: str = "shm", **changes: Any) -> EngineConfig:
    """Return settings with little memory and short waits; a GPU is the double of one."""
    gpu: dict[str, Any] = {}
    if transport in GPU_TRANSPORTS:
        path = GpuDouble().path
        gpu = {"device": "cuda", "nccl_library": path, "cudart_library": path}
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


def start_fork_server() -> None:
    """Start what makes the children: it imports torch once, and it stays."""
    multiprocessing.set_forkserver_preload(["tests.rigs.engines", "p2p_engine.engine"])
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


class Peer:
    """An engine in a child process that does what it is told, one command after the other."""

    def __init__(self, config: EngineConfig, spec: CacheSpec | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, config, spec), daemon=True
        )
        self._process.start()
        theirs.close()
        self.tell("address")
        self.address: str = self.answer(START_SECONDS)

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, command: str, *arguments: Any) -> None:
        """Start a command; its answer comes with `answer`."""
        self._pipe.send((command, arguments))

    def answer(self, timeout: float = 30.0) -> Any:
        """Wait for the answer to the oldest command.

        Raises:
            AssertionError: none came.
        """
        if not self._pipe.poll(timeout):
            raise AssertionError(f"child {self.pid} did not answer within {timeout} s")
        return self._pipe.recv()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run a command and return its answer."""
        self.tell(command, *arguments)
        return self.answer()

    def kill(self) -> None:
        """Send SIGKILL and reap."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: _state_of(self.pid) == "T", what="the child stops")

    def wake(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def patterned(name: str) -> PagedMemory:
    """Return a cache of BLOCKS blocks whose bytes depend on a name."""
    memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
    memory.data[:] = pattern(name, memory.data.nbytes).numpy().reshape(memory.data.shape)
    return memory


def _serve(pipe: Connection, config: EngineConfig, spec: CacheSpec | None) -> None:
    with start(config, spec=spec) as engine, contextlib.suppress(EOFError):
        transfers: list[Any] = []
        while True:
            command, arguments = pipe.recv()
            pipe.send(_obey(engine, transfers, command, arguments))


def _obey(engine: P2pNcclEngine, transfers: list[Any], command: str, arguments: Any) -> Any:
    if command == "address":
        return engine.zmq_address
    if command == "stats":
        return engine.stats()
    if command == "send":
        name, nbytes, peer = arguments
        transfers.append(engine.send_tensor(TransferKey(name), pattern(name, nbytes), peer))
        return None
    if command == "receive":
        name, nbytes, peer, timeout = arguments
        tensor = engine.recv_tensor(TransferKey(name), peer, timeout=timeout)
        return bool(torch.equal(tensor, pattern(name, nbytes)))
    if command == "keep":
        names, peer = arguments
        for name in names:
            engine.keep(TransferKey(name), peer=PeerAddress(peer))
        return None
    if command == "send_blocks":
        name, peer = arguments
        memory = patterned(name)
        source = memory.source(list(range(BLOCKS)))
        transfers.append((memory, engine.send(TransferKey(name), PeerAddress(peer), source)))
        return None
    if command == "receive_blocks":
        name, timeout = arguments
        memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
        engine.receive(TransferKey(name), memory.sink(list(range(BLOCKS)))).wait(timeout)
        return bool((memory.data == patterned(name).data).all())
    raise ValueError(command)
