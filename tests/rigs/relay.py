"""A TCP relay that can be told to be a bad network: nothing passes, little passes, bits change."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from p2p_engine.wire.addresses import join_address, split_address

PIECE_BYTES = 1 << 16
TRICKLE_BYTES, TRICKLE_SECONDS = 512, 0.01


class FaultyRelay:
    """Listens for one address and passes on to another; one thread for each direction.

    `mode` may be changed at any time: "pass", "trickle" (50 KB/s), or "hold": nothing passes,
    nobody is told, and what was held comes when it passes again. Loopback only.
    """

    def __init__(self, upstream: str, *, flip_byte: int | None = None) -> None:
        """`flip_byte`: the byte of each connection's forward direction in which a bit changes."""
        self.mode = "pass"
        self._upstream = split_address(upstream)
        self._flip_byte = flip_byte
        self._closing = threading.Event()
        self._frozen: frozenset[socket.socket] = frozenset()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address(*self._listener.getsockname()[:2])
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Break every connection; new ones are let in."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Let nothing pass on the connections that there are; others come and pass meanwhile."""
        self._frozen = frozenset(self._sockets)

    def thaw(self) -> None:
        """Let what was held pass."""
        self._frozen = frozenset()

    def close(self) -> None:
        """Break everything and join the threads; idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for connection in [self._listener, *self._sockets]:
            connection.close()

    def __enter__(self) -> FaultyRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="relay", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            self._sockets.append(near)
            try:
                far = socket.create_connection(self._upstream, timeout=5)
            except OSError:
                near.close()
                continue  # the upstream is gone: the next dial may find it back
            far.settimeout(None)
            self._sockets.append(far)
            ended: list[socket.socket] = []
            self._start(self._pump, near, far, self._flip_byte, ended)
            self._start(self._pump, far, near, None, ended)

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        flip_byte: int | None,
        ended: list[socket.socket],
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(TRICKLE_BYTES if self.mode == "trickle" else PIECE_BYTES):
                self._wait_to_pass(source)
                if flip_byte is not None and passed <= flip_byte < passed + len(data):
                    at = flip_byte - passed
                    data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
                target.sendall(data)
                passed += len(data)
            self._wait_to_pass(source)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        ended.append(source)
        if len(ended) == 2:  # both directions: as by a host whose process has closed it
            for connection in ended:
                connection.close()

    def _wait_to_pass(self, source: socket.socket) -> None:
        if self.mode == "trickle":
            time.sleep(TRICKLE_SECONDS)
        while (self.mode == "hold" or source in self._frozen) and not self._closing.is_set():
            time.sleep(0.002)
