"""Instances: one stand-in of each role in a process of its own."""

from __future__ import annotations

import os
from typing import Any

from tests.attack.strangers import YIELDED
from tests.doubles.server import DECODE, PREFILL, Behaviour, Received, ServerDouble
from tests.rigs.proxies import LoopThread


class Forgetful(list[Received]):
    """What an instance has received, without the bodies of what has ended."""

    def append(self, received: Received) -> None:
        """Add a request; forget older bodies, because they may be large."""
        for older in self[-64:]:
            if older.ended:
                older.body = b""
                older.__dict__.pop("json", None)
        super().append(received)


class Instances:
    """The commands: each waits until it is done."""

    def __init__(self, model: str) -> None:
        self._loop = LoopThread()
        self.doubles = {
            "prefill": ServerDouble(PREFILL, model=model),
            "decode": ServerDouble(DECODE, model=model),
        }
        for double in self.doubles.values():
            double.received = Forgetful()
            self._loop.run(double.start())

    def yield_to_others(self) -> None:
        """Run behind the proxy: on another machine they would not take its core."""
        os.nice(YIELDED)

    def beat(self, registration_address: str) -> None:
        """Send heartbeats to a proxy."""

        async def begin() -> None:
            for double in self.doubles.values():
                double.beat(registration_address)

        self._loop.run(begin())

    def behave(self, role: str, how: dict[str, Any]) -> None:
        """Treat the next requests so; with {}, as a healthy instance."""
        self.doubles[role].behaviour = Behaviour(**how)

    def speak(self, role: str, num_bytes: int, num_pieces: int) -> None:
        """Answer each stream with so many pieces, as quickly as they are taken."""
        self.behave(role, {"pieces": [b"x" * num_bytes] * num_pieces})

    def addresses(self) -> dict[str, str]:
        """Return where each listens."""
        return {role: double.http_address for role, double in self.doubles.items()}

    def num_open(self, role: str) -> int:
        """Return how many requests an instance still works on."""
        return sum(not received.ended for received in self.doubles[role].received)

    def num_received(self, role: str) -> int:
        """Return how many requests an instance got."""
        return len(self.doubles[role].received)

    def close(self) -> None:
        """End them."""
        for double in self.doubles.values():
            self._loop.run(double.stop())
        self._loop.close()
