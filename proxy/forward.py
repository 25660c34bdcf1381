"""Forwarder: serves completions, each by an exchange of its own, and answers what goes wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from werkzeug.exceptions import HTTPException

from proxy import payload
from proxy.errors import ProxyError
from proxy.exchange import REQUEST_ID, Exchange
from proxy.journey import Journey
from proxy.prompt import Prompt, read_prompt
from proxy.routing import NoInstance, Pair, Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from quart import Response

    from proxy.config import ProxyConfig
    from proxy.lifetime import ProxyRequest
    from proxy.metrics import Metrics
    from proxy.registry import Registry
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
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.registry = registry
        self.router = router
        self.upstream = upstream
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
        pair = self._choose(read_prompt(asked.fields, request.headers.get(SESSION_ID, "")))
        exchange = Exchange(self, request, journey, pair, asked)
        return await exchange.run()

    def _choose(self, prompt: Prompt) -> Pair:
        try:
            return self.router.choose(prompt)
        except NoInstance as error:
            missing = [role.label for role in error.missing]
            raise ProxyError(503, "no_instance", str(error), missing=missing) from error


async def _body(request: ProxyRequest) -> bytes:
    try:
        return cast("bytes", await request.get_data(cache=False))
    except HTTPException as error:  # too large, or too slow
        raise ProxyError(error.code or 400, "bad_body", str(error.description)) from error
    except asyncio.TimeoutError as error:  # too slow, under Python 3.10
        raise ProxyError(408, "bad_body", "the body did not arrive in time") from error
