"""A process of its own on the GPU; worker.py is its inside."""

from __future__ import annotations

from tests.gpu.machine import Machine
from tests.gpu.worker import Worker
from tests.processes import Child, together


class GpuPeer(Child):
    """The child, as its parent has it; its commands are the public methods of Worker."""

    PATIENCE = 450.0

    def __init__(self, machine: Machine, number: int) -> None:
        """Start it, and do not wait; `number` is its host to NCCL."""
        super().__init__(Worker, machine, environment=machine.environment(number))


class Processes:
    """Two processes that serve one check after the other: to start one takes seconds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._peers: list[GpuPeer] = []

    def two(self) -> list[GpuPeer]:
        """Return both, as if they had just been started."""
        alive = [peer for peer in self._peers if not peer.has_ended()]
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
