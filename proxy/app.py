"""The Quart application: routes and life-cycle, nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from proxy.addresses import AllowList, is_url, parse_static
from proxy.errors import ProxyError, says_enough
from proxy.fleet.admin import Admin
from proxy.fleet.discovery import Discovery
from proxy.fleet.doors import Doors
from proxy.fleet.held_blocks import HeldBlocks
from proxy.fleet.instances import Role
from proxy.fleet.key_files import read_key
from proxy.fleet.readiness import Readiness
from proxy.fleet.registry import Registry
from proxy.fleet.upstream import Upstream
from proxy.fleet.weights import FleetWeights
from proxy.http.asgi import Answer, QuartConnection, serve_directly
from proxy.http.certificate import Certificate
from proxy.http.deadlines import Deadlines
from proxy.http.descriptors import Shares, raised_limit
from proxy.http.door import DoorServer
from proxy.http.house import ClientHouse, Rules
from proxy.http.memory import BodyMemory
from proxy.http.origins import address_of_client, origin_of
from proxy.http.sharing import Shared
from proxy.http.stall import StallWatch
from proxy.http.turns import Turns
from proxy.observe.collector import make_traces
from proxy.observe.metrics import Metrics
from proxy.observe.outlet import Outlet
from proxy.observe.request_log import RequestLog
from proxy.request.forward import (
    CLOSED_PATHS,
    LOOKUP_PATHS,
    PATHS,
    Forwarder,
    door_refused,
    explained,
    lookup_refused,
)
from proxy.request.models import PATH as MODELS_PATH
from proxy.request.models import list_models
from proxy.request.release import Releases
from proxy.request.services import Services
from proxy.routing.admission import Admission
from proxy.routing.clients import ClientKeys
from proxy.routing.router import Router
from proxy.status import Status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    import uvicorn
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

    from proxy.config import ProxyConfig
    from proxy.fleet.instances import Instance

# Of requests for other paths, so many begin in each so many seconds; completions wait for none.
PAGES_AT_ONCE = 4
PAGES_SECONDS = 0.01
_JSON = (b"content-type", b"application/json")
_METRICS = (b"content-type", CONTENT_TYPE_LATEST.encode())
_EVENTS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
HEALTH = "/health"  # load balancers ask for it: it waits for nobody
STDERR = 2
# Admin requests are small, and no other route that Quart serves has a body.
MAX_ADMIN_BYTES = 1 << 20


class ProxyApp(Quart):
    """The Quart application. Completions, errands and pages skip Quart's request objects, for
    speed."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(__name__, static_folder=None)
        self.house = proxy.house
        self.make_server = proxy.make_server
        self.outlet = proxy.outlet
        self.certificate = proxy.certificate
        self.reloads = proxy.reloads
        self._serve = proxy.forwarder.serve
        self._memory = proxy.memory
        self._pages = proxy.pages
        self._pages_starts = Turns(PAGES_AT_ONCE, seconds=PAGES_SECONDS)

    def log_exception(self, exception_info: Any) -> None:
        """Log an exception that nobody expected; the server says the others, in one line."""
        if not says_enough(exception_info[1]):
            super().log_exception(exception_info)

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one ASGI event; POSTs to `PATHS` go straight to the forwarder."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if scope["path"] in PATHS and scope["method"] == "POST":
            await serve_directly(self._serve, scope, receive, send, self._memory)
            return
        if scope["path"] != HEALTH:
            origin, _ = origin_of(address_of_client(scope))
            await self._pages_starts.take(origin)
        page = self._pages.get(scope["path"])
        if page is not None and scope["method"] in ("GET", "HEAD"):
            await page().send_to(send, is_head=scope["method"] == "HEAD")
        else:
            await super().__call__(scope, receive, send)


