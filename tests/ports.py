"""Ports for what is told its port before it listens."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator

FIRST_PORT, PORTS_OF_A_WORKER = 20_000, 3_000  # below 32,768, where Linux takes its own from


def free_port() -> int:
    """Return the next port of this process on which nothing listens.

    Linux gives none of these to a connection, and each worker of a parallel run has its own, so
    nobody takes one between here and the test.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _ports() -> Iterator[int]:
    """Yield the ports of this worker, again and again, from a random one on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    first = random.SystemRandom().randrange(PORTS_OF_A_WORKER)
    while True:
        for number in range(PORTS_OF_A_WORKER):
            yield FIRST_PORT + worker * PORTS_OF_A_WORKER + (first + number) % PORTS_OF_A_WORKER


_PORTS = _ports()
