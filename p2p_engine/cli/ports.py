"""Reserves free TCP ports until the processes that need them have bound them."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import TracebackType

from p2p_engine.wire.addresses import family_of

_TRIES = 100  # to find free ports in a row


def claim_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening, so that the kernel gives it to no one who asks for any port.

    A process that names the port and sets SO_REUSEADDR, as every server does, can still bind it and
    listen. Our child process does so.

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    claim = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.bind((host, port))
    except OSError as error:
        claim.close()
        raise OSError(error.errno, f"port {port} on {host}: {error.strerror}") from error
    return claim


def is_port_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on this port now.

    Raises:
        OSError: the address is not one of this machine.
    """
    try:
        claim_port(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


class PortPlan:
    """Hands out each port of one address once, and reserves it until closed."""

    def __init__(self, host: str) -> None:
        """Plan for this address, which must be one of this machine."""
        self._host = host
        self._claims: dict[int, socket.socket] = {}

    def take(self, port: int = 0) -> int:
        """Claim this port, or any free one.

        Raises:
            OSError: the port is in use or was taken before, or the address cannot be bound.
        """
        if port in self._claims:
            raise OSError(errno.EADDRINUSE, f"port {port} on {self._host}: planned twice")
        claim = claim_port(self._host, port)
        taken = int(claim.getsockname()[1])
        self._claims[taken] = claim
        return taken

    def take_range(self, count: int, first: int = 0) -> int:
        """Claim `count` consecutive ports, from `first` or any; return the first one.

        Raises:
            OSError: a port is in use; with `first` 0, no such range was found in 100 tries.
        """
        for _ in range(0 if first else _TRIES):
            with contextlib.suppress(OSError):
                return self._take_row(count, first)
        return self._take_row(count, first)

    def _take_row(self, count: int, first: int) -> int:
        taken = [self.take(first)]
        try:
            for port in range(taken[0] + 1, taken[0] + count):
                if port > 65535:
                    raise OSError(errno.EADDRNOTAVAIL, f"port {port}: there is none")
                taken.append(self.take(port))
        except OSError:
            for port in taken:
                self.release(port)
            raise
        return taken[0]

    def release(self, port: int) -> None:
        """Release one port; unknown ports are ignored."""
        claim = self._claims.pop(port, None)
        if claim is not None:
            claim.close()

    def close(self) -> None:
        """Release all ports; idempotent."""
        for port in list(self._claims):
            self.release(port)

    def __enter__(self) -> PortPlan:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release all ports."""
        self.close()
