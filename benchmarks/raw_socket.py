"""The limit of one TCP stream on this machine: plain memory through one plain socket."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np

from benchmarks.memory import ordinary_memory

SECONDS = 60.0
PAGE_WORDS = 512


class RawReceiver:
    """Takes the bytes of one connection into memory, round after round, in a process of its own."""

    def __init__(self, total_bytes: int, host: str = "127.0.0.1") -> None:
        self._memory = ordinary_memory(total_bytes).data
        self._listener = socket.create_server((host, 0))
        threading.Thread(target=self._serve, name="raw-receiver", daemon=True).start()

    def port(self) -> int:
        """Where to connect."""
        port: int = self._listener.getsockname()[1]
        return port

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        got = 1
        while got:
            at = 0
            while got and at < len(self._memory):
                got = connection.recv_into(self._memory[at:])
                at += got
            connection.send(b"!")

    def verify(self, expected: int) -> bool:
        """Whether the words that have arrived add up to this, modulo 2^64."""
        return int(np.frombuffer(self._memory, np.uint64).sum()) == expected

    def close(self) -> None:
        """The process's end ends the connection."""


class RawSender:
    """Sends memory that lies in one piece: no list of blocks, no frames, no other work."""

    def __init__(self, port: int, total_bytes: int, host: str = "127.0.0.1") -> None:
        self._memory = ordinary_memory(total_bytes).view(np.uint64)
        self._socket = socket.create_connection((host, port), timeout=SECONDS)

    def stamp(self, number: int) -> int:
        """Write `number` into every page; returns the sum of all words, modulo 2^64."""
        self._memory[::PAGE_WORDS] = number
        return int(self._memory.sum())

    def send(self) -> float:
        """Send all; returns the seconds until the receiver has it.

        Raises:
            TimeoutError: a minute has passed.
        """
        start = time.perf_counter()
        self._socket.sendall(self._memory.data)
        if self._socket.recv(1) != b"!":
            raise ConnectionResetError("the receiver has ended")
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
