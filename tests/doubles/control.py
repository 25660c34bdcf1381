"""A control plane without a thread or a socket."""

from __future__ import annotations

from collections.abc import Callable

from p2p_engine.control.sockets import Route
from p2p_engine.wire.messages import AnyMessage, decode


class ControlDouble:
    """Keeps what is sent; a route in `ended` takes nothing any more. Runs calls at once."""

    address = "127.0.0.1:4"

    def __init__(self) -> None:
        self.sent: list[tuple[Route, AnyMessage]] = []
        self.ended: set[Route] = set()
        self.hung_up: list[str] = []

    def send(self, route: Route, frame: bytes, over: Callable[[], None] = lambda: None) -> None:
        """Keep the message, or say that the route's connection is over."""
        if route in self.ended:
            over()
        else:
            self.sent.append((route, decode(frame)))

    def hang_up(self, address: str) -> None:
        """Keep the address."""
        self.hung_up.append(address)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run it now."""
        call()
