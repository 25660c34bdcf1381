"""The lifetime of a request that instances answer: beneath Quart's own objects, in one task.

Whatever a request holds is let go of when that task ends it, however it ends. Everything else that
the application serves takes Quart's usual way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quart.asgi import ASGIHTTPConnection

from p2p_engine.errors import P2pError

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
    from quart import Quart

    from proxy.http.deadlines import Deadlines

logger = logging.getLogger(__name__)

# Whether the client is still there is asked of requests that are not over by then.
WATCH_SECONDS = 0.05

Headers = list[tuple[bytes, bytes]]


class AnswerCut(P2pError):
    """The answer cannot be completed: the client must see its connection closed."""


class BodyRefused(P2pError):
    """The request's body is not taken: 413, it is too large; 408, it did not come in time."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """What a client is told; a body that comes piece by piece is read while it is sent."""

    status: int
    headers: Headers
    body: bytes | AsyncGenerator[bytes, None] = b""

    async def send_to(self, send: Any) -> None:
        """Send it, no faster than the client takes it."""
        headers = self.headers
        if isinstance(self.body, bytes):
            headers = [*headers, (b"content-length", b"%d" % len(self.body))]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": self.body})
            return
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async with aclosing(self.body):
            async for piece in self.body:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Ends:
    """What to do when something is over, the last first. All of it is quick and never awaits."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call this at the end."""
        self._callbacks.append((call, arguments))

    def close(self) -> None:
        """Call all; one that fails does not keep the others from it. Idempotent."""
        while self._callbacks:
            call, arguments = self._callbacks.pop()
            try:
                call(*arguments)
            except Exception:
                logger.exception("the end of a request failed in part")


class ProxyRequest:
    """A request and what it holds: `ends` run when its task is over."""

    __slots__ = ("_is_late", "_receive", "ends", "handler", "headers", "is_abandoned", "path")

    def __init__(self, scope: HTTPScope, receive: Any, handler: asyncio.Task[Any]) -> None:
        self.path: str = scope["path"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.ends = Ends()
        self.is_abandoned = False
        self.handler = handler
        self._receive = receive
        self._is_late = False

    async def body(self, max_bytes: int, timeout: float, deadlines: Deadlines) -> bytes:
        """Return the whole body, and from then on cancel the handler when the client leaves.

        Raises:
            BodyRefused: it is larger than `max_bytes`, or took longer than `timeout` seconds.
            asyncio.CancelledError: the client left.
        """
        pieces: list[bytes] = []
        num_bytes, is_last = 0, False
        limit = deadlines.add(timeout, self._be_late)
        try:
            while not is_last:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError("the client left")
                pieces.append(message["body"])
                num_bytes += len(message["body"])
                is_last = not message["more_body"]
                if num_bytes > max_bytes:
                    raise BodyRefused(413, f"the body is larger than {max_bytes} bytes")
        except asyncio.CancelledError:
            if self._is_late:
                raise BodyRefused(408, f"the body did not come within {timeout:g} s") from None
            raise
        finally:
            limit.cancel()
        self.ends.callback(deadlines.add(WATCH_SECONDS, self._begin_watch).cancel)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _be_late(self) -> None:
        self._is_late = True
        self.handler.cancel()

    def _begin_watch(self) -> None:
        self.ends.callback(asyncio.ensure_future(self._watch()).cancel)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.handler.cancel()


async def serve_directly(
    serve: Callable[[ProxyRequest], Awaitable[Answer]],
    scope: HTTPScope,
    receive: ASGIReceiveCallable,
    send: ASGISendCallable,
) -> None:
    """Serve one request in the server's own task, which is cancelled when the client leaves.

    Returning before the answer is complete makes the server close the connection.
    """
    handler = asyncio.current_task()
    assert handler is not None
    request = ProxyRequest(scope, receive, handler)
    try:
        answer = await serve(request)
        await answer.send_to(send)
    except AnswerCut:
        pass
    except asyncio.CancelledError:  # the client left, or the server has waited long enough
        request.is_abandoned = True
    finally:
        request.ends.close()


class QuartConnection(ASGIHTTPConnection):
    """Quart's own way, but for a stop of the server in the middle of a request."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._handler: asyncio.Task[Any] | None = None

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve one request; the server cancels it when it has waited long enough to stop."""
        try:
            await super().__call__(receive, send)
        except asyncio.CancelledError:
            # Quart would leave the handler running.
            if self._handler is not None:
                self._handler.cancel()
                await asyncio.gather(self._handler, return_exceptions=True)

    async def handle_request(self, request: Any, send: ASGISendCallable) -> None:
        """Handle the request in a task of its own, which is noted."""
        self._handler = asyncio.current_task()
        await super().handle_request(request, send)