def create_app(
    config: ProxyConfig,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> ProxyApp:
    """Build the application. It opens its sockets when a server starts it.

    Raises the soft limit of this process on descriptors to its hard one.
    """
    proxy = Proxy(config, clock, rng or random.Random())
    app = ProxyApp(proxy)
    app.asgi_http_class = QuartConnection
    # Quart would end a long stream silently, and stop reading a slow or large body.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = config.client_timeout_seconds
    app.config["MAX_CONTENT_LENGTH"] = MAX_ADMIN_BYTES
    app.while_serving(proxy.serving)
    # These make Quart answer 405 to other methods.
    for path in PATHS:
        app.add_url_rule(path, view_func=proxy.refuse, methods=["POST"], endpoint=path)
    for path in proxy.pages:
        app.add_url_rule(path, view_func=proxy.refuse, methods=["GET"], endpoint=path)
    for path, view in {
        "/instances/add": proxy.add_instances,
        "/instances/remove": proxy.remove_instances,
        "/instances/role": proxy.change_instances,
        "/weights/update": proxy.update_weights,
        "/weights/label": proxy.label_weights,
        "/weights/resume": proxy.resume_weights,
    }.items():
        app.add_url_rule(path, view_func=view, methods=["POST"])
    for path, method in LOOKUP_PATHS.items():
        app.add_url_rule(path, path, proxy.refuse_lookup, methods=[method])
    for path in CLOSED_PATHS:
        app.add_url_rule(path, path, proxy.refuse_door, methods=["POST"])
    app.add_url_rule(MODELS_PATH, view_func=proxy.models, methods=["GET"])
    app.register_error_handler(ProxyError, proxy.explain)
    app.register_error_handler(HTTPException, proxy.explain_http)
    return app


class Proxy:
    """Owns the proxy's parts and serves its routes."""

    def __init__(self, config: ProxyConfig, clock: Callable[[], float], rng: random.Random) -> None:
        self._config = config
        self._clock = clock
        allowed = AllowList(config.allowed_addresses, config.own_addresses)
        self._registry = Registry(
            missed_beats=config.missed_beats,
            max_instances=config.max_instances,
            breaker_failures=config.breaker_failures,
            breaker_seconds=config.breaker_seconds,
            allowed=allowed,
        )
        self._stall_watch = StallWatch(
            clock, lambda seconds: self._registry.excuse(seconds, clock())
        )
        self._metrics = Metrics(self._registry.instances, clock)
        shares = Shares.of(
            raised_limit(), config.max_connections, config.max_in_flight, config.max_instances
        )
        rules = Rules(
            shares.clients,
            config.idle_timeout_seconds,
            config.head_timeout_seconds,
            # Longer than the limit of a request, which says what happened.
            2 * config.client_timeout_seconds,
        )
        self.memory = BodyMemory(config.max_body_memory_bytes)
        self.house = ClientHouse(
            rules, _turn_away, self._metrics.count_closed, self._metrics.count_refused
        )
        self.certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        instance_key = read_key("instance_key_file", config.instance_key_file)
        self._clients = ClientKeys(config.client_keys_file, instance_key, clock)
        deadlines = Deadlines()
        self._upstream = Upstream(
            self._metrics.resends,
            deadlines,
            allowed.refusal_to_dial,
            shares.upstream,
            self.house.silence,
        )
        doors = Doors(self._upstream)
        self._weights = FleetWeights(config, self._registry, doors, clock)
        self._readiness = Readiness(config, self._registry, self._upstream, doors, clock)
        self._held = HeldBlocks(self._registry, self._upstream)
        self._discovery = Discovery(
            config, self._registry, self._metrics.heartbeats, self._welcome, clock
        )
        self._admin = Admin(config, self._registry, self._readiness.watch, clock)
        # What reads a file, and reads it again when it is told to; each raises ConfigError.
        self.reloads: list[Callable[[], None]] = [self._admin.reload, self._clients.reload]
        if self.certificate is not None:
            self.reloads.append(self.certificate.reload)
        self._router = Router(config, self._registry, clock, rng)
        self._releases = Releases(self._upstream, self._metrics)
        self._admission = Admission(
            config.max_in_flight, config.max_queued, config.queue_timeout_seconds
        )
        self._registry.on_room = self._admission.wake
        watch = self._metrics.watch
        watch("authenticated", "1 if only members of the fleet can register",
              lambda: self._discovery.is_authenticated)  # fmt: skip
        watch("refused_connections", "Connections to the registration port that the proxy closed",
              lambda: self._discovery.refused_connections)  # fmt: skip
        watch("dropped_frames", "Messages dropped: too many frames, or not deliverable",
              lambda: self._discovery.dropped_frames)  # fmt: skip
        watch("connections", "Connections of clients", lambda: self.house.num_guests)
        watch("body_bytes", "Bytes of large bodies that are kept", lambda: self.memory.num_bytes)
        watch("queued", "Requests that wait for room", lambda: self._admission.num_queued)
        watch("running", "Requests in progress", lambda: self._admission.num_running)
        watch("known_kv_blocks", "Blocks of instances that the proxy knows by their KV events",
              lambda: self._held.num_blocks)  # fmt: skip
        watch("prefix_blocks", "Remembered blocks", lambda: self._router.num_prefix_blocks)
        watch("unlike_weights", "Requests for decode alone: no prefill instance had its weights",
              lambda: self._router.num_alone)  # fmt: skip
        self.outlet = Outlet(STDERR)  # for the command
        watch("dropped_log_lines", "Lines of the log that nobody read in time",
              lambda: self.outlet.num_dropped)  # fmt: skip
        self._log = RequestLog(clock)
        scheme = "http" if self.certificate is None else "https"
        endpoint, share = config.otlp_traces_endpoint, config.trace_share
        self._traces = make_traces(endpoint, share, scheme, is_url)
        watch("lost_spans", "Spans that no collector took", lambda: self._traces.num_lost)
        services = Services(
            config, self._registry, self._upstream, self._releases, deadlines, self._traces,
            self._readiness.look,
        )  # fmt: skip
        self.forwarder = Forwarder(
            services, self._clients, self._router, self._admission, self._metrics, self._log,
            self._held, self._weights,
        )  # fmt: skip
        self._status = Status(
            self._registry, self._discovery, self._admission, self._log, self._weights, clock
        )
        self._shown_metrics = Shared(self._metrics.render)
        self._shown_health = Shared(self._describe_health)
        self._shown_status = Shared(lambda: msgspec.json.encode(self._status.snapshot()))
        self._event = Shared(self._status.event)
        self.pages: dict[str, Callable[[], Answer]] = {
            HEALTH: self.health,
            "/status": lambda: Answer(200, [_JSON], self._shown_status.get()),
            "/status/events": self.status_events,
            "/": lambda: Answer(200, self._status.headers, self._status.page),
            "/metrics": lambda: Answer(200, [_METRICS], self._shown_metrics.get()),
        }

    def make_server(self, settings: uvicorn.Config) -> uvicorn.Server:
        """Make the server whose clients come into the house."""
        return DoorServer(settings, self.house, self.certificate)

    async def serving(self) -> AsyncGenerator[None, None]:
        """Open the sockets; close the parts in reverse order at shutdown."""
        async with AsyncExitStack() as parts:
            self._upstream.open()
            parts.callback(self._log.flush)
            parts.push_async_callback(self._traces.close)
            parts.callback(self.memory.close)
            parts.push_async_callback(self.forwarder.close)
            parts.push_async_callback(self._upstream.close)
            parts.push_async_callback(self._releases.close)
            parts.push_async_callback(self._readiness.close)
            parts.push_async_callback(self._weights.close)
            parts.push_async_callback(self._held.close)
            parts.callback(self._discovery.close)
            self._discovery.start()
            parts.callback(self._stall_watch.close)
            self._stall_watch.start()
            self._add_static()
            tidying = asyncio.ensure_future(self._router.tidy())
            parts.callback(tidying.cancel)
            yield

    def _welcome(self, instance: Instance) -> None:
        """Begin to probe an instance that registers, and to hear its events if they matter."""
        self._readiness.watch(instance)
        if self._router.weighs_prefixes:
            self._held.watch(instance)

    def _add_static(self) -> None:
        config, role = self._config, Role
        listed = (
            (config.prefill, [role.PREFILL]),
            (config.decode, [role.DECODE]),
            (config.both, list(role)),
        )
        for text, roles in listed:
            for http_address, zmq_address in parse_static(text):
                instance, _ = self._registry.add(http_address, roles, self._clock(), zmq_address)
                self._readiness.watch(instance)

    async def add_instances(self) -> Response:
        """Add instances, or resume draining ones; needs the admin key."""
        sender = address_of_client(request.scope)
        self._admin.authorize(request.headers, sender)
        return _json(self._admin.add(cast("bytes", await request.get_data()), sender))

    async def remove_instances(self) -> Response:
        """Drain instances, then forget them; needs the admin key."""
        sender = address_of_client(request.scope)
        self._admin.authorize(request.headers, sender)
        return _json(self._admin.remove(cast("bytes", await request.get_data()), sender))

    async def change_instances(self) -> Response:
        """Change the roles of instances; needs the admin key."""
        sender = address_of_client(request.scope)
        self._admin.authorize(request.headers, sender)
        return _json(self._admin.change(cast("bytes", await request.get_data()), sender))

    async def update_weights(self) -> Response:
        """Begin to change the weights of all instances; needs the admin key."""
        return await self._order_weights(self._weights.update)

    async def label_weights(self) -> Response:
        """Name the weights that all instances have; needs the admin key."""
        return await self._order_weights(self._weights.name)

    async def resume_weights(self) -> Response:
        """Resume an instance that is paused; needs the admin key."""
        return await self._order_weights(self._weights.resume)

    async def _order_weights(
        self, order: Callable[[bytes, str], Awaitable[dict[str, Any]]]
    ) -> Response:
        sender = address_of_client(request.scope)
        self._admin.authorize(request.headers, sender)
        return _json(await order(cast("bytes", await request.get_data()), sender))

    async def refuse(self) -> Response:
        """Hold the place of a path in Quart's routes; `ProxyApp` serves these requests."""
        raise NotImplementedError

    async def refuse_lookup(self, response_id: str) -> Response:
        """Refuse to look a response up."""
        raise lookup_refused(response_id)

    async def refuse_door(self) -> Response:
        """Refuse what vLLM takes at a path that the proxy does not serve."""
        raise door_refused(request.path)

    async def models(self) -> Response:
        """List the models of all ready decode instances."""
        given = request.headers.get("Authorization", "")
        self._clients.find(given)
        passed_on = self._clients.passed_on(given)
        headers = {"Authorization": passed_on} if passed_on else {}
        instances = self._registry.instances()
        return await list_models(instances, self._upstream, headers, self._clock())

    def health(self) -> Answer:
        """Answer 200 while discovery runs, else 500, with the number of ready instances by role."""
        return Answer(200 if self._discovery.is_running else 500, [_JSON], self._shown_health.get())

    def _describe_health(self) -> bytes:
        now, instances = self._clock(), self._registry.instances()
        is_ok = self._discovery.is_running
        ready = {role.label: sum(i.is_routable(role, now) for i in instances) for role in Role}
        return msgspec.json.encode({"status": "ok" if is_ok else "discovery stopped", **ready})

    def status_events(self) -> Answer:
        """Stream the status and the latest requests, once a second."""
        try:
            return Answer(200, _EVENTS, self._status.events(self._event.get))
        except ProxyError as error:
            return self._explained(error)

    def _explained(self, error: ProxyError, path: str = "") -> Answer:
        self._metrics.count_refused(error.code)
        return explained(error, path)

    async def explain(self, error: ProxyError) -> Response:
        """Answer an error of a route that Quart serves."""
        answer = self._explained(error, request.path)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(cast("bytes", answer.body), answer.status, headers)

    async def explain_http(self, error: HTTPException) -> Response:
        """Answer an error of Quart."""
        code = (error.name or "error").lower().replace(" ", "_")
        return await self.explain(ProxyError(error.code or 500, code, str(error.description)))


async def _turn_away(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    """Answer the request of a newcomer to a full house, and close its connection."""
    error = ProxyError(503, "too_many_connections", "the proxy has no room for more connections")
    answer = error.answer_to_client()
    answer.headers.append((b"connection", b"close"))
    await answer.send_to(send)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, content_type="application/json")
