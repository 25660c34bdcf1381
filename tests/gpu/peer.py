"""A process of its own on the GPU, told what to do by lines of JSON; worker.py is its inside."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.gpu.machine import Machine

PATIENCE_SECONDS = 450.0


class GpuPeer:
    """The child, as its parent has it; its commands are the public methods of Worker."""

    def __init__(self, machine: Machine, number: int) -> None:
        """Start it, and do not wait; `number` is its host to NCCL."""
        command = [sys.executable, "-m", "tests.gpu.worker", json.dumps(asdict(machine))]
        self.number = number
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env=machine.environment(number),
        )  # fmt: skip
        self._heard = b""

    def tell(self, command: str, *arguments: Any) -> None:
        """Start a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")

    def answer(self, timeout: float = PATIENCE_SECONDS) -> Any:
        """Wait for the answer to the oldest command.

        Raises:
            AssertionError: none came, or it is an error.
        """
        assert self.process.stdout is not None
        deadline, descriptor = time.monotonic() + timeout, self.process.stdout.fileno()
        while b"\n" not in self._heard:
            ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"process {self.number} did not answer within {timeout:g} s"
            data = os.read(descriptor, 1 << 16)
            assert data, f"process {self.number} ended: {self.process.wait(10)}"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        said = json.loads(line)
        assert "error" not in said, f"process {self.number}: {said['error']}"
        return said["answer"]

    def has_answered(self) -> bool:
        """Whether there is an answer to be heard; never blocks."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout.fileno()], [], [], 0)
        return bool(ready) or b"\n" in self._heard

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run a command."""
        self.tell(command, *arguments)
        return self.answer()

    def kill(self) -> float:
        """Send SIGKILL and reap; returns the monotonic time at which it was sent."""
        moment = time.monotonic()
        self.process.kill()
        self.process.wait(30)
        return moment

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> GpuPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Processes:
    """Two processes that serve one check after the other: to start one takes seconds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._peers: list[GpuPeer] = []

    def two(self) -> list[GpuPeer]:
        """Return both, as if they had just been started."""
        alive = [peer for peer in self._peers if peer.process.poll() is None]
        if len(alive) < 2:
            self.close()
            self._peers = [GpuPeer(self.machine, number) for number in (1, 2)]
        try:
            together(self._peers, "reset", [(), ()])
        except AssertionError:  # one is stuck in what has failed before
            self.close()
            return self.two()
        return self._peers

    def close(self) -> None:
        """End both."""
        for peer in self._peers:
            peer.close()
        self._peers = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(
    peers: Sequence[GpuPeer], command: str, arguments: Sequence[Sequence[Any]]
) -> list[Any]:
    """Run a command in several processes at once, each with arguments of its own."""
    for peer, each in zip(peers, arguments, strict=True):
        peer.tell(command, *each)
    return [peer.answer() for peer in peers]
