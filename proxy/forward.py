"""Forwarder: serves completions, each by an exchange of its own, and answers what goes wrong."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from werkzeug.exceptions import HTTPException

from proxy import payload
from proxy.attempt import REQUEST_ID, Attempt, Errand
from proxy.errors import LegFailed, ProxyError
from proxy.exchange import Exchange
from proxy.journey import Journey
from proxy.prompt import read_prompt
from proxy.routing import Busy, NoInstance

if TYPE_CHECKING:
    from collections.abc import Callable

    from quart import Response

    from proxy.admission import Admission
    from proxy.config import ProxyConfig
    from proxy.instances import Instance
    from proxy.lifetime import ProxyRequest
    from proxy.metrics import Metrics
    from proxy.registry import Registry
    from proxy.release import Releases
    from proxy.routing import Router
    from proxy.upstream import Upstream

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
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.registry = registry
        self.router = router
        self.upstream = upstream
        self.releases = releases
        self.admission = admission
        self.metrics = metrics
        self.clock = clock
        # Requests that have not ended, in order of arrival.
        self.journeys: dict[Journey, None] = {}
        # The last ones that have ended, oldest first.
        self.recent: deque[Journey] = deque(maxlen=NUM_RECENT)

    async def serve(self, request: ProxyRequest) -> Response:
        """Answer one request; the legs it needs end with it."""
        journey = self._begin(request)
        try:
            response = await self._answer(request, journey)
        except ProxyError as error:
            journey.failed(error)
            response = error.response()
        response.headers[REQUEST_ID] = journey.client_id or journey.transfer_id or "-"
        return response

    def _begin(self, request: ProxyRequest) -> Journey:
        client_id = request.headers.get(REQUEST_ID, "")[:MAX_ECHO_CHARS]
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
        self.recent.append(journey)
        self.metrics.count_journey(journey)

    async def _answer(self, request: ProxyRequest, journey: Journey) -> Response:
        asked = payload.parse(await _body(request))
        prompt = read_prompt(asked.fields, request.headers.get(SESSION_ID, ""))
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
    ) -> Response:
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


async def _body(request: ProxyRequest) -> bytes:
    try:
        return cast("bytes", await request.get_data(cache=False))
    except HTTPException as error:  # too large, or too slow
        raise ProxyError(error.code or 400, "bad_body", str(error.description)) from error
    except asyncio.TimeoutError as error:  # too slow, under Python 3.10
        raise ProxyError(408, "bad_body", "the body did not arrive in time") from error
