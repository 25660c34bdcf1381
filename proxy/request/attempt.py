"""Attempt: the common part of every try to answer a request, with one leg or two."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from p2p_engine.wire.request_ids import new_transfer_id
from proxy.errors import LegFailed, ProxyError
from proxy.fleet.instances import Role
from proxy.fleet.upstream import leg_failed
from proxy.http.asgi import Ends
from proxy.http.client import ClientError, Limits, Response
from proxy.openai import payload
from proxy.openai.answers import check_answer
from proxy.openai.apis import api_of
from proxy.request.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.fleet.instances import Instance, Leg
    from proxy.fleet.last_turns import LastTurn
    from proxy.http.asgi import Answer, ProxyRequest
    from proxy.http.memory import Parts
    from proxy.observe.request_log import RequestRecord
    from proxy.observe.traces import Context, LegTrace
    from proxy.request.services import Services

REQUEST_ID = "X-Request-Id"
MAX_VIA_CHARS = 512  # of the proxies that a request has passed
# Headers of the client that go to the instances. Its request id does not: ours carries addresses.
FORWARDED_HEADERS = ("authorization", "content-type", "user-agent")


class Attempt:
    """One try. `ends` releases everything it holds, at the latest when the request ends."""

    def __init__(
        self,
        services: Services,
        request: ProxyRequest,
        record: RequestRecord,
        asked: payload.ClientRequest,
    ) -> None:
        self.services = services
        self.config = services.config
        self.request = request
        self.record = record
        self.asked = asked
        self.api = api_of(request.path)
        self.transfer_id = new_transfer_id()
        self.failed: Instance | None = None
        self.was_held = False  # is it a held instance that failed the attempt?
        self.doubted: Leg | None = None  # it failed, and that may be due to the request
        self.legs: list[Leg] = []
        self.ends = Ends()
        request.ends.callback(self.ends.close)

    async def run(self) -> Answer:
        """Answer the request.

        Raises:
            LegFailed: a leg failed before the client received anything; `failed` is its instance.
            ProxyError: the request cannot be answered.
        """
        raise NotImplementedError

    def take_leg(self, instance: Instance, role: Role, num_tokens: int) -> Leg:
        """Count a leg until it is released, at the latest when the attempt ends."""
        leg = self.services.registry.take_leg(instance, role, num_tokens)
        self.ends.callback(leg.release)
        self.legs.append(leg)
        return leg

    async def send(
        self, leg: Leg, body: Parts, request_id: str, on_sent: Callable[[], None] = lambda: None
    ) -> Response:
        """Send the leg that answers the client; its answer is open until `ends`.

        Raises:
            LegFailed: the instance failed; `fail` has recorded it.
            ProxyError: the instance found a fault in the request.
        """
        limits = self.limits(silence=self._first_byte_timeout())
        trace = self.trace(leg)
        headers = self.headers(request_id, trace.context, "accept", "accept-encoding")
        try:
            response = await self.services.upstream.post(
                leg.instance, leg.role, self.request.path, body, headers, limits, on_sent
            )
            trace.status = response.status
            self.ends.callback(response.close)
            try:
                await check_answer(response, leg.role.label, self.config.max_body_bytes, self.api)
            except ClientError as error:
                raise leg_failed(leg.instance, leg.role, error) from error
        except ProxyError as error:
            trace.end(error.code)
            if isinstance(error, LegFailed):
                await self.fail(leg, error)
            raise
        return response

    def relay(
        self,
        leg: Leg,
        response: Response,
        counts: Mapping[str, int] | None = None,
        turn: LastTurn | None = None,
    ) -> Answer:
        """Return the answer for the client; 2xx and 3xx close the leg's breaker. The `turn` is told
        how many tokens the answer has."""
        if response.status < 400:
            leg.breaker.recover()
            self.asked = payload.NOTHING  # free the prompt: it may be large, and the stream long
            self.request.free_body()
        relay = Relay(self.services, self.request, self.record, leg, response, counts, turn)
        return relay.answer()

    async def fail(self, leg: Leg, failure: LegFailed) -> None:
        """Record that a leg failed. If another attempt may succeed, the instances of all legs are
        asked first whether they are paused: what a pause refuses, aborts or withdraws is nobody's
        fault."""
        sender = self._sender_to(leg, failure)
        failure.can_retry |= sender is not None
        instances = [each.instance for each in self.legs]
        if failure.can_retry:
            await asyncio.gather(*map(self.services.look, instances))
        self.was_held = any(instance.held for instance in instances)
        self.failed = (sender or leg).instance
        if self.was_held or sender is not None:
            return
        if leg.instance.is_to_blame_for(failure.answered):
            leg.breaker.fail(self.record.clock())
        elif failure.can_retry:
            self.doubted = leg

    def _sender_to(self, leg: Leg, failure: LegFailed) -> Leg | None:
        """Return the prefill leg whose KV a decode leg may have lacked: then decode answers 500,
        and another prefill instance may succeed."""
        if leg.role is Role.PREFILL or failure.status != HTTPStatus.INTERNAL_SERVER_ERROR:
            return None
        return next((each for each in self.legs if each.role is Role.PREFILL), None)

    def trace(self, leg: Leg) -> LegTrace:
        """Begin a leg's place in the request's trace, which ends with the attempt at the latest."""
        trace = self.record.trace.leg(self.name_of(leg), leg.instance, self.transfer_id)
        if trace.has_span:
            self.ends.callback(self._end_trace, trace)
        return trace

    def name_of(self, leg: Leg) -> str:
        """Return the name of a leg in traces."""
        return leg.role.label

    def _end_trace(self, trace: LegTrace) -> None:
        outcome = self.record.outcome or "cancelled"
        trace.end("" if outcome == "ok" else outcome)

    def headers(self, request_id: str, context: Context, *more: str) -> dict[str, str]:
        """Return the headers of a leg: the forwarded ones, those of its trace, and those of the
        client named in `more`."""
        theirs = self.request.headers
        headers = {name: theirs[name] for name in (*FORWARDED_HEADERS, *more) if name in theirs}
        passed = theirs.get("via", "")[-MAX_VIA_CHARS:]
        via = f"{passed}, 1.1 {self.services.name}".removeprefix(", ")
        made = {"content-type": "application/json"}
        return {**made, **headers, **context, "via": via, REQUEST_ID: request_id}

    def limits(self, *, silence: float | None = None, total: float | None = None) -> Limits:
        """Return the limits of a leg, in seconds."""
        return Limits(self.config.connect_timeout_seconds, silence, total, self.request.origin)

    def _first_byte_timeout(self) -> float:
        """Return the timeout of the first byte; only a stream sends it before the generation
        ends."""
        config = self.config
        return (
            config.first_byte_timeout_seconds
            if self.asked.is_stream
            else config.response_timeout_seconds
        )


class Errand(Attempt):
    """A request that one instance answers alone: nothing is prefilled or decoded."""

    def __init__(
        self,
        services: Services,
        request: ProxyRequest,
        record: RequestRecord,
        asked: payload.ClientRequest,
        place: tuple[Instance, Role],
    ) -> None:
        super().__init__(services, request, record, asked)
        instance, role = place
        self._leg = self.take_leg(instance, role, 1)
        record.chose_one(instance, self.transfer_id)

    def name_of(self, leg: Leg) -> str:
        """Return the name of a leg that is neither prefill nor decode."""
        return "errand"

    async def run(self) -> Answer:
        """Send the client's body to the instance and return its answer."""
        body = payload.decode_body(self.asked, None)
        return self.relay(self._leg, await self.send(self._leg, body, self.transfer_id))
