"""Exchange: runs one request through its prefill leg and its decode leg.

With a prefill leg, no decode is answered to the client before the prefill has succeeded.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from p2p_engine.wire.request_ids import ProxyId
from proxy.config import CONCURRENT
from proxy.errors import LegFailed, ProxyError
from proxy.fleet.instances import Role
from proxy.fleet.last_turns import LastTurn
from proxy.fleet.upstream import leg_failed
from proxy.http.client import ClientError, Response
from proxy.openai import payload
from proxy.openai.answers import check_prefill, read
from proxy.openai.prompt import Prompt
from proxy.request.attempt import Attempt

if TYPE_CHECKING:
    from proxy.fleet.instances import Instance
    from proxy.http.asgi import Answer, ProxyRequest
    from proxy.http.memory import Parts
    from proxy.observe.request_log import RequestRecord
    from proxy.observe.traces import LegTrace
    from proxy.request.services import Services
    from proxy.routing.router import InstancePair


class Exchange(Attempt):
    """One request and its legs. Both instances count it from the moment they are chosen.

    The prefill leg counts until its answer is complete, the decode leg until the last byte has gone
    to the client. `ends` releases both at the latest.
    """

    def __init__(
        self,
        services: Services,
        request: ProxyRequest,
        record: RequestRecord,
        asked: payload.ClientRequest,
        pair: InstancePair,
        prompt: Prompt,
    ) -> None:
        super().__init__(services, request, record, asked)
        self._pair = pair
        self._prompt = prompt
        # The KV that prefill has sent to decode, and whether decode was asked to use it.
        self._kv: tuple[ProxyId, payload.Prefilled] | None = None
        self._is_claimed = False
        self._decode_leg = self.take_leg(pair.decode, Role.DECODE, pair.decode_tokens)
        if pair.prefill is not None:
            self._prefill_leg = self.take_leg(pair.prefill, Role.PREFILL, pair.prefill_tokens)
        self.ends.callback(self._release_unclaimed)
        record.chose(pair.prefill, pair.decode, self.transfer_id)

    async def run(self) -> Answer:
        """Answer the request; raises like `Attempt.run`."""
        if self._pair.prefill is None:
            return self._answer(await self._decode_alone())
        proxy_id = _proxy_id(self._pair.prefill, self._pair.decode, self.transfer_id)
        # Concurrent dispatch needs both KV addresses: neither leg can wait for the other's answer.
        if self.config.dispatch == CONCURRENT and proxy_id.prefill and proxy_id.decode:
            return self._answer(await self._run_together(proxy_id))
        prefilled = await self._prefill(proxy_id)
        return self._answer(await self._decode(proxy_id, prefilled.params))

    async def _run_together(self, proxy_id: ProxyId) -> Response:
        """Run prefill and decode at once; decode's answer waits for prefill's success."""
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

    async def _prefill(self, proxy_id: ProxyId) -> payload.Prefilled:
        """Run the prefill leg and return the relevant part of its answer."""
        params = None if self._pair.is_old_wire else self._prefill_params(proxy_id)
        body = payload.prefill_body(self.asked.fields, params, self.api)
        leg = self._prefill_leg
        trace = self.trace(leg)
        try:
            response, answer = await self._post_prefill(leg.instance, body, proxy_id, trace)
            if answer is None and response.status == HTTPStatus.OK and proxy_id.prefill:
                self._kv = proxy_id, payload.UNREAD  # its name alone is enough to release it
            prefilled = check_prefill(response, answer, self.api)
        except ProxyError as error:
            trace.end(error.code)
            if isinstance(error, LegFailed):
                await self.fail(leg, error)
            raise
        finally:
            leg.release()
        trace.end()
        leg.breaker.succeed()
        self._kv = proxy_id, prefilled
        return prefilled

    def _prefill_params(self, proxy_id: ProxyId) -> payload.Params:
        last = self._last_turn()
        # What prefill then holds back, decode learns from prefill's answer.
        is_told = self.config.dispatch != CONCURRENT
        may_have = is_told and self._pair.decode.has_prefix_cache
        num_present = self._num_present(proxy_id, last) if may_have else 0
        return payload.prefill_params(proxy_id, last.transfer if last else None, num_present)

    def _last_turn(self) -> LastTurn | None:
        """Return the session's last turn, if the prompt goes on with it: a client may hold several
        chats under one name."""
        prompt = self._prompt
        last = self.services.last_turns.find(self.record.client, prompt.session, prompt.model)
        return last if last is not None and prompt.goes_on_with(last.beginning) else None

    def _num_present(self, proxy_id: ProxyId, last: LastTurn | None) -> int:
        """Of how many of the prompt's first tokens decode should have the KV: by its blocks where
        it tells of them, else by the session's last turn."""
        decode, sighting = self._pair.decode, self._prompt.sighting
        if sighting is not None and decode in sighting.held and decode not in sighting.partial:
            return sighting.held[decode]
        return last.num_tokens if last and last.transfer.decode == proxy_id.decode else 0

    async def _post_prefill(
        self, instance: Instance, body: Parts, proxy_id: ProxyId, trace: LegTrace
    ) -> tuple[Response, bytes | None]:
        limits = self.limits(total=self.config.prefill_timeout_seconds)
        headers = self.headers(payload.request_id(proxy_id), trace.context)
        response = await self.services.upstream.post(
            instance, Role.PREFILL, self.request.path, body, headers, limits
        )
        trace.status = response.status
        try:
            most = min(self.config.max_body_bytes, payload.MAX_PREFILL_BYTES)
            answer = await read(response, most)
        except ClientError as error:
            raise leg_failed(instance, Role.PREFILL, error) from error
        finally:
            response.close()
        self.record.prefilled()
        return response, answer

    async def _decode(self, proxy_id: ProxyId, answered: payload.Answered) -> Response:
        """Send the decode leg of a pair."""
        body = payload.decode_body(self.asked, self._decode_params(proxy_id, answered))
        return await self.send(
            self._decode_leg, body, payload.request_id(proxy_id), on_sent=self._claim
        )

    def _decode_params(
        self, proxy_id: ProxyId, answered: payload.Answered
    ) -> payload.Params | None:
        if self._pair.is_old_wire:
            return None
        return payload.decode_params(proxy_id, answered, keeps=bool(self._prompt.session))

    async def _decode_alone(self) -> Response:
        """Send a decode leg that computes the prompt itself; its request id names no other
        instance. An instance that has registered has our connector, and is told so."""
        has_registered = self._pair.decode.last_beat is not None and not self._pair.is_old_wire
        told = payload.NO_TRANSFER if has_registered else None
        body = payload.decode_body(self.asked, told)
        return await self.send(self._decode_leg, body, self.transfer_id)

    def _claim(self) -> None:
        """Record that decode has the request and will use the KV, unless it refuses."""
        self._is_claimed = True

    def _answer(self, response: Response) -> Answer:
        self._is_claimed = response.status < 400
        counts = self._kv[1].counts if self._kv else None
        turn: LastTurn | None = None
        if self._is_claimed and self._kv is not None and self._pair.prefill is not None:
            # Each continuation of a prompt is a separate transfer.
            (proxy_id, prefilled), prompt = self._kv, self._prompt
            num_choices = payload.num_choices(self.asked.fields, self.api)
            num_tokens = prefilled.prompt_tokens * num_choices
            self._pair.decode.count_kv(self._pair.prefill, num_tokens)
            if prompt.session:
                turn = LastTurn(proxy_id, prefilled.prompt_tokens, prompt.beginning())
                client, turns = self.record.client, self.services.last_turns
                turns.put(client, prompt.session, prompt.model, turn)
            turn = turn if num_choices == 1 else None  # the next turn goes on with one of them
        if self._is_claimed:
            self._prompt = Prompt()  # it has the text, and the stream may be long
        return self.relay(self._decode_leg, response, counts, turn)

    def _release_unclaimed(self) -> None:
        """Make decode release KV that it was never asked to use."""
        decode = self._pair.decode
        if self._kv is None or self._is_claimed or not decode.is_ready:
            return
        proxy_id, prefilled = self._kv
        params = payload.decode_params(proxy_id, prefilled.params)
        told = None if self._pair.is_old_wire else params
        body = payload.prefill_body(self.asked.fields, told, self.api)
        context = self.record.trace.context(self.transfer_id)
        headers = self.headers(payload.request_id(proxy_id), context)
        assert self.request.keep is not None
        keep = self.request.keep.again()
        self.services.releases.begin(decode, self.request.path, body, headers, keep)


def _proxy_id(prefill: Instance, decode: Instance, transfer_id: str) -> ProxyId:
    return ProxyId(prefill.identity.zmq_address, decode.identity.zmq_address, transfer_id)
