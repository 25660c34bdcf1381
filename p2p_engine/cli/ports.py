"""Free TCP ports that stay ours until the process they are meant for has bound them."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import TracebackType

from p2p_engine.wire.addresses import family_of

_TRIES = 100  # to find free ports in a row


def claim_port(host: str, port: int) -> socket.socket:
    """Bind without listening, so that the kernel gives the port to nobody who asks for any port.

    A process that asks for it by number and sets SO_REUSEADDR, as every server does, may still
    bind it and listen: our child does.

    Raises:
        OSError: somebody listens there, or the address is not one of this machine.
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
    """Whether a server could listen on this port now.

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
    """Hands out the ports of one address, each once, and holds them until it is closed."""

    def __init__(self, host: str) -> None:
        """Plan for this address of this machine."""
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
        """Claim so many ports one after the other, from this one on or from any; return the first.

        Raises:
            OSError: one of them is in use; or, of any, no such row was found in some tries.
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
        """Let one port go, so that it can be taken again; unknown ones are ignored."""
        claim = self._claims.pop(port, None)
        if claim is not None:
            claim.close()

    def close(self) -> None:
        """Let all ports go; idempotent."""
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
        """Let all ports go."""
        self.close()
