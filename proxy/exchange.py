"""Exchange: takes one request through its prefill leg and then its decode leg.

No decode is sent, or answered to the client, without a prefill that succeeded.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientResponse, ClientTimeout
from quart import Response
from werkzeug.datastructures import Headers

from p2p_engine.request_ids import ProxyId, new_transfer_id
from proxy import payload
from proxy.errors import LegFailed, ProxyError, Refused
from proxy.lifetime import AnswerCut
from proxy.registry import Role
from proxy.upstream import FAILURES, leg_failed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.forward import Forwarder
    from proxy.journey import Journey
    from proxy.lifetime import ProxyRequest
    from proxy.routing import Pair

REQUEST_ID = "X-Request-Id"
# From the client to the instances. Its request id stays here: ours carries addresses.
FORWARDED_HEADERS = ("Authorization", "Content-Type", "Traceparent", "Tracestate", "User-Agent")
# Not from an instance to the client: what belongs to the one connection or to the instance.
KEPT_BACK_HEADERS = {
    "connection", "date", "keep-alive", "proxy-connection", "server", "set-cookie", "te", "trailer",
    "transfer-encoding", "upgrade", "x-request-id",
}  # fmt: skip
# An instance's own gateway errors keep their status; its other 5xx are a bad gateway to the client.
_GATEWAY_ERRORS = (502, 503, 504)
_EVENT_STREAM = "text/event-stream"
# With one of these, nothing of ours can be put behind what was cut.
_FRAMING_HEADERS = ("Content-Length", "Content-Encoding")


class Exchange:
    """One request and its two legs. Both instances count it from the choice: prefill until its
    answer is in, decode until the last byte has gone to the client."""

    def __init__(
        self,
        forwarder: Forwarder,
        request: ProxyRequest,
        journey: Journey,
        pair: Pair,
        body: bytes,
        fields: payload.Fields,
    ) -> None:
        self._config = forwarder.config
        self._upstream = forwarder.upstream
        self._request = request
        self._journey = journey
        self._pair = pair
        self._body = body
        self._fields = fields
        self._is_stream = payload.is_stream(fields)
        self._prefill_leg = forwarder.registry.take_leg(pair.prefill, Role.PREFILL)
        request.ends.callback(self._prefill_leg.release)
        decode_leg = forwarder.registry.take_leg(pair.decode, Role.DECODE)
        request.ends.callback(decode_leg.release)
        self._proxy_id = ProxyId(
            pair.prefill.identity.zmq_address, pair.decode.identity.zmq_address, new_transfer_id()
        )
        journey.chose(pair, self._proxy_id)

    async def run_in_turn(self) -> Response:
        """Prefill, then decode."""
        answered = await self._prefill()
        return self._relay(await self._decode(answered))

    async def run_together(self) -> Response:
        """Prefill and decode at once; decode's answer waits for prefill's success."""
        legs = (asyncio.ensure_future(self._prefill()), asyncio.ensure_future(self._decode({})))
        try:
            _, response = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
        return self._relay(response)

    async def _prefill(self) -> payload.Fields:
        """Run the prefill leg and return the parameters it answered with."""
        instance = self._pair.prefill
        params = None if self._pair.is_old_wire else payload.prefill_params(self._proxy_id)
        response = await self._upstream.post(
            instance,
            Role.PREFILL,
            self._request.path,
            payload.prefill_body(self._fields, params),
            self._headers(),
            self._timeout(total=self._config.prefill_timeout_seconds),
        )
        try:
            answer = await _read(response, self._config.max_body_bytes)
        except FAILURES as error:
            raise leg_failed(instance, Role.PREFILL, error) from error
        finally:
            response.close()
        self._journey.prefilled()
        self._prefill_leg.release()
        return _accepted(response, answer)

    async def _decode(self, answered: payload.Fields) -> ClientResponse:
        """Start the decode leg; its answer is open until the request ends."""
        params = None if self._pair.is_old_wire else payload.decode_params(self._proxy_id, answered)
        response = await self._upstream.post(
            self._pair.decode,
            Role.DECODE,
            self._request.path,
            payload.decode_body(self._body, self._fields, params),
            self._headers("Accept", "Accept-Encoding"),
            self._timeout(sock_read=self._first_byte_timeout()),
        )
        self._request.ends.callback(response.close)
        return response

    def _relay(self, response: ClientResponse) -> Response:
        self._body, self._fields = b"", {}  # both legs have them; prompts are large, streams long
        self._journey.status = response.status
        return Response(self._pieces(response), response.status, _passed_headers(response))

    async def _pieces(self, response: ClientResponse) -> AsyncIterator[bytes]:
        """Yield the decode instance's bytes as they come."""
        handler = asyncio.current_task()
        loop = asyncio.get_running_loop()
        try:
            async for piece in response.content.iter_any():
                if self._is_stream and not self._journey.bytes_sent:
                    _limit_gaps(response, self._config.gap_timeout_seconds)
                self._journey.sent(len(piece))
                stalled = loop.call_later(
                    self._config.client_timeout_seconds, self._client_stalled, handler
                )
                try:
                    yield piece
                finally:
                    stalled.cancel()
        except FAILURES as error:
            yield self._cut(response, leg_failed(self._pair.decode, Role.DECODE, error))
        else:
            self._journey.answered()

    def _cut(self, response: ClientResponse, failure: LegFailed) -> bytes:
        """Return the event that ends a cut stream; any other answer can only be broken off.

        Raises:
            AnswerCut: the client must see a broken connection.
        """
        self._journey.failed(failure)
        is_plain = not any(name in response.headers for name in _FRAMING_HEADERS)
        if response.content_type != _EVENT_STREAM or not is_plain:
            raise AnswerCut(str(failure))
        # The empty line first closes the event that may have been cut in the middle.
        return b"\n\ndata: %b\n\n" % msgspec.json.encode(failure.body())

    def _client_stalled(self, handler: asyncio.Task[object] | None) -> None:
        message = "the client does not take its answer"
        self._journey.failed(ProxyError(408, "client_stalled", message))
        if handler is not None:
            handler.cancel()

    def _headers(self, *more: str) -> dict[str, str]:
        theirs = self._request.headers
        headers = {name: theirs[name] for name in (*FORWARDED_HEADERS, *more) if name in theirs}
        return {"Content-Type": "application/json", **headers, REQUEST_ID: str(self._proxy_id)}

    def _first_byte_timeout(self) -> float:
        """Only a stream shows its first byte before the whole generation is done."""
        config = self._config
        return (
            config.first_byte_timeout_seconds
            if self._is_stream
            else config.response_timeout_seconds
        )

    def _timeout(
        self, *, total: float | None = None, sock_read: float | None = None
    ) -> ClientTimeout:
        return ClientTimeout(
            total=total, connect=self._config.connect_timeout_seconds, sock_read=sock_read
        )


