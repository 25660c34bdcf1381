"""Upstream: sends requests to instances and maps failures to errors."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from p2p_engine.errors import named
from proxy.errors import LegFailed, ProxyError
from proxy.http.client import (
    Broken,
    ClientError,
    Limits,
    NoRoom,
    Pool,
    Response,
    TimedOut,
    Unreachable,
    request_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import Counter

    from proxy.fleet.instances import Instance, Role
    from proxy.http.deadlines import Deadlines
    from proxy.http.memory import Parts
    from proxy.http.silence import Silence


logger = logging.getLogger(__name__)

# vLLM's server closes connections that were idle for 5 s; the proxy must close them first.
KEEPALIVE_SECONDS = 3.0
# If the server had closed a connection before our request, the failure shows within this time.
RACE_SECONDS = 1.0
# Of an answer to what the proxy itself asks: a list of models, or of /health.
MAX_GET_BYTES = 4 << 20
MAX_CONNECT_SECONDS = 30.0  # of those; an order may then take longer
# vLLM's server routes a request to the data-parallel rank in this header.
RANK_HEADER = "X-data-parallel-rank"


class Upstream:
    """Sends requests to instances. Call `open` inside the event loop."""

    def __init__(
        self,
        resends: Counter,
        deadlines: Deadlines,
        refusal: Callable[[str, str, int], str] = lambda host, ip, port: "",
        max_connections: int = 1 << 20,
        silence: Silence | None = None,
    ) -> None:
        """`resends` counts, by role, the requests that were sent again over a new connection;
        `refusal` says why an address may not be dialled."""
        self._resends = resends
        self._max_connections = max_connections
        self._deadlines = deadlines
        self._refusal = refusal
        self._silence = silence
        self._pool: Pool | None = None

    def open(self) -> None:
        """Create the connection pool."""
        self._pool = Pool(KEEPALIVE_SECONDS, self._deadlines, self._refusal, self._silence)
        self._pool.max_open = self._max_connections

    async def close(self) -> None:
        """Close every connection, idle or not; idempotent."""
        if self._pool is not None:
            await self._pool.close()

    async def addresses(self, address: str) -> tuple[str, ...]:
        """Return the IP addresses of a "host:port" of an instance; waits for at most 5 s.

        Raises:
            ClientError: it does not resolve, or may not be dialled.
        """
        try:
            return await self._opened().addresses(address)
        except OSError as error:
            raise Unreachable(str(error)) from error

    async def get(
        self,
        instance: Instance,
        path: str,
        headers: Mapping[str, str],
        timeout: float,
        *,
        is_probe: bool = False,
    ) -> tuple[int, bytes]:
        """Send a GET; see `ask`."""
        return await self.ask("GET", instance, path, b"", headers, timeout, is_probe=is_probe)

    async def ask(
        self,
        method: str,
        instance: Instance,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: float,
        *,
        is_probe: bool = False,
    ) -> tuple[int, bytes]:
        """Send a request on a new connection; return the answer's status and body.

        A probe is sent even if requests may have no more connections.

        Raises:
            ClientError: no complete answer came within `timeout` seconds.
        """
        address = instance.identity.http_address
        connect = min(timeout, MAX_CONNECT_SECONDS)
        connection = await self._opened().connect_anew(address, connect, is_probe=is_probe)
        headers = {**headers, "Connection": "close"}
        request = request_bytes(method, address, path, headers, (body,) if body else ())
        response = connection.ask(request, Limits(timeout, total=timeout))
        try:
            await response.head()
            said = bytearray()
            while piece := await response.piece():
                said += piece
                if len(said) > MAX_GET_BYTES:
                    raise Broken(f"an answer of more than {MAX_GET_BYTES} bytes")
        finally:
            response.close()
        return response.status, bytes(said)

    async def post(
        self,
        instance: Instance,
        role: Role,
        path: str,
        body: Parts,
        headers: Mapping[str, str],
        limits: Limits,
        on_sent: Callable[[], None] = lambda: None,
    ) -> Response:
        """Send one leg's request and wait for the answer's headers.

        `on_sent` is called after the request is written: from then on, the instance may act on it.

        Raises:
            LegFailed: no answer came, or the instance is held: what is sent there waits for as long
                as it is paused.
            ProxyError: 503, this process can have no more connections.
        """
        if instance.held:
            message = f"the {role.label} instance is paused: {instance.held}"
            raise LegFailed(503, "instance_paused", message, can_retry=True)
        identity = instance.identity
        if identity.dp_rank is not None:
            headers = {**headers, RANK_HEADER: str(identity.dp_rank)}
        request = request_bytes("POST", identity.http_address, path, headers, body)
        try:
            return await self._post(instance, role, request, limits, on_sent)
        except NoRoom as error:
            message = "the proxy can have no more connections to instances"
            raise ProxyError(503, "no_connection", message) from error
        except ClientError as error:
            raise leg_failed(instance, role, error) from error

    async def _post(
        self,
        instance: Instance,
        role: Role,
        request: Parts,
        limits: Limits,
        on_sent: Callable[[], None],
    ) -> Response:
        while True:
            address = instance.identity.http_address
            connection = await self._opened().connect(address, limits.connect)
            response = connection.ask(request, limits, on_sent)
            asked = connection.loop.time()
            try:
                await response.head()
                return response
            except Broken:
                # The server may have closed any pooled connection before our request reached it.
                # Then the instance has not seen the request and another connection may carry it. If
                # a new connection breaks, or a pooled one breaks later or with half of an answer,
                # the instance may have seen it.
                was_closed = connection.is_reused and not response.has_begun
                if not was_closed or connection.loop.time() - asked >= RACE_SECONDS:
                    raise
                self._resends.labels(role.label).inc()
            except BaseException:
                response.close()
                raise

    def _opened(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("the client is used before open()")
        return self._pool


def leg_failed(instance: Instance, role: Role, error: ClientError) -> LegFailed:
    """Map a client error to one that names the leg; mark an unreachable instance."""
    name = instance.identity.name
    logger.warning("leg failed role=%s instance=%s error=%s", role.label, name, named(error))
    is_unreachable = isinstance(error, Unreachable)
    if is_unreachable:
        instance.record_unreachable()
    if isinstance(error, TimedOut):
        status, kind, what = HTTPStatus.GATEWAY_TIMEOUT, "timeout", "did not answer in time"
    else:
        what = "cannot be reached" if is_unreachable else "broke the connection"
        status, kind = HTTPStatus.BAD_GATEWAY, "failed"
    message = f"the {role.label} instance {what}"
    # After a timeout there is no retry: the instance has used up the request's time.
    can_retry = is_unreachable or status == HTTPStatus.BAD_GATEWAY
    return LegFailed(status, f"{role.label}_{kind}", message, can_retry=can_retry)
