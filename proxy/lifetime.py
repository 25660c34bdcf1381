"""The lifetime of a request: whatever it holds is let go when its handler ends, however it ends.

Quart sends a streamed body after the view has returned, and may be cancelled between the two:
neither a `finally` in the view nor one in the body's generator is sure to run.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from quart import Request
from quart.asgi import ASGIHTTPConnection

from p2p_engine.errors import P2pError

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
    from quart import Quart


class AnswerCut(P2pError):
    """The answer cannot be completed: the client must see its connection closed."""


class ProxyRequest(Request):
    """A request with `ends`: what to do when it is over. All of it is quick and never awaits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends = ExitStack()
        self.is_abandoned = False


class Connection(ASGIHTTPConnection):
    """Runs a request's ends in the task that runs its view and sends its body."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._handler: asyncio.Task[Any] | None = None

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve one request; the server cancels it when it has waited long enough to stop."""
        try:
            await super().__call__(receive, send)
        except asyncio.CancelledError:
            # Quart would leave the handler running. The server closes a connection whose answer
            # is not complete when we return.
            if self._handler is not None:
                self._handler.cancel()
                await asyncio.gather(self._handler, return_exceptions=True)

    async def handle_request(self, request: Request, send: ASGISendCallable) -> None:
        """Handle the request and send the answer; cancelled when the client leaves."""
        if not isinstance(request, ProxyRequest):
            raise TypeError(f"{type(request).__name__} is not a ProxyRequest")
        self._handler = asyncio.current_task()
        # Returning before the body is complete makes the server close the connection.
        with request.ends, suppress(AnswerCut):
            try:
                await super().handle_request(request, send)
            except asyncio.CancelledError:
                request.is_abandoned = True
                raise