def _accepted(response: ClientResponse, answer: bytes) -> payload.Fields:
    """Return the parameters in a prefill instance's answer.

    Raises:
        ProxyError: the prefill did not succeed; 4xx are passed on as they are.
    """
    status = response.status
    if 400 <= status < 500:
        raise Refused(Response(answer, status, _passed_headers(response)))
    if status != HTTPStatus.OK:
        passed = status if status in _GATEWAY_ERRORS else HTTPStatus.BAD_GATEWAY
        raise LegFailed(passed, "prefill_failed", f"the prefill instance answered {status}")
    try:
        return payload.answered_params(answer)
    except ValueError as error:
        message = f"the prefill instance answered {error}"
        raise LegFailed(HTTPStatus.BAD_GATEWAY, "prefill_bad_answer", message) from error


async def _read(response: ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            return b""  # no answer to a prefill is that long: the caller finds it bad
    return bytes(body)


def _limit_gaps(response: ClientResponse, seconds: float) -> None:
    """From now on, limit the silence between two pieces; it does not run while we read none."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:
        connection.protocol.read_timeout = seconds
        connection.protocol.start_timeout()


def _passed_headers(response: ClientResponse) -> Headers:
    return Headers(
        (name, value)
        for name, value in response.headers.items()
        if name.lower() not in KEPT_BACK_HEADERS and value.isascii()
    )
