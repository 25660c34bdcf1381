"""Forwarder: serves completions, each by an exchange of its own, and answers what goes wrong."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.errors import LegFailed, ProxyError
from proxy.http.asgi import BodyRefused
from proxy.observe.request_log import AccessLog, Journey
from proxy.openai import payload
from proxy.openai.prompt import read_prompt
from proxy.request.attempt import REQUEST_ID, Attempt, Errand
from proxy.request.exchange import Exchange
from proxy.routing.router import Busy, NoInstance

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.config import ProxyConfig
    from proxy.fleet.instances import Instance
    from proxy.fleet.registry import Registry
    from proxy.fleet.upstream import Upstream
    from proxy.http.asgi import Answer, ProxyRequest
    from proxy.http.deadlines import Deadlines
    from proxy.observe.metrics import Metrics
    from proxy.request.release import Releases
    from proxy.routing.admission import Admission
    from proxy.routing.router import Router

logger = logging.getLogger(__name__)

MAX_ECHO_CHARS = 256
SESSION_ID = "X-Session-Id"
COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
# What any one instance can answer.
ERRAND_PATHS = ("/tokenize", "/detokenize", "/v1/embeddings")
NUM_RECENT = 50


class Forwarder:
    """Serves completions. Each request is an `Exchange` of its own."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        router: Router,
        upstream: Upstream,
        releases: Releases,
        admission: Admission,
        metrics: Metrics,
        deadlines: Deadlines,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.registry = registry
        self.router = router
        self.upstream = upstream
        self.releases = releases
        self.admission = admission
        self.metrics = metrics
        self.deadlines = deadlines
        self.clock = clock
        self.access_log = AccessLog()
        # Requests that have not ended, in order of arrival.
        self.journeys: dict[Journey, None] = {}
        # The last ones that have ended, oldest first.
        self.recent: deque[Journey] = deque(maxlen=NUM_RECENT)

    async def serve(self, request: ProxyRequest) -> Answer:
        """Answer one request; the legs it needs end with it."""
        journey = self._begin(request)
        try:
            answer = await self._answer(request, journey)
        except ProxyError as error:
            journey.failed(error)
            answer = error.answer_to_client()
        except Exception:
            logger.exception("a request failed by a fault of ours")
            failure = ProxyError(500, "internal_error", "the proxy failed")
            journey.failed(failure)
            answer = failure.answer_to_client()
        told_id = journey.client_id or journey.transfer_id or "-"
        answer.headers.append((REQUEST_ID.encode(), told_id.encode()))
        return answer

    def _begin(self, request: ProxyRequest) -> Journey:
        client_id = request.headers.get(REQUEST_ID.lower(), "")[:MAX_ECHO_CHARS]
        is_echoed = client_id.isascii() and client_id.isprintable()
        journey = Journey(
            request.path, client_id if is_echoed else "", self.clock, started=self.clock()
        )
        self.journeys[journey] = None
        request.ends.callback(self._end, request, journey)
        return journey

    def _end(self, request: ProxyRequest, journey: Journey) -> None:
        del self.journeys[journey]
        if request.is_abandoned:
            journey.abandoned()
        journey.end()
        self.access_log.add(journey)
        self.recent.append(journey)
        self.metrics.count_journey(journey)

    async def _answer(self, request: ProxyRequest, journey: Journey) -> Answer:
        asked = payload.parse(await self._body(request))
        prompt = read_prompt(asked.fields, request.headers.get(SESSION_ID.lower(), ""))
        failed: list[Instance] = []

        def start() -> Attempt:
            if request.path in ERRAND_PATHS:
                place = self.router.choose_any(prompt.model, failed)
                return Errand(self, request, journey, asked, place)
            return Exchange(self, request, journey, asked, self.router.choose(prompt, failed))

        try:
            attempt = await self.admission.enter(prompt.model, start, request.ends)
        except NoInstance as error:
            missing = [role.label for role in error.missing]
            raise ProxyError(503, "no_instance", str(error), missing=missing) from error
        return await self._run(attempt, start, failed)

    async def _run(
        self, attempt: Attempt, start: Callable[[], Attempt], failed: list[Instance]
    ) -> Answer:
        """Run an attempt, and others in its place while instances fail and others are left.

        Each has a transfer id of its own, and what a failed one holds is let go of at once.
        """
        while True:
            try:
                return await attempt.run()
            except LegFailed as failure:
                attempt.ends.close()
                failed += [attempt.failed] if attempt.failed else []
                if not failure.can_retry or len(failed) > self.config.max_retries:
                    raise
                with suppress(NoInstance, Busy):
                    attempt = start()
                    self.metrics.retries.inc()
                    continue
                raise

    async def _body(self, request: ProxyRequest) -> bytes:
        config = self.config
        try:
            return await request.body(
                config.max_body_bytes, config.client_timeout_seconds, self.deadlines
            )
        except BodyRefused as error:
            raise ProxyError(error.status, "bad_body", str(error)) from error
