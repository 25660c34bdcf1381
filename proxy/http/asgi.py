"""The lifetime of a forwarded request: one task, below Quart's request objects.

When the task ends, however it ends, everything that the request holds is released. All other routes
of the application are served by Quart as usual.
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
from proxy.http.memory import FREE_BYTES, KEPT_AT_ONCE, BodyMemory, BodyRefused, Keep, Span
from proxy.http.origins import address_of_client, origin_of

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
    from quart import Quart

    from proxy.http.deadlines import Deadlines

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
LEFT = "client_left"  # in the state of a request: nobody waits for its answer
# In the message of a head: the next one has the whole body. Our server writes both at once, for
# each write is a packet that wakes the client.
WHOLE = "proxy.whole"


class AnswerCut(P2pError):
    """The answer cannot be completed; the server must close the client's connection."""


@dataclass
class Answer:
    """The answer to a client. A body in pieces is read while it is sent."""

    status: int
    headers: Headers
    body: bytes | AsyncGenerator[bytes, None] = b""

    async def send_to(self, send: Any, *, is_head: bool = False) -> None:
        """Send the answer, no faster than the client takes it; its body only if it is no answer to
        HEAD."""
        head = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        if isinstance(self.body, bytes):
            head["headers"] = [*self.headers, (b"content-length", b"%d" % len(self.body))]
            await send({**head, WHOLE: True})
            await send({"type": "http.response.body", "body": self.body})  # the server drops it
            return
        await send(head)
        if not is_head:
            async with aclosing(self.body):
                async for piece in self.body:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Ends:
    """Callbacks for the end of a request, called last to first; they are quick and never await."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, call: Callable[..., object], *arguments: Any) -> None:
        """Register a callback."""
        self._callbacks.append((call, arguments))

    def close(self) -> None:
        """Call all callbacks, even if one raises. Idempotent."""
        while self._callbacks:
            call, arguments = self._callbacks.pop()
            try:
                call(*arguments)
            except Exception:
                logger.exception("a cleanup step at the end of a request failed")


class ProxyRequest:
    """A request and its resources; `ends` is closed when its task is over."""

    __slots__ = (
        "_is_late", "_memory", "_receive", "_state", "ends", "handler", "headers", "is_cut", "keep",
        "origin", "path",
    )  # fmt: skip

    def __init__(
        self, scope: HTTPScope, receive: Any, handler: asyncio.Task[Any], memory: BodyMemory
    ) -> None:
        self.path: str = scope["path"]
        self.origin, _ = origin_of(address_of_client(scope))
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if "tracestate" in self.headers:  # a list, which may come in several lines
            lines = [value for name, value in scope["headers"] if name == b"tracestate"]
            self.headers["tracestate"] = b",".join(lines).decode("latin-1")
        self.ends = Ends()
        self.is_cut = False  # it was cancelled
        self._state = scope["state"]
        self.handler = handler
        self._receive = receive
        self._is_late = False
        self._memory = memory
        self.keep: Keep | None = None  # the body, once it begins to come
        self.ends.callback(self.free_body)

    @property
    def is_abandoned(self) -> bool:
        """Tell whether the client has left; else, what is cancelled is cut by the server's stop."""
        return LEFT in self._state

    async def body(self, max_bytes: int, timeout: float, deadlines: Deadlines) -> bytes | Span:
        """Return the whole body."""
        keep = self.keep = Keep.new(self._memory, max_bytes, self.origin)
        num_bytes, num_paid, is_last = 0, FREE_BYTES, False
        limit = deadlines.add(timeout, self._be_late)
        try:
            while not is_last:
                message = await self._receive()
                came, is_last = message["body"], not message["more_body"]
                for start in range(0, len(came), KEPT_AT_ONCE):
                    if num_bytes >= num_paid:
                        await self._memory.turns.take(self.origin)
                        num_paid = num_bytes + KEPT_AT_ONCE
                    piece = came[start : start + KEPT_AT_ONCE]
                    num_bytes += len(piece)
                    self._keep_piece(keep, piece, num_bytes, max_bytes)
        except asyncio.CancelledError:
            if self._is_late:
                message = f"the body did not come within {timeout:g} s"
                raise BodyRefused(408, "bad_body", message) from None
            raise
        finally:
            limit.cancel()
        return keep.content()

    def _keep_piece(self, keep: Keep, piece: bytes, num_bytes: int, max_bytes: int) -> None:
        if num_bytes > max_bytes:
            raise BodyRefused(413, "bad_body", f"the body is larger than {max_bytes} bytes")
        if not keep.add(piece):
            text = "the proxy has no memory left for a body of this size"
            raise BodyRefused(503, "memory_full", text)

    def free_body(self) -> None:
        """Note that the body is not needed any more; idempotent."""
        if self.keep is not None:
            self.keep.free()

    def _be_late(self) -> None:
        self._is_late = True
        self.handler.cancel()


async def serve_directly(
    serve: Callable[[ProxyRequest], Awaitable[Answer]],
    scope: HTTPScope,
    receive: ASGIReceiveCallable,
    send: ASGISendCallable,
    memory: BodyMemory,
) -> None:
    """Serve one request in the server's own task, which is cancelled when the client disconnects.

    If this returns before the answer is complete, the server closes the connection.
    """
    handler = asyncio.current_task()
    assert handler is not None
    request = ProxyRequest(scope, receive, handler, memory)
    try:
        answer = await serve(request)
        await answer.send_to(send)
    except AnswerCut:
        pass
    except asyncio.CancelledError:  # the client left, or shutdown timed out
        request.is_cut = True
    finally:
        request.ends.close()


class QuartConnection(ASGIHTTPConnection):
    """Quart's own handling, and a clean end if the server stops in the middle of a request."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._handler: asyncio.Task[Any] | None = None

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve one request. The server cancels it when the shutdown timeout ends."""
        try:
            await super().__call__(receive, send)
        except asyncio.CancelledError:
            # Quart would leave its handler task running.
            if self._handler is not None:
                self._handler.cancel()
                await asyncio.gather(self._handler, return_exceptions=True)

    async def handle_request(self, request: Any, send: ASGISendCallable) -> None:
        """Handle the request and note its task, so that `__call__` can cancel it."""
        self._handler = asyncio.current_task()
        await super().handle_request(request, send)
