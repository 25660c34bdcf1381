"""Listener: the listening socket of a ROUTER. It also turns away peers that cannot be accepted.

libzmq accepts from the socket. When the process has no descriptor left, libzmq's I/O thread retries
in a busy loop for as long as a peer waits. So the listener keeps a descriptor in reserve, with
which it accepts and closes such connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket

from p2p_engine.bounded import RateLimitedWarnings
from p2p_engine.control.intake import KERNEL_BUFFER_BYTES
from p2p_engine.errors import ConfigError
from p2p_engine.wire.addresses import family_of

logger = logging.getLogger(__name__)

BACKLOG = 1024  # a whole fleet may come back at once; Linux takes net.core.somaxconn at most
START_FILES = 32  # libzmq ends the process if none is left for its threads


class Listener:
    """A bound, listening socket; its connections have small kernel buffers."""

    def __init__(self, host: str, ports: range) -> None:
        """Bind the first free port of `ports` (0: any).

        Raises:
            ConfigError: none of the ports can be bound, or the process has too few descriptors.
        """
        check_files(START_FILES)
        self.is_short = False  # of descriptors
        self.turned_away = 0
        self._warnings = RateLimitedWarnings(logger)
        self._socket = _bind(host, ports)
        self.port: int = self._socket.getsockname()[1]
        self._reserve: int | None = os.dup(self._socket.fileno())

    def lend(self) -> int:
        """Return a duplicate of the socket's descriptor for libzmq, which closes it."""
        return os.dup(self._socket.fileno())

    def check(self) -> None:
        """Turn waiting peers away if there is no descriptor to accept them with; never blocks."""
        self.is_short = not self._has_files()
        if self.is_short and self._is_waited_for():
            self._give_up_reserve()
            with contextlib.suppress(OSError):
                while True:
                    self._socket.accept()[0].close()
                    self.turned_away += 1
            self._has_files()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._warnings.warn(
                "no descriptor left of %d (RLIMIT_NOFILE): no peer can connect", limit
            )

    def close(self) -> None:
        """Close the socket and the reserved descriptor; idempotent."""
        self._give_up_reserve()
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may have a duplicate
        self._socket.close()

    def _has_files(self) -> bool:
        """Whether a descriptor is left beside the reserve; refills the reserve first."""
        try:
            if self._reserve is None:
                self._reserve = os.dup(self._socket.fileno())
            os.close(os.dup(self._socket.fileno()))
        except OSError:
            return False
        return True

    def _is_waited_for(self) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def _give_up_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None


def check_files(count: int) -> None:
    """Check that the process may open `count` more descriptors.

    Raises:
        ConfigError: it may not.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ConfigError(f"fewer than {count} descriptors left of {limit}: {error}") from error


def _bind(host: str, ports: range) -> socket.socket:
    refusal: OSError | None = None
    for port in ports:
        listener = socket.socket(family_of(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # connections inherit them
                listener.setsockopt(socket.SOL_SOCKET, buffer, KERNEL_BUFFER_BYTES)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("" if host == "*" else host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            refusal = error
        else:
            return listener
    named = f"port {ports[0]}" if len(ports) == 1 else f"any port from {ports[0]} to {ports[-1]}"
    raise ConfigError(f"cannot bind {named} on {host}: {refusal}") from refusal
