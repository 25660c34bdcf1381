"""Upstream: the one HTTP client, chosen for long streams to a few busy servers."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import ClientResponse, ClientSession, ClientTimeout, TraceConfig

from proxy.errors import LegFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.config import ProxyConfig
    from proxy.instances import Instance, Role
    from proxy.metrics import Metrics

logger = logging.getLogger(__name__)

# vLLM's server closes a connection that was idle for 5 s; ours must never be the older one.
KEEPALIVE_SECONDS = 3.0
# A connection that was closed before our request reached it shows that at once.
RACE_SECONDS = 1.0
# What aiohttp raises when the other side closed an idle connection just as we wrote to it.
_CLOSED_BY_PEER = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError)


class Upstream:
    """Sends requests to instances and names what goes wrong. Open it inside the event loop."""

    def __init__(self, config: ProxyConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._session: ClientSession | None = None

    def open(self) -> None:
        """Make the session."""
        trace = TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        trace.on_request_headers_sent.append(_note_sent)
        self._session = ClientSession(
            # No limit: the 101st stream must not wait for one of the first 100 to end.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            # Bytes go through as they came, and one client's cookies never reach another's request.
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            timeout=ClientTimeout(total=None),
            trace_configs=[trace],
        )

    async def close(self) -> None:
        """Close every connection, idle or not; idempotent."""
        if self._session is not None:
            await self._session.close()

    async def get(
        self, instance: Instance, path: str, headers: Mapping[str, str], timeout: ClientTimeout
    ) -> ClientResponse:
        """Send a GET and wait for the answer's headers. Errors are aiohttp's."""
        return await self._opened().get(
            _url(instance, path), headers=headers, timeout=timeout, allow_redirects=False
        )

    async def post(
        self,
        instance: Instance,
        role: Role,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: ClientTimeout,
        on_sent: Callable[[], None] = lambda: None,
    ) -> ClientResponse:
        """Send one leg's request and wait for the answer's headers.

        `on_sent` is called when the request is on its way: from then on the instance may have it.

        Raises:
            LegFailed: there is no answer.
        """
        try:
            return await self._post(instance, role, path, body, headers, timeout, on_sent)
        except FAILURES as error:
            raise leg_failed(instance, role, error) from error

    async def _post(
        self,
        instance: Instance,
        role: Role,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: ClientTimeout,
        on_sent: Callable[[], None],
    ) -> ClientResponse:
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            connection = SimpleNamespace(is_reused=False, on_sent=on_sent)
            try:
                return await self._opened().post(
                    _url(instance, path),
                    data=body,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except _CLOSED_BY_PEER:
                # A connection out of the pool may have been closed before it carried our request,
                # and so may all of them. A fresh one, or one that breaks later, has carried it,
                # and the instance lost it.
                if not connection.is_reused or clock() - started >= RACE_SECONDS:
                    raise
                self._metrics.resends.labels(role.label).inc()

    def _opened(self) -> ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used before open()")
        return self._session


def leg_failed(instance: Instance, role: Role, error: Exception) -> LegFailed:
    """Turn a client failure into one that names the leg, and note an unreachable instance."""
    address = instance.identity.http_address
    logger.warning("leg failed role=%s instance=%s error=%r", role.label, address, error)
    is_unreachable = isinstance(
        error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    )
    if is_unreachable:
        instance.record_unreachable()
    if isinstance(error, asyncio.TimeoutError):
        status, kind, what = HTTPStatus.GATEWAY_TIMEOUT, "timeout", "did not answer in time"
    else:
        what = "cannot be reached" if is_unreachable else "broke the connection"
        status, kind = HTTPStatus.BAD_GATEWAY, "failed"
    message = f"the {role.label} instance {what}"
    # One that has fallen silent has used up the request's time.
    can_retry = is_unreachable or status == HTTPStatus.BAD_GATEWAY
    return LegFailed(status, f"{role.label}_{kind}", message, can_retry=can_retry)


def _url(instance: Instance, path: str) -> str:
    return f"http://{instance.identity.http_address}{path}"


async def _note_reuse(_: ClientSession, context: SimpleNamespace, __: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.is_reused = True


async def _note_sent(_: ClientSession, context: SimpleNamespace, __: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.on_sent()
