"""The campaign's side of its children: start, tell, ask, stop, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import Any

from p2p_engine import EngineConfig
from tests.chaos.child import serve

ANSWER_SECONDS = 20.0


def settings(transport: str, port: int = 0) -> EngineConfig:
    """Little memory and short waits, so that a round is over soon."""
    return EngineConfig(
        port=port,
        transports=(transport,),
        kv_buffer_size=4 << 20,
        mem_pool_size_gb=4 / 1024,
        checksum=True,
        transfer_timeout_seconds=1.5,
        lease_seconds=1.0,
        connect_timeout_seconds=0.8,
        peer_timeout_seconds=0.6,
        retry_seconds=0.05,
    )


class ChildGone(Exception):
    """The process does not answer."""


class ChaosChild:
    """One child; `control` and `data` are where peers dial it."""

    def __init__(self, transport: str, port: int = 0, config: EngineConfig | None = None) -> None:
        """Start it; `config` replaces the campaign's settings."""
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self.trap, trap_theirs = context.Pipe()
        arguments = (theirs, trap_theirs, config or settings(transport, port))
        self._process: Any = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        trap_theirs.close()
        self.is_alive = True
        self.control = self.data = ""
        self._is_closed = False
        try:
            self.control, self.data = self.ask("addresses")
        except ChildGone:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self._process.pid)

    def tell(self, command: str, *arguments: object) -> None:
        """Start a command."""
        with contextlib.suppress(OSError):
            self._pipe.send((command, arguments))

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to the oldest command.

        Raises:
            ChildGone: none comes.
        """
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            pass
        raise ChildGone(f"process {self.pid} does not answer")

    def ask(self, command: str, *arguments: object) -> Any:
        """Run a command and return its answer."""
        self.tell(command, *arguments)
        return self.answer()

    def let_go(self) -> None:
        """Open the trap."""
        with contextlib.suppress(OSError):
            self.trap.send(None)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and reap; idempotent."""
        self.is_alive = False
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        """End it, whatever it is doing, and give back what it took here; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        self._process.close()
        for pipe in (self._pipe, self.trap):
            pipe.close()


def start_fork_server() -> None:
    """Start what makes the children: it imports everything once."""
    multiprocessing.set_forkserver_preload(["tests.chaos.child"])
