"""Relay: hands an instance's answer to the client as it comes, and says where it was cut."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientResponse
from quart import Response
from werkzeug.datastructures import Headers

from proxy.errors import LegFailed, ProxyError
from proxy.lifetime import AnswerCut
from proxy.upstream import FAILURES, leg_failed
from proxy.usage import CachedTokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.config import ProxyConfig
    from proxy.instances import Leg
    from proxy.journey import Journey

# Not from an instance to the client: what belongs to the one connection or to the instance.
KEPT_BACK_HEADERS = {
    "connection", "date", "keep-alive", "proxy-connection", "server", "set-cookie", "te", "trailer",
    "transfer-encoding", "upgrade", "x-request-id",
}  # fmt: skip
_EVENT_STREAM = "text/event-stream"
# With one of these, nothing of ours can be put behind what was cut.
_FRAMING_HEADERS = ("Content-Length", "Content-Encoding")


class Relay:
    """One answer on its way. It reads no further than the client takes it."""

    def __init__(
        self,
        config: ProxyConfig,
        journey: Journey,
        leg: Leg,
        response: ClientResponse,
        cached_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._journey = journey
        self._leg = leg
        self._response = response
        self._is_stream = response.content_type == _EVENT_STREAM
        is_plain = "Content-Encoding" not in response.headers
        self._usage = None if cached_tokens is None or not is_plain else CachedTokens(cached_tokens)

    def answer(self) -> Response:
        """Return the answer to the client; its bytes are read while they are sent."""
        status = self._journey.status = self._response.status
        headers = passed_headers(self._response)
        if self._usage is not None:
            headers.pop("Content-Length", None)  # another number may be shorter
        return Response(self._pieces(), status, headers)

    async def _pieces(self) -> AsyncIterator[bytes]:
        handler = asyncio.current_task()
        loop = asyncio.get_running_loop()
        try:
            async for piece in self._read():
                if self._is_stream and not self._journey.bytes_sent:
                    _limit_gaps(self._response, self._config.gap_timeout_seconds)
                self._journey.sent(len(piece))
                self._leg.instance.num_events += piece.count(b"\n\n") if self._is_stream else 0
                stalled = loop.call_later(
                    self._config.client_timeout_seconds, self._client_stalled, handler
                )
                try:
                    yield piece
                finally:
                    stalled.cancel()
        except FAILURES as error:
            self._leg.breaker.fail(self._journey.clock())
            yield self._cut(leg_failed(self._leg.instance, self._leg.role, error))
        else:
            if self._response.status < 400:
                self._leg.breaker.succeed()
            self._journey.answered()

    async def _read(self) -> AsyncIterator[bytes]:
        async for piece in self._response.content.iter_any():
            if passed := piece if self._usage is None else self._usage.feed(piece):
                yield passed
        if self._usage is not None and (rest := self._usage.finish()):
            yield rest

    def _cut(self, failure: LegFailed) -> bytes:
        """Return the event that ends a cut stream; any other answer can only be broken off.

        Raises:
            AnswerCut: the client must see a broken connection.
        """
        self._journey.failed(failure)
        is_plain = not any(name in self._response.headers for name in _FRAMING_HEADERS)
        if not self._is_stream or not is_plain:
            raise AnswerCut(str(failure))
        # The empty line first closes the event that may have been cut in the middle.
        return b"\n\ndata: %b\n\n" % msgspec.json.encode(failure.body())

    def _client_stalled(self, handler: asyncio.Task[object] | None) -> None:
        message = "the client does not take its answer"
        self._journey.failed(ProxyError(408, "client_stalled", message))
        if handler is not None:
            handler.cancel()


def passed_headers(response: ClientResponse) -> Headers:
    """Return what the client may see of an instance's headers."""
    return Headers(
        (name, value)
        for name, value in response.headers.items()
        if name.lower() not in KEPT_BACK_HEADERS and value.isascii()
    )


def _limit_gaps(response: ClientResponse, seconds: float) -> None:
    """From now on, limit the silence between two pieces; it does not run while we read none."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:
        connection.protocol.read_timeout = seconds
        connection.protocol.start_timeout()
