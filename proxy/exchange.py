"""Exchange: takes one request through its prefill leg and then its decode leg.

No decode is sent, or answered to the client, without a prefill that succeeded.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import ClientResponse, ClientTimeout
from quart import Response

from p2p_engine.request_ids import ProxyId, new_transfer_id
from proxy import payload
from proxy.config import CONCURRENT
from proxy.errors import LegFailed, Refused
from proxy.registry import Role
from proxy.relay import Relay, passed_headers
from proxy.upstream import FAILURES, leg_failed

if TYPE_CHECKING:
    from proxy.forward import Forwarder
    from proxy.journey import Journey
    from proxy.lifetime import ProxyRequest
    from proxy.registry import Instance
    from proxy.routing import Pair

REQUEST_ID = "X-Request-Id"
# From the client to the instances. Its request id stays here: ours carries addresses.
FORWARDED_HEADERS = ("Authorization", "Content-Type", "Traceparent", "Tracestate", "User-Agent")
# An instance's own gateway errors keep their status; its other 5xx are a bad gateway to the client.
_GATEWAY_ERRORS = (502, 503, 504)


class Exchange:
    """One request and its two legs. Both instances count it from the choice: prefill until its
    answer is in, decode until the last byte has gone to the client, both at most until `ends`."""

    def __init__(
        self,
        forwarder: Forwarder,
        request: ProxyRequest,
        journey: Journey,
        pair: Pair,
        asked: payload.Asked,
    ) -> None:
        self._config = forwarder.config
        self._upstream = forwarder.upstream
        self._request = request
        self._journey = journey
        self._pair = pair
        self._asked = asked
        self._transfer_id = new_transfer_id()
        self.ends = ExitStack()
        request.ends.callback(self.ends.close)
        take_leg = forwarder.registry.take_leg
        self.ends.callback(take_leg(pair.decode, Role.DECODE, pair.decode_tokens).release)
        if pair.prefill is not None:
            self._prefill_leg = take_leg(pair.prefill, Role.PREFILL, pair.prefill_tokens)
            self.ends.callback(self._prefill_leg.release)
        journey.chose(pair, self._transfer_id)

    async def run(self) -> Response:
        """Answer the request.

        Raises:
            ProxyError: it failed before the client was told anything.
        """
        if self._pair.prefill is None:
            return self._relay(await self._decode_alone())
        proxy_id = _proxy_id(self._pair.prefill, self._pair.decode, self._transfer_id)
        if self._config.dispatch == CONCURRENT:
            return self._relay(await self._run_together(self._pair.prefill, proxy_id))
        answered = await self._prefill(self._pair.prefill, proxy_id)
        return self._relay(await self._decode(proxy_id, answered))

    async def _run_together(self, prefill: Instance, proxy_id: ProxyId) -> ClientResponse:
        """Prefill and decode at once; decode's answer waits for prefill's success."""
        legs = (
            asyncio.ensure_future(self._prefill(prefill, proxy_id)),
            asyncio.ensure_future(self._decode(proxy_id, {})),
        )
        try:
            _, response = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
        return response

    async def _prefill(self, instance: Instance, proxy_id: ProxyId) -> payload.Fields:
        """Run the prefill leg and return the parameters it answered with."""
        params = None if self._pair.is_old_wire else payload.prefill_params(proxy_id)
        response = await self._upstream.post(
            instance,
            Role.PREFILL,
            self._request.path,
            payload.prefill_body(self._asked.fields, params),
            self._headers(str(proxy_id)),
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

    async def _decode(self, proxy_id: ProxyId, answered: payload.Fields) -> ClientResponse:
        """Start the decode leg of a pair."""
        params = None if self._pair.is_old_wire else payload.decode_params(proxy_id, answered)
        return await self._post_decode(payload.decode_body(self._asked, params), str(proxy_id))

    async def _decode_alone(self) -> ClientResponse:
        """Start a decode that computes the prompt itself: its id names no other instance."""
        return await self._post_decode(payload.decode_body(self._asked, None), self._transfer_id)

    async def _post_decode(self, body: bytes, request_id: str) -> ClientResponse:
        """Send the decode leg; its answer is open until `ends`."""
        response = await self._upstream.post(
            self._pair.decode,
            Role.DECODE,
            self._request.path,
            body,
            self._headers(request_id, "Accept", "Accept-Encoding"),
            self._timeout(sock_read=self._first_byte_timeout()),
        )
        self.ends.callback(response.close)
        return response

    def _relay(self, response: ClientResponse) -> Response:
        decode = self._pair.decode
        return Relay(self._config, self._journey, decode, Role.DECODE, response).answer()

    def _headers(self, request_id: str, *more: str) -> dict[str, str]:
        theirs = self._request.headers
        headers = {name: theirs[name] for name in (*FORWARDED_HEADERS, *more) if name in theirs}
        return {"Content-Type": "application/json", **headers, REQUEST_ID: request_id}

    def _first_byte_timeout(self) -> float:
        """Only a stream shows its first byte before the whole generation is done."""
        config = self._config
        return (
            config.first_byte_timeout_seconds
            if self._asked.is_stream
            else config.response_timeout_seconds
        )

    def _timeout(
        self, *, total: float | None = None, sock_read: float | None = None
    ) -> ClientTimeout:
        return ClientTimeout(
            total=total, connect=self._config.connect_timeout_seconds, sock_read=sock_read
        )


def _proxy_id(prefill: Instance, decode: Instance, transfer_id: str) -> ProxyId:
    return ProxyId(prefill.identity.zmq_address, decode.identity.zmq_address, transfer_id)


def _accepted(response: ClientResponse, answer: bytes) -> payload.Fields:
    """Return the parameters in a prefill instance's answer.

    Raises:
        ProxyError: the prefill did not succeed; 4xx are passed on as they are.
    """
    status = response.status
    if 400 <= status < 500:
        raise Refused(Response(answer, status, passed_headers(response)))
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
