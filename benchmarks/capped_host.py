"""Engines as on a kernel whose limit of socket buffers is the old one, and the host that receives.

In a namespace of one's own the kernel's limit cannot be set, so a stand-in cuts what a process asks
for, as the kernel would.
"""

from __future__ import annotations

import socket
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.memory import Bytes, random_memory
from benchmarks.raw_socket import PAGE_WORDS, RawReceiver
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.host import SOCKET_BUFFER_BYTES, SOCKET_LIMITS

OLD_LIMIT_BYTES = 212_992  # of net.core.{r,w}mem_max, before Linux 6.17
ENGINES = ("tcp", "fixed buffer")
SECONDS = 60.0


def cap_socket_buffers() -> None:
    """Cut the sizes that this process sets from now on."""
    uncapped = socket.socket.setsockopt

    def capped(self: socket.socket, level: int, option: int, *value: Any) -> None:
        if level == socket.SOL_SOCKET and option in SOCKET_LIMITS.values():
            value = (min(value[0], OLD_LIMIT_BYTES),)
        uncapped(self, level, option, *value)

    socket.socket.setsockopt = capped  # type: ignore[method-assign, assignment]


def make_engine(name: str, host: str) -> P2pNcclEngine:
    """Make an engine as it is, or one that sets the size of its buffers in any case."""
    config = EngineConfig(
        host=host, transports=("tcp",), kv_buffer_size=1 << 29, mem_pool_size_gb=0.1
    )
    if name == "tcp":
        return P2pNcclEngine(config)
    chosen = "p2p_engine.transports.tcp.socket_buffer_bytes"
    with mock.patch(chosen, return_value=SOCKET_BUFFER_BYTES):
        return P2pNcclEngine(config)


def stamp(memory: Bytes, number: int) -> None:
    """Write `number` into every page, so that old bytes are recognized."""
    memory.view(np.uint64)[::PAGE_WORDS] = number


class CappedHost:
    """The receiving process: two engines, and a plain socket."""

    def __init__(self, total_bytes: int, seed: int) -> None:
        cap_socket_buffers()
        self._source = random_memory(total_bytes, seed)
        self._engines: dict[str, P2pNcclEngine] = {}

    def open(self, host: str) -> tuple[dict[str, str], int]:
        """Listen on the address that the host has now: the engines' addresses, and the port."""
        self._engines = {name: make_engine(name, host) for name in ENGINES}
        self._raw = RawReceiver(len(self._source), host)
        return {name: self._engines[name].zmq_address for name in ENGINES}, self._raw.port()

    def take(self, name: str, number: int) -> bool:
        """Take a tensor out of the arena; whether it is what was sent, byte for byte."""
        stamp(self._source, number)
        tensor = self._engines[name].recv_tensor(TransferKey(str(number)), timeout=SECONDS)
        return np.array_equal(tensor.numpy(), self._source)

    def verify(self, expected: int) -> bool:
        """Whether the words that have come through the plain socket add up to this."""
        return self._raw.verify(expected)

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()
