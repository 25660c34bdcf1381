"""A process with one engine that does what it is told, and that stops at a step to let a fault in.

Two pipes: commands and answers, and the trap. Whichever thread reaches the step that was set tells
the parent and stands still until the parent has done its deed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import gc
import logging
import os
import resource
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mempool import Arena
from p2p_engine import EngineConfig, P2pNcclEngine, SendMode, TransferKey
from p2p_engine.control import auth, dialler
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import P2pError, PeerLost, RemoteProtocolError
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers import links
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer
from p2p_engine.transports import shm
from p2p_engine.transports.base import ArenaChannel
from p2p_engine.transports.tcp import TcpChannel, TcpTransport
from p2p_engine.wire.messages import CacheSpec, decode
from tests.rigs.tensors import pattern
from tests.support import eventually, held_resources

REAL_CLOCK = time.monotonic
TRAP_SECONDS = 3.0  # the parent's answer; a process that was stopped in the trap goes on by itself


class Trap:
    """Where this process stands still, once."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._event = ""
        self._lock = threading.Lock()

    def set(self, event: str) -> None:
        """Wait for this event from now on."""
        with self._lock:
            self._event = event

    def reach(self, event: str) -> None:
        """Stand still if this is the event."""
        with self._lock:
            if event != self._event:
                return
            self._event = ""
        self._pipe.send(event)
        if self._pipe.poll(TRAP_SECONDS):
            self._pipe.recv()


class JumpingClock:
    """A monotonic clock that can be told to jump; it replaces this process's, as a resumed virtual
    machine would."""

    def __init__(self) -> None:
        self.offset = 0.0
        time.monotonic = lambda: REAL_CLOCK() + self.offset


@dataclasses.dataclass
class Open:
    """A transfer that this process has begun, and what its end was. `is_right` is asked of what was
    received, and told whether all of it should be there; `reuse` puts something else into what was
    sent, as soon as it may."""

    name: str
    transfer: Transfer
    is_right: Callable[[bool], bool] = lambda is_whole: True
    reuse: Callable[[], None] | None = None
    ended_at: float = 0.0

    def look(self) -> bool:
        """Note what has become of it; whether it has ended."""
        if self.reuse is not None and self.transfer.released:
            self.reuse()
            self.reuse = None
        self.ended_at = self.ended_at or REAL_CLOCK() * self.transfer.done
        return self.transfer.done

    def outcome(self) -> tuple[str, str, bool, float]:
        """Name, error's class or "ok", whether its bytes are right, and when it ended."""
        error = self.transfer.error
        word = "stuck" if not self.transfer.done else type(error).__name__ if error else "ok"
        return self.name, word, self.is_right(word == "ok"), self.ended_at


def tensor_check(sink: TensorSink, name: str, nbytes: int) -> Callable[[bool], bool]:
    """What asks whether a received tensor is that of the name."""

    def is_right(is_whole: bool) -> bool:
        tensor = sink.tensor
        return not is_whole or (tensor is not None and torch.equal(tensor, pattern(name, nbytes)))

    return is_right


def ends_of(items: list[Open], seconds: float) -> list[tuple[str, str, bool, float]]:
    """Wait until all have ended, or for so many seconds; how each did."""
    deadline, waiting = REAL_CLOCK() + seconds, items
    while (waiting := [item for item in waiting if not item.look()]) and REAL_CLOCK() < deadline:
        time.sleep(0.001)
    return [item.outcome() for item in items]


