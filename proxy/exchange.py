"""Exchange: takes one request through its prefill leg and then its decode leg.

No decode is sent, or answered to the client, without a prefill that succeeded.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from aiohttp import ClientResponse, ClientTimeout
from quart import Response

from p2p_engine.request_ids import ProxyId, new_transfer_id
from proxy import payload
from proxy.answers import check_decode, check_prefill, read
from proxy.config import CONCURRENT
from proxy.errors import LegFailed
from proxy.instances import Role
from proxy.relay import Relay
from proxy.upstream import FAILURES, leg_failed

if TYPE_CHECKING:
    from proxy.forward import Forwarder
    from proxy.instances import Instance, Leg
    from proxy.journey import Journey
    from proxy.lifetime import ProxyRequest
    from proxy.routing import Pair

REQUEST_ID = "X-Request-Id"
# From the client to the instances. Its request id stays here: ours carries addresses.
FORWARDED_HEADERS = ("Authorization", "Content-Type", "Traceparent", "Tracestate", "User-Agent")


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
        self._releases = forwarder.releases
        self._request = request
        self._journey = journey
        self._pair = pair
        self._asked = asked
        self._transfer_id = new_transfer_id()
        # What prefill has sent to decode, and whether decode was asked to use it.
        self._kv: tuple[ProxyId, payload.Fields] | None = None
        self._is_claimed = False
        self.failed: Instance | None = None
        self.ends = ExitStack()
        request.ends.callback(self.ends.close)
        take_leg = forwarder.registry.take_leg
        self._decode_leg = take_leg(pair.decode, Role.DECODE, pair.decode_tokens)
        self.ends.callback(self._decode_leg.release)
        if pair.prefill is not None:
            self._prefill_leg = take_leg(pair.prefill, Role.PREFILL, pair.prefill_tokens)
            self.ends.callback(self._prefill_leg.release)
        self.ends.callback(self._release_unclaimed)
        journey.chose(pair, self._transfer_id)

    async def run(self) -> Response:
        """Answer the request.

        Raises:
            LegFailed: before the client was told anything; `failed` is the instance.
            ProxyError: the request cannot be answered.
        """
        if self._pair.prefill is None:
            return self._relay(await self._decode_alone())
        proxy_id = _proxy_id(self._pair.prefill, self._pair.decode, self._transfer_id)
        # Both at once only where neither leg needs to learn an address from the other's answer.
        if self._config.dispatch == CONCURRENT and proxy_id.prefill and proxy_id.decode:
            return self._relay(await self._run_together(proxy_id))
        answered = await self._prefill(proxy_id)
        return self._relay(await self._decode(proxy_id, answered))

    async def _run_together(self, proxy_id: ProxyId) -> ClientResponse:
        """Prefill and decode at once; decode's answer waits for prefill's success."""
        legs = (
            asyncio.ensure_future(self._prefill(proxy_id)),
            asyncio.ensure_future(self._decode(proxy_id, {})),
        )
        try:
            _, response = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        return response

    async def _prefill(self, proxy_id: ProxyId) -> payload.Fields:
        """Run the prefill leg and return the parameters it answered with."""
        params = None if self._pair.is_old_wire else payload.prefill_params(proxy_id)
        body = payload.prefill_body(self._asked.fields, params)
        leg = self._prefill_leg
        try:
            answered = check_prefill(*await self._post_prefill(leg.instance, body, proxy_id))
        except LegFailed:
            self._fail(leg)
            raise
        finally:
            leg.release()
        leg.breaker.succeed()
        self._kv = proxy_id, answered
        return answered

    async def _post_prefill(
        self, instance: Instance, body: bytes, proxy_id: ProxyId
    ) -> tuple[ClientResponse, bytes]:
        timeout = self._timeout(total=self._config.prefill_timeout_seconds)
        headers = self._headers(payload.request_id(proxy_id))
        response = await self._upstream.post(
            instance, Role.PREFILL, self._request.path, body, headers, timeout
        )
        try:
            answer = await read(response, self._config.max_body_bytes)
        except FAILURES as error:
            raise leg_failed(instance, Role.PREFILL, error) from error
        finally:
            response.close()
        self._journey.prefilled()
        return response, answer

    async def _decode(self, proxy_id: ProxyId, answered: payload.Fields) -> ClientResponse:
        """Start the decode leg of a pair."""
        params = None if self._pair.is_old_wire else payload.decode_params(proxy_id, answered)
        body = payload.decode_body(self._asked, params)
        return await self._post_decode(body, payload.request_id(proxy_id))

    async def _decode_alone(self) -> ClientResponse:
        """Start a decode that computes the prompt itself: its id names no other instance."""
        return await self._post_decode(payload.decode_body(self._asked, None), self._transfer_id)

    async def _post_decode(self, body: bytes, request_id: str) -> ClientResponse:
        """Send the decode leg; its answer is open until `ends`."""
        leg = self._decode_leg
        timeout = self._timeout(sock_read=self._first_byte_timeout())
        headers = self._headers(request_id, "Accept", "Accept-Encoding")
        try:
            response = await self._upstream.post(
                leg.instance, Role.DECODE, self._request.path, body, headers, timeout, self._claim
            )
            self.ends.callback(response.close)
            await check_decode(response, self._config.max_body_bytes)
        except LegFailed:
            self._fail(leg)
            raise
        return response

    def _claim(self) -> None:
        """Decode has the request: the KV is its own, unless it refuses."""
        self._is_claimed = True

    def _relay(self, response: ClientResponse) -> Response:
        self._is_claimed = response.status < 400
        if self._is_claimed:
            self._decode_leg.breaker.recover()
            self._asked = payload.NOTHING  # both legs have it; prompts are large, streams long
        return Relay(self._config, self._journey, self._decode_leg, response).answer()

    def _fail(self, leg: Leg) -> None:
        leg.breaker.fail(self._journey.clock())
        self.failed = leg.instance

    def _release_unclaimed(self) -> None:
        """Have decode let go of KV that it was never asked to use."""
        decode = self._pair.decode
        if self._kv is None or self._is_claimed or not decode.is_ready:
            return
        proxy_id, answered = self._kv
        params = None if self._pair.is_old_wire else payload.decode_params(proxy_id, answered)
        body = payload.prefill_body(self._asked.fields, params)
        headers = self._headers(payload.request_id(proxy_id))
        self._releases.begin(decode, self._request.path, body, headers)

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
