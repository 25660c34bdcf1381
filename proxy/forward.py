"""Forwarder: serves completions, each by an exchange of its own, and answers what goes wrong."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from werkzeug.exceptions import HTTPException

from proxy import payload
from proxy.errors import LegFailed, ProxyError
from proxy.exchange import REQUEST_ID, Exchange
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

    async def serve(self, request: ProxyRequest) -> Response:
        """Answer one request; the legs it needs end with it."""
        journey = self._begin(request)
        try:
            response = await self._answer(request, journey)
        except ProxyError as error:
            journey.failed(error)
            response = error.response()
        response.headers[REQUEST_ID] = journey.client_id or journey.transfer_id
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
        self.metrics.count_journey(journey)

    async def _answer(self, request: ProxyRequest, journey: Journey) -> Response:
        asked = payload.parse(await _body(request))
        prompt = read_prompt(asked.fields, request.headers.get(SESSION_ID, ""))
        failed: list[Instance] = []

        def start() -> Exchange:
            return Exchange(self, request, journey, self.router.choose(prompt, failed), asked)

        try:
            exchange = await self.admission.enter(prompt.model, start, request.ends)
        except NoInstance as error:
            missing = [role.label for role in error.missing]
            raise ProxyError(503, "no_instance", str(error), missing=missing) from error
        return await self._run(exchange, start, failed)

    async def _run(
        self, exchange: Exchange, start: Callable[[], Exchange], failed: list[Instance]
    ) -> Response:
        """Run an exchange, and others in its place while instances fail and others are left.

        Each has a transfer id of its own, and what a failed one holds is let go of at once.
        """
        while True:
            try:
                return await exchange.run()
            except LegFailed as failure:
                exchange.ends.close()
                failed += [exchange.failed] if exchange.failed else []
                if not failure.can_retry or len(failed) > self.config.max_retries:
                    raise
                with suppress(NoInstance, Busy):
                    exchange = start()
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
