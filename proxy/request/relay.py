"""Relay: forwards an instance's answer to the client, and reports where it broke off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import LegFailed, ProxyError
from proxy.fleet.upstream import leg_failed
from proxy.http.asgi import Answer, AnswerCut
from proxy.http.client import ClientError, Response
from proxy.openai.answers import EVENT_STREAM, passed_headers
from proxy.openai.apis import api_of
from proxy.openai.usage import (
    CachedTokens,
    CountsAtEnd,
    num_events,
    tokens_in_answer,
    tokens_in_stream,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from proxy.fleet.instances import Leg
    from proxy.fleet.last_turns import LastTurn
    from proxy.http.asgi import ProxyRequest
    from proxy.observe.request_log import RequestRecord
    from proxy.request.services import Services

# With one of these headers, no event can be appended to a broken stream.
_FRAMING_HEADERS = (b"content-length", b"content-encoding")


class Relay:
    """One answer in progress. It reads no faster than the client does."""

    def __init__(
        self,
        services: Services,
        request: ProxyRequest,
        record: RequestRecord,
        leg: Leg,
        response: Response,
        counts: Mapping[str, int] | None = None,
        turn: LastTurn | None = None,
    ) -> None:
        self._config = services.config
        self._deadlines = services.deadlines
        self._record = record
        self._handler = request.handler
        self._leg = leg
        self._response = response
        self._turn = turn
        self._num_events = 0
        self._is_stream = response.content_type == EVENT_STREAM
        is_plain = not response.header(b"content-encoding")
        self._api = api_of(request.path)
        replacer = CountsAtEnd if self._api.has_events and not self._is_stream else CachedTokens
        self._usage = replacer(counts) if counts and is_plain else None

    def answer(self) -> Answer:
        """Return the answer for the client; its bytes are read while they are sent."""
        status = self._record.status = self._response.status
        # The replaced number may be shorter, so the length would be wrong.
        is_whole = self._response.is_complete and not self._is_stream
        dropped = (b"content-length",) if is_whole or self._usage is not None else ()
        headers = passed_headers(self._response, *dropped)
        return Answer(status, headers, self._whole() if is_whole else self._pieces())

    def _whole(self) -> bytes:
        """Return a body that has arrived completely."""
        body = self._response.taken()
        if self._usage is not None:
            body = self._usage.feed(body) + self._usage.finish()
        self._record.sent(len(body))
        self._end(tokens_in_answer(body) if self._turn is not None else 0)
        return body

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            while piece := await self._next():
                if self._is_stream and not self._record.bytes_sent:
                    self._response.silence = self._config.gap_timeout_seconds
                self._record.sent(len(piece))
                self._count(piece)
                stalled = self._deadlines.add(
                    self._config.client_timeout_seconds, self._client_stalled
                )
                try:
                    yield piece
                finally:
                    stalled.cancel()
        except ClientError as error:
            self._leg.breaker.fail(self._record.clock())
            yield self._cut(leg_failed(self._leg.instance, self._leg.role, error))
        else:
            self._end(tokens_in_stream(self._num_events))

    def _count(self, piece: bytes) -> None:
        if self._is_stream:
            number = num_events(piece, are_named=self._api.has_events)
            self._num_events += number
            self._leg.instance.num_events += number

    def _end(self, num_tokens: int) -> None:
        if self._response.status < 400:
            self._leg.breaker.succeed()
        if self._turn is not None:
            self._turn.answered(num_tokens)
        self._record.answered()

    async def _next(self) -> bytes:
        """Return the next bytes for the client; empty at the end."""
        usage = self._usage
        while piece := await self._response.piece():
            if passed := piece if usage is None else usage.feed(piece):
                return passed
        return b"" if usage is None else usage.finish()

    def _cut(self, failure: LegFailed) -> bytes:
        """Return the event that ends a broken stream. Other answers can only be cut off.

        Raises:
            AnswerCut: the server must close the client's connection.
        """
        self._record.failed(failure)
        is_plain = not any(map(self._response.header, _FRAMING_HEADERS))
        if not self._is_stream or not is_plain:
            raise AnswerCut(str(failure))
        # The empty line first ends an event that may have been cut off.
        return b"\n\n" + self._api.event_of(failure)

    def _client_stalled(self) -> None:
        message = "the client stopped reading its answer"
        self._record.failed(ProxyError(408, "client_stalled", message))
        self._handler.cancel()
