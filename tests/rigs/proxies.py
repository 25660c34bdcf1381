"""RunningProxy: the real proxy behind its real server in the test's own event loop, and helpers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import uvicorn
from multidict import CIMultiDictProxy

from p2p_engine.wire.messages import PROTOCOL_VERSION
from proxy.config import ProxyConfig
from proxy.main import make_server
from tests.doubles.server import DECODE, PREFILL, ServerDouble
from tests.rigs.certificates import made_certificate

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ASKED = {"model": "tiny", "prompt": "once upon", "max_tokens": 8}
STREAMED = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}


async def until(
    condition: Callable[[], Any | Awaitable[Any]], what: str, timeout: float = 20.0
) -> Any:
    """Wait until `condition`, which may be a coroutine function, is true; return its value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.002)


class RunningProxy:
    """A proxy that serves, and a client for it."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.client = client
        self.registration_address = ""

    @property
    def port(self) -> int:
        """The port for clients."""
        return int(self.url.rpartition(":")[2])

    async def status(self) -> dict[str, Any]:
        """Return what `/status` shows."""
        async with self.client.get(f"{self.url}/status") as response:
            assert response.status == 200
            content: dict[str, Any] = await response.json()
            return content

    async def metrics(self) -> dict[str, float]:
        """Return all samples by name and labels, as Prometheus reads them."""
        async with self.client.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def states(self) -> dict[str, str]:
        """Return the state of each instance by its HTTP address."""
        return {i["http_address"]: i["state"] for i in (await self.status())["instances"]}

    def post(
        self, asked: Any = None, path: str = COMPLETIONS, **options: Any
    ) -> aiohttp.client._RequestContextManager:
        """Send a completion; `async with` it."""
        return self.client.post(self.url + path, json=ASKED if asked is None else asked, **options)

    async def ask(
        self, asked: Any = None, path: str = COMPLETIONS, **options: Any
    ) -> tuple[int, bytes, CIMultiDictProxy[str]]:
        """Send a completion and return the answer's status, body and headers."""
        async with self.post(asked, path, **options) as response:
            return response.status, await response.read(), response.headers

    async def until_ready(self, *instances: ServerDouble) -> None:
        """Wait until legs are sent to all of them."""
        addresses = {instance.http_address for instance in instances}

        async def are_ready() -> bool:
            return {
                a for a, state in (await self.states()).items() if state == "ready"
            } >= addresses

        await until(are_ready, f"{addresses} ready")

    async def until_state(self, instance: ServerDouble, state: str) -> None:
        """Wait until `/status` shows an instance in a state; "": until it shows none."""

        async def is_so() -> bool:
            return (await self.states()).get(instance.http_address, "") == state

        await until(is_so, f"{instance.http_address} is {state or 'forgotten'}")

    async def until_idle(self) -> None:
        """Wait until every count of work in progress is zero."""

        async def is_idle() -> bool:
            status = await self.status()
            legs = [count for i in status["instances"] for count in i["in_flight"].values()]
            assert min(legs, default=0) >= 0
            return status["requests_in_flight"] == 0 and not any(legs)

        await until(is_idle, "all counts back to zero")

    async def in_flight(self, instance: ServerDouble) -> dict[str, int]:
        """Return the counts of one instance."""
        for shown in (await self.status())["instances"]:
            if shown["http_address"] == instance.http_address:
                counts: dict[str, int] = shown["in_flight"]
                return counts
        raise AssertionError(f"{instance.http_address} is not known")


@asynccontextmanager
async def running_proxy(**settings: Any) -> AsyncIterator[RunningProxy]:
    """Run a proxy on free ports of 127.0.0.1 that notices everything quickly."""
    quick = {"probe_interval_seconds": 0.05, "shutdown_timeout_seconds": 1.0}
    local = {"host": "127.0.0.1", "port": 0, "registration_host": "127.0.0.1"}
    config = ProxyConfig(**{**local, "registration_port": 0, **quick, **settings})
    async with AsyncExitStack() as parts:
        server = await parts.enter_async_context(serving(config))
        port = server.servers[0].sockets[0].getsockname()[1]
        connector = aiohttp.TCPConnector(limit=0)
        client = await parts.enter_async_context(aiohttp.ClientSession(connector=connector))
        proxy = RunningProxy(f"http://127.0.0.1:{port}", client)
        proxy.registration_address = (await proxy.status())["registration_address"]
        yield proxy


@asynccontextmanager
async def serving(config: ProxyConfig) -> AsyncIterator[uvicorn.Server]:
    """Run the proxy's server."""
    server = make_server(config)
    task = asyncio.ensure_future(server.serve())
    try:
        await until(lambda: server.started or task.done(), "the server has started")
        yield server
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@asynccontextmanager
async def serving_by_tls(folder: Path, **settings: Any) -> AsyncIterator[int]:
    """Run a proxy with a certificate; return its port."""
    local = {"host": "127.0.0.1", "port": 0, "registration_host": "127.0.0.1"}
    certificate = made_certificate(folder, "one")
    config = ProxyConfig(**{**local, "registration_port": 0, **certificate, **settings})
    async with serving(config) as server:
        yield server.servers[0].sockets[0].getsockname()[1]


@asynccontextmanager
async def fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    protocol: int | None = PROTOCOL_VERSION,
    **settings: Any,
) -> AsyncIterator[tuple[RunningProxy, list[ServerDouble], list[ServerDouble]]]:
    """Run a proxy and so many ready instances of each role."""
    kinds = [PREFILL] * num_prefill + [DECODE] * num_decode
    doubles = [ServerDouble(kind, protocol=protocol) for kind in kinds]
    async with AsyncExitStack() as parts:
        for double in doubles:
            await parts.enter_async_context(double)
        for double in doubles:
            double.peers = {peer.zmq_address: peer for peer in doubles}
        proxy = await parts.enter_async_context(running_proxy(**settings))
        for double in doubles:
            double.beat(proxy.registration_address)
        await proxy.until_ready(*doubles)
        yield proxy, doubles[:num_prefill], doubles[num_prefill:]


class LoopThread:
    """An event loop in a thread, where nothing else runs one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
