"""The inside of a GpuPeer: an engine, communicators or transports, as it is told."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.errors import P2pError
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer
from tests.gpu.machine import Machine
from tests.gpu.memory import GpuMemory, draw
from tests.gpu.ranks import Ranks
from tests.support import eventually

WINDOW = 8  # transfers that a side has open in each direction


class Worker:
    """One process; every public method is a command."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cuda, self._nccl = machine.load()
        self._engines: list[P2pNcclEngine] = []
        self._memory: GpuMemory | None = None
        self._open: list[Transfer] = []
        self._comms: list[int] = []
        self._ranks: Ranks | None = None

    def reset(self) -> None:
        """Give back all that there is."""
        self.end_groups()
        self.hang_up()
        while self._engines:
            self._engines.pop().close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._open.clear()

    # Engines

    def start(self, settings: dict[str, Any], max_bytes: int) -> str:
        """Make an engine, and memory for pieces of at most so many bytes; its address."""
        self._engines.append(P2pNcclEngine(EngineConfig(**settings)))
        if self._memory is None:
            self._memory = self._make_memory(max_bytes)
        return self._engines[-1].zmq_address

    def address(self) -> str:
        """The engine's address."""
        return self._engines[0].zmq_address

    def exchange(self, plan: dict[str, Any], side: int, address: str) -> dict[str, Any]:
        """Send this side's pieces of a plan and receive the other one's, both in order."""
        return self._exchange(self._engines[0], self._memory_of(), plan, side, address)

    def exchange_inside(
        self, plan: dict[str, Any], settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The same between two engines of this process."""
        memories = [self._make_memory(plan["max_bytes"]) for _ in range(2)]
        engines = [P2pNcclEngine(EngineConfig(**settings)) for _ in range(2)]
        reports: list[dict[str, Any]] = [{}, {}]

        def run(side: int) -> None:
            self._cuda.use(0)
            peer = engines[1 - side].zmq_address
            reports[side] = self._exchange(engines[side], memories[side], plan, side, peer)

        threads = [threading.Thread(target=run, args=(side,)) for side in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.close()
        for memory in memories:
            memory.close()
        return reports

    def begin(self, names: list[str], size: int, address: str, direction: str) -> str:
        """Start to send or to receive so many equal pieces, and return when bytes move."""
        engine, memory, peer = self._engines[0], self._memory_of(), PeerAddress(address)
        moved = "sent_bytes" if direction == "send" else "live_bytes"
        before = engine.stats()[moved]
        for number, name in enumerate(names):
            key = TransferKey(name)
            self._open.append(
                engine.send(key, peer, memory.source((number, size)))
                if direction == "send"
                else engine.receive(key, memory.sink(number, size), peer=peer)
            )

        def do_move() -> bool:
            return engine.stats()[moved] > before or any(item.done for item in self._open)

        eventually(do_move, 60, "bytes move")
        return direction

    def outcomes(self, timeout: float) -> dict[str, Any]:
        """Wait until all that was begun has ended; when the last one did, and their errors."""
        opened, self._open = self._open, []
        eventually(lambda: all(item.done for item in opened), timeout, "all have ended")
        return {
            "ended_at": time.monotonic(),
            "errors": [type(item.error).__name__ for item in opened if item.error is not None],
        }

    def stats(self) -> dict[str, Any]:
        """The engine's statistics."""
        return self._engines[0].stats()

    def at_rest(self, timeout: float) -> dict[str, Any]:
        """Wait until nothing is open and nothing reserved; the statistics then."""
        stats = self._engines[0].stats
        eventually(lambda: (stats()["open_transfers"], stats()["live_bytes"]) == (0, 0), timeout)
        return stats()

    def free_bytes(self) -> int:
        """Free memory of the device, whoever uses it."""
        return self._cuda.memory()[0]

    # Communicators, by the binding alone

    def unique_ids(self, count: int) -> list[str]:
        """Open so many meeting points."""
        return [self._nccl.unique_id().hex() for _ in range(count)]

    def make_groups(self, unique_ids: list[str], rank: int, channels: int) -> float:
        """Make the communicators, one after the other; the seconds for all of them."""
        start = time.monotonic()
        for text in unique_ids:
            comm = self._nccl.init(bytes.fromhex(text), rank, channels)
            self._comms.append(comm)
            eventually(lambda c=comm: not self._nccl.is_in_progress(c), timeout=120)  # type: ignore[misc]
        return time.monotonic() - start

    def first_bytes(self, rank: int) -> None:
        """Move one byte from rank 0 to rank 1 in each."""
        stream, address = self._cuda.create_stream(), self._cuda.allocate(4096)
        for comm in self._comms:
            move = self._nccl.recv if rank else self._nccl.send
            move(comm, address, 1, 1 - rank, stream)
            eventually(lambda c=comm: not self._nccl.is_in_progress(c), timeout=60)  # type: ignore[misc]
            self._cuda.synchronize(stream)
        self._cuda.free(address)
        self._cuda.destroy_stream(stream)

    def end_groups(self) -> None:
        """Abort them all, at the same time."""
        comms, self._comms = self._comms, []
        threads = [threading.Thread(target=self._abort, args=(comm,)) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "an abort did not return"

    # Transports, without engines

    def listen(self, count: int, max_groups: int) -> list[dict[str, str]]:
        """Make so many receiving ranks on one device; how to connect to each."""
        self._ranks = Ranks(self._cuda, self._nccl, max_groups)
        return [self._ranks.listen() for _ in range(count)]

    def dial(self, endpoints: list[dict[str, str]], max_groups: int) -> dict[str, Any]:
        """Connect one sending rank to all of these, one after the other; its statistics."""
        self._ranks = self._ranks or Ranks(self._cuda, self._nccl, max_groups)
        return self._ranks.dial(endpoints)

    def hang_up(self) -> None:
        """Close what `listen` or `dial` made."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _abort(self, comm: int) -> None:
        self._cuda.use(0)
        self._nccl.abort(comm)

    def _make_memory(self, max_bytes: int) -> GpuMemory:
        return GpuMemory(self._cuda, max_bytes, WINDOW + 1, self._machine.find_cupy()[0])

    def _memory_of(self) -> GpuMemory:
        assert self._memory is not None, "start comes first"
        return self._memory

    def _exchange(
        self,
        engine: P2pNcclEngine,
        memory: GpuMemory,
        plan: dict[str, Any],
        side: int,
        address: str,
    ) -> dict[str, Any]:
        """See `exchange`. At most WINDOW of each are open."""
        name, count, timeout = plan["name"], plan["count"], plan["timeout"]
        ours, theirs = (
            draw(f"{name} {number}", count, plan["max_bytes"], plan["budget_bytes"])
            for number in (side, 1 - side)
        )
        is_get, peer = plan["send_type"] == "GET", PeerAddress(address)
        opened: collections.deque[tuple[Transfer, Transfer]] = collections.deque()
        wrong, errors, start = 0, [], time.monotonic()
        for number in range(count + WINDOW):
            if number < count:
                key, slot = TransferKey(f"{name}-{1 - side}-{number}"), number % (WINDOW + 1)
                sink = memory.sink(slot, theirs[number][1])
                received = engine.receive(key, sink, peer=peer, pull=is_get, timeout=timeout)
                key, source = TransferKey(f"{name}-{side}-{number}"), memory.source(ours[number])
                sent = engine.hold(key, source) if is_get else engine.send(key, peer, source)
                if plan["send_type"] == "PUT":
                    sent.wait_released(timeout)
                opened.append((received, sent))
            if number >= WINDOW:
                received, sent = opened.popleft()
                for item in (received, sent):
                    try:
                        item.wait(timeout)
                    except P2pError as error:
                        errors.append(repr(error))
                index = number - WINDOW
                wrong += not memory.holds(index % (WINDOW + 1), theirs[index])
        return {
            "transfers": count,
            "wrong": wrong,
            "errors": errors,
            "bytes": sum(size for _, size in theirs),
            "seconds": time.monotonic() - start,
        }