class Raised(logging.Handler):
    """Keeps the exceptions that are logged, each as one line of where it was raised."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note an exception."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            places = (f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in frames)
            self.seen.append(f"{error!r} in {', '.join(places)}")


class ChaosEngine:
    """The commands of a ChaosChild."""

    def __init__(self, config: EngineConfig, trap: Connection) -> None:
        os.setpgid(0, 0)  # the terminal's Ctrl-C is for the campaign
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # what is to be seen is in the record
        self._raised = Raised(logging.ERROR)
        logging.getLogger().addHandler(self._raised)
        auth.SILENCE_SECONDS = 2
        dialler.IDLE_SECONDS = max(2.0, config.peer_timeout_seconds)
        links.REST_SECONDS = dialler.IDLE_SECONDS / 2  # no connection is closed between two PINGs
        gc.freeze()  # what was imported before is nobody's leak, and a look for leaks is quick
        self.clock = JumpingClock()
        self._trap = Trap(trap)
        self.engine = self.acting = P2pNcclEngine(config)
        ranks = [RankAddress(0, self.engine.zmq_address, self.engine.epoch)]
        self.directory = Directory(config, ranks, kv_port=0, role="D")
        self._open: list[Open] = []
        self._kept: list[tuple[TransferKey, bytes]] = []
        self._direct: set[int] = set()
        self._spaces: list[Any] = []
        self._data_address = ""
        self._lay_out(self.engine)
        self._lay_out_control(self.directory._control)
        self._lay_out_transports()
        eventually(_threads_are_named)
        self._before = held_resources()

    def _lay_out_control(self, control: ControlPlane) -> None:
        reach = self._trap.reach
        control.send = after(control.send, lambda _, frame, *__: reach(f"say {_kind(frame)}"))  # type: ignore[method-assign]
        listener = control.listener
        listener.on_frame = before(listener.on_frame, lambda _, f: reach(f"hear {_kind(f)}"))  # type: ignore[method-assign]

    def _lay_out(self, engine: P2pNcclEngine) -> None:
        reach = self._trap.reach
        self._lay_out_control(engine._parts.control)
        sender = engine._parts.sender
        sender.channel_ready = before(sender.channel_ready, lambda _: reach("connect"))  # type: ignore[method-assign]
        answers, store = engine._parts.store._replies, engine._parts.store
        answers.conclude = after(answers.conclude, lambda *a: a[2] is None and reach("land"))  # type: ignore[method-assign]
        store._scatter = after(store._scatter, lambda *_: reach("scatter"))  # type: ignore[method-assign]

    def _lay_out_transports(self) -> None:
        for kind in (ArenaChannel, TcpChannel):
            kind.write = after(kind.write, lambda *_, **__: self._trap.reach("write"))  # type: ignore[method-assign]
        tcp = self.engine._parts.transports.get("tcp")
        if isinstance(tcp, TcpTransport):
            honest = tcp.invite

            def invite(source_epoch: int) -> dict[str, str]:
                endpoint = honest(source_epoch) or {}
                if source_epoch in self._direct or not self._data_address:
                    return endpoint
                return {**endpoint, "address": self._data_address}

            tcp.invite = invite  # type: ignore[method-assign]

    def addresses(self) -> tuple[str, str]:
        """Where peers dial for messages, and for data."""
        tcp = self.engine._parts.transports.get("tcp")
        return self.engine.zmq_address, tcp._address if isinstance(tcp, TcpTransport) else ""

    def divert(self, control: str, data: str) -> None:
        """Be known by other addresses: those of relays."""
        self.engine._parts.control.sockets.address, self._data_address = control, data
        self.directory._addresses[0] = control

    def epoch(self) -> int:
        """By which peers know this start of the engine."""
        return self.engine.epoch

    def spare(self, epoch: int) -> None:
        """Let this peer's data come without a relay."""
        self._direct.add(epoch)

    def trap(self, event: str) -> None:
        """Stand still at this event, once."""
        self._trap.set(event)

    def directory_address(self) -> str:
        """Where this engine can be looked up."""
        return self.directory.address

    def visit(self, model: str) -> str:
        """Act by another engine until it leaves; with a model, by one that none here is like.

        Returns its address.
        """
        config = dataclasses.replace(self.engine.config, port=0)
        self.acting = P2pNcclEngine(config, spec=CacheSpec(model.encode()) if model else None)
        self._lay_out(self.acting)
        return self.acting.zmq_address

    def leave(self) -> None:
        """Let that engine end; idempotent."""
        if self.acting is not self.engine:
            self.acting.close()
        self.acting = self.engine

    def forget(self) -> None:
        """Take everybody who has greeted us for silent."""
        sessions = self.engine._parts.sessions

        def lose_all() -> None:
            with self.engine._parts.changed:
                for epoch in list(sessions._sessions):
                    sessions._lose(epoch, PeerLost("the round says so"))

        self.engine._parts.control.call_soon(lose_all)

    def jump(self, seconds: float) -> None:
        """Let the clock jump."""
        self.clock.offset += seconds

    def limit_descriptors(self, is_limited: bool) -> None:
        """Let no new descriptor be opened, or as many as before."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if is_limited else hard, hard))

    def limit_memory(self, is_limited: bool) -> None:
        """Let no memory of a peer be mapped, as when there is none left, or let it again."""

        def attach(descriptor: int, nbytes: int) -> Arena:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        vars(shm)["Arena"] = SimpleNamespace(attach=attach) if is_limited else Arena

    def fill(self) -> None:
        """Take all landing memory."""
        with self.engine._parts.changed:
            arena, size = self.engine._parts.arena, 1 << 20
            while arena is not None and size >= 4096:
                space = arena.reserve(size)
                if space is None:
                    size //= 2
                else:
                    self._spaces.append(space)

    def drain(self) -> None:
        """Give it back."""
        with self.engine._parts.changed:
            while self._spaces and self.engine._parts.arena is not None:
                self.engine._parts.arena.release(self._spaces.pop())

    def send(self, names: list[str], nbytes: int, peer: str, mode: str, ready: bool) -> None:
        """Begin to send, or to hold."""
        for name in names:
            key, tensor = TransferKey(name), pattern(name, nbytes)
            if mode == SendMode.GET:
                transfer = self.acting.hold(key, TensorSource(tensor))
            else:
                source = TensorSource(tensor)
                address, _, rank = peer.partition("/")
                target = PeerAddress(address, int(rank) if rank else None)
                transfer = self.acting.send(key, target, source, ready=ready)
            self._open.append(Open(name, transfer))
            if mode == SendMode.PUT and ready:
                with contextlib.suppress(P2pError):
                    transfer.wait(self.engine.config.transfer_timeout_seconds)

    def receive(self, names: list[str], nbytes: int, peer: str, mode: str) -> None:
        """Begin to receive."""
        for name in names:
            sink = TensorSink()
            with contextlib.suppress(P2pError):  # refused at once: it came and went before
                transfer = self.acting.receive(
                    TransferKey(name), sink, peer=PeerAddress(peer), pull=mode == SendMode.GET
                )
                self._open.append(Open(name, transfer, tensor_check(sink, name, nbytes)))

    def exchange(self, given: list[str], taken: list[str], nbytes: int, peer: str) -> list[Any]:
        """Send some to a peer that sends others to here; how each receive has ended."""
        there, received = PeerAddress(peer), []
        for name in given:
            self.engine.send(TransferKey(name), there, TensorSource(pattern(name, nbytes)))
        for name in taken:
            sink = TensorSink()
            transfer = self.engine.receive(TransferKey(name), sink, peer=there)
            received.append(Open(name, transfer, tensor_check(sink, name, nbytes)))
        return ends_of(received, 2 * self.engine.config.transfer_timeout_seconds)

    def meet(self, names: list[str], addresses: list[str], seconds: float) -> None:
        """Have a link to each address: something is awaited from there that never comes."""
        for name, address in zip(names, addresses, strict=True):
            self.engine.receive(
                TransferKey(name), TensorSink(), peer=PeerAddress(address), timeout=seconds
            )

    def num_links(self) -> int:
        """How many peers have welcomed this engine."""
        return int(self.engine.stats()["links"].get("ready", 0))

    def keep(self, names: list[str], peer: str) -> None:
        """Say that these will be received."""
        for name in names:
            self.engine.keep(TransferKey(name), peer=PeerAddress(peer))
            self._kept.append((TransferKey(name), b""))

    def mark_ready(self) -> None:
        """Let everything that waits move."""
        for item in self._open:
            with contextlib.suppress(P2pError):
                self.engine.mark_ready(item.transfer)

    def cancel(self) -> None:
        """Withdraw everything."""
        for item in self._open:
            item.transfer.cancel("the round says so")

    def abandon(self, peer: str) -> None:
        """Tell the peer that nothing will come."""
        for item in self._open:
            with contextlib.suppress(P2pError):
                self.engine.abandon(item.transfer.key, PeerAddress(peer), "the round says so")
            item.transfer.cancel("the round says so")

    def let_go(self, names: list[str]) -> None:
        """Say that these will never be held."""
        for name in names:
            self.engine.abandon(TransferKey(name), None, "the round says so")

    def trim(self) -> None:
        """Give back to the system what nothing lives in; what stays is kept by somebody."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the GNU C library's

    def finish(self, seconds: float) -> list[tuple[str, str, bool, float]]:
        """Wait until all have ended; how each did."""
        outcomes = ends_of(self._open, seconds)
        self._open.clear()
        while self._kept:
            key, binding = self._kept.pop()
            self.engine.drop(key, binding=binding)
        self.leave()
        return outcomes

    def leftovers(self, seconds: float) -> list[str]:
        """Wait until nothing is open, reserved or held any more, and nobody is known; what is,
        after so many seconds."""
        return _outlasting(self._left, seconds)

    def held(self, seconds: float) -> list[str]:
        """The same, while peers may be known."""
        return _outlasting(self._held, seconds)

    def close(self) -> None:
        """End the directory and the engine; idempotent."""
        self.directory.close()
        self.engine.close()

    def _left(self) -> list[str]:
        stats = self.engine.stats()
        known = {"sessions": 0, "links": {}, "unclosed_channels": 0}
        wrong = [f"{key}={stats[key]}" for key, value in known.items() if stats[key] != value]
        wrong += self._held()
        return wrong or sorted(map(_described, held_resources() - self._before))

    def _held(self) -> list[str]:
        stats, num_parked = self.engine.stats(), len(self.engine._parts.holds._unheld)
        wanted = {
            "open_transfers": 0, "live_bytes": 0, "quarantined_bytes": 0, "control_errors": 0,
            "overdue_waits": 0, "healthy": True, "corrupted_chunks": 0, "kept": 0,
        }  # fmt: skip
        wrong = [f"{key}={stats[key]}" for key, value in wanted.items() if stats[key] != value]
        wrong += self._raised.seen[-1:] if stats["control_errors"] else []
        return wrong + [f"parked WANTs={num_parked}"] * (num_parked > 0)


def _outlasting(look: Callable[[], list[str]], seconds: float) -> list[str]:
    deadline = REAL_CLOCK() + seconds
    while (found := look()) and REAL_CLOCK() < deadline:
        time.sleep(0.01)
    return found


def _threads_are_named() -> bool:
    """Whether each native thread has its own name by now: it gives it to itself. ZMQ's are there
    twice, the engine's and the directory's."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    once, twice = ["p2p-mover", "p2p-prefault"], ["ZMQbg/Reaper", "ZMQbg/IO/0"]
    return Counter(once + 2 * twice) <= Counter(names)


def _described(resource: str) -> str:
    """Say of a socket what it is connected to."""
    kind, number, *_ = resource.split()
    if kind != "descriptor" or "socket:" not in resource:
        return resource
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as held:
        return f"{resource} {held.family.name} {held.getsockname()} to {held.getpeername()}"
    return resource


def _kind(frame: bytes) -> str:
    try:
        return type(decode(frame)).__name__.upper()
    except RemoteProtocolError:
        return "NOISE"


def after(call: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        then(*arguments, **named)
        return result

    return both


def before(call: Callable[..., Any], first: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **named: Any) -> Any:
        first(*arguments, **named)
        return call(*arguments, **named)

    return both
