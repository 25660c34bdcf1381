"""Forwarder: answers requests by attempts, retries them, and turns failures into answers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from proxy.errors import RETRY_AFTER_SECONDS, LegFailed, ProxyError
from proxy.http.asgi import LEFT, Ends
from proxy.http.memory import BodyRefused
from proxy.http.turns import Turns
from proxy.openai import payload
from proxy.openai.apis import (
    APIS,
    CLOSED,
    MESSAGES_PATH,
    RESPONSES_PATH,
    api_of,
    is_anthropic,
    state_refused,
)
from proxy.openai.parsers import Parsers
from proxy.openai.prompt import read_prompt
from proxy.request.attempt import REQUEST_ID, Attempt, Errand
from proxy.request.exchange import Exchange
from proxy.request.tokens import PromptTokens
from proxy.routing.router import Busy, NoInstance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.fleet.held_blocks import HeldBlocks
    from proxy.fleet.instances import Instance, Leg
    from proxy.fleet.weights import FleetWeights
    from proxy.http.asgi import Answer, ProxyRequest
    from proxy.observe.metrics import Metrics
    from proxy.observe.request_log import RequestLog, RequestRecord
    from proxy.request.services import Services
    from proxy.routing.admission import Admission
    from proxy.routing.clients import ClientKeys
    from proxy.routing.router import Router

logger = logging.getLogger(__name__)

MAX_ECHO_CHARS = 256
# Each round of the loop has so many turns for requests that begin, and so much of one counts each:
# what it wakes takes as long again later.
TURNS_TO_START = 4
START_TURN = 0.5
SESSION_ID = "X-Session-Id"
# Paths that any one instance can answer alone.
ERRAND_PATHS = ("/tokenize", "/detokenize", "/v1/embeddings", f"{MESSAGES_PATH}/count_tokens")
PATHS = (*APIS, *ERRAND_PATHS)
CLOSED_PATHS = tuple(CLOSED)
# Where a response would be looked up, and how.
LOOKUP_PATHS = {
    f"{RESPONSES_PATH}/<response_id>": "GET",
    f"{RESPONSES_PATH}/<response_id>/cancel": "POST",
}


class Forwarder:
    """Answers requests. Each attempt at one is an `Exchange` or an `Errand`."""

    def __init__(
        self,
        services: Services,
        clients: ClientKeys,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        log: RequestLog,
        held: HeldBlocks,
        weights: FleetWeights,
    ) -> None:
        self._services = services
        self._clients = clients
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._held = held
        self._weights = weights
        self._tokens = PromptTokens(services, router, held)
        self._parsers = Parsers(services.deadlines)
        self._starts = Turns(TURNS_TO_START, least=START_TURN)

    async def close(self) -> None:
        """End the processes that parse; idempotent."""
        await self._parsers.close()

    async def serve(self, request: ProxyRequest) -> Answer:
        """Answer one request; its legs end with it. Failures become answers, so nothing is
        raised."""
        record = self._begin(request)
        try:
            answer = await self._answer(request, record)
        except ProxyError as error:
            record.failed(error)
            answer = explained(error, request.path)
        except Exception:
            logger.exception("a request failed: internal error of the proxy")
            failure = ProxyError(500, "internal_error", "the proxy failed")
            record.failed(failure)
            answer = explained(failure, request.path)
        except asyncio.CancelledError:
            if request.is_abandoned:
                raise
            stopped = ProxyError(503, "proxy_stopped", "the proxy is being stopped")
            record.failed(stopped)
            answer = explained(stopped, request.path)
        told_id = record.client_id or record.transfer_id or "-"
        answer.headers.append((REQUEST_ID.encode(), told_id.encode()))
        return answer

    def _begin(self, request: ProxyRequest) -> RequestRecord:
        client_id = request.headers.get(REQUEST_ID.lower(), "")[:MAX_ECHO_CHARS]
        is_echoed = client_id.isascii() and client_id.isprintable()
        record = self._log.begin(request.path, client_id if is_echoed else "")
        request.ends.callback(self._end, request, record)
        return record

    def _end(self, request: ProxyRequest, record: RequestRecord) -> None:
        if request.is_cut:
            record.cut(LEFT if request.is_abandoned else "proxy_stopped")
        self._log.end(record)
        record.trace.end(record)
        self._metrics.count_request(record)

    async def _answer(self, request: ProxyRequest, record: RequestRecord) -> Answer:
        await self._starts.take(request.origin)
        given = request.headers.pop("authorization", "")
        client = self._clients.find(given)
        # A stranger has no span, and decides of none.
        waited = record.clock() - record.started
        record.trace = self._services.traces.begin(request.path, request.headers, waited)
        if client is not None:
            record.client = client.name  # also if a limit refuses the request
            self._clients.admit(client, request.ends)
        if passed_on := self._clients.passed_on(given):
            request.headers["authorization"] = passed_on
        if self._services.name in request.headers.get("via", ""):
            raise ProxyError(508, "loop", "the request came back: an instance is a proxy")
        api = api_of(request.path)
        asked = payload.prepared(await self._read(request), api)
        prompt = read_prompt(asked.fields, request.headers.get(SESSION_ID.lower(), ""), api)
        if request.path in APIS and api.is_tokenized:
            prompt.sighting = await self._tokens.sight(request, asked.fields, prompt)
        failed: list[Instance] = []

        def start() -> Attempt:
            if request.path in ERRAND_PATHS:
                place = self._router.choose_any(prompt.model, failed)
                return Errand(self._services, request, record, asked, place)
            pair = self._router.choose(prompt, failed)
            if prompt.sighting is not None:
                self._held.promise(prompt.sighting, pair.prefill or pair.decode)
            return Exchange(self._services, request, record, asked, pair, prompt)

        def begin() -> Attempt:
            # While weights are changed, or vLLM is paused, a request waits in its queue.
            if self._weights.state(prompt.model) == "stopping":
                raise Busy("the weights are being changed")
            try:
                return start()
            except NoInstance as error:
                if self._router.may_pair_soon(prompt.model):
                    raise Busy(str(error)) from error
                raise

        place = Ends()  # among those that run
        request.ends.callback(place.close)

        async def admitted() -> Attempt:
            place.close()
            try:
                line = self._router.line_of(prompt.model)
                return await self._admission.enter(line, begin, place)
            except ProxyError as error:
                model = prompt.model
                is_stopping = self._weights.state(model) == "stopping"
                is_delayed = is_stopping or self._router.may_pair_soon(model)
                if error.status == HTTPStatus.TOO_MANY_REQUESTS and is_delayed:
                    raise self._weights.refusal(model) from error
                raise
            except NoInstance as error:
                missing = [role.label for role in error.missing]
                wait = error.breaker_seconds or RETRY_AFTER_SECONDS
                raise ProxyError(
                    503, "no_instance", str(error), retry_after=wait, missing=missing
                ) from error

        return await self._run(admitted, start, failed)

    async def _run(
        self,
        admitted: Callable[[], Awaitable[Attempt]],
        start: Callable[[], Attempt],
        failed: list[Instance],
    ) -> Answer:
        """Run an attempt; while instances fail, retry with those that have not.

        Each attempt has its own transfer id. A failed one releases its resources before the next
        starts. One that found its instance paused goes back to the queue. Of failures that may be
        due to the request, the first is retried, and counts against its instance if another one
        then succeeds.
        """
        doubted: Leg | None = None
        attempt = await admitted()
        while True:
            try:
                answer = await attempt.run()
            except LegFailed as failure:
                attempt.ends.close()
                if failure.can_retry and attempt.was_held:
                    attempt = await admitted()
                    self._metrics.retries.inc()
                    continue
                failed += [attempt.failed] if attempt.failed else []
                if not failure.can_retry or len(failed) > self._services.config.max_retries:
                    raise
                if attempt.doubted is not None and doubted is not None:
                    raise
                doubted = doubted or attempt.doubted
                with suppress(NoInstance, Busy):
                    attempt = start()
                    self._metrics.retries.inc()
                    continue
                raise
            if doubted is not None:
                doubted.breaker.fail(attempt.record.clock())
            return answer

    async def _read(self, request: ProxyRequest) -> payload.ClientRequest:
        """Read and parse the body."""
        config = self._services.config
        try:
            body = await request.body(
                config.max_body_bytes, config.client_timeout_seconds, self._services.deadlines
            )
            if isinstance(body, bytes):
                return payload.parse(body)
            return await self._parsers.parse(body)
        except BodyRefused as error:
            raise ProxyError(error.status, error.code, str(error)) from error


def explained(error: ProxyError, path: str) -> Answer:
    """Return the answer that tells a client of an error, in the form of the path's API."""
    return error.answer_to_client(is_anthropic=is_anthropic(path))


def lookup_refused(response_id: str) -> ProxyError:
    """Return the error of who looks a response up."""
    return state_refused(f"the response {response_id!r} is not kept, nor can it be cancelled")


def door_refused(path: str) -> ProxyError:
    """Return the error of a path that vLLM has and the proxy has not."""
    return ProxyError(404, "not_served", f"{path} is not served here: {CLOSED[path]}")
