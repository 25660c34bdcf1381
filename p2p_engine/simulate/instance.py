"""StandIn: one instance as clients, the proxy and peers see it. Only the model is not real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.engine import P2pNcclEngine
from p2p_engine.errors import P2pError
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.simulate import answers
from p2p_engine.simulate.cost import CostModel
from p2p_engine.simulate.prompts import MadeUpModel, SimulatedPrompt, read_prompts
from p2p_engine.simulate.transfers import SimulatedSend, Transfers
from p2p_engine.wire.addresses import join_address
from p2p_engine.wire.messages import TransferKey
from p2p_engine.wire.request_ids import parse_proxy_id

MAX_BODY_BYTES = 64 << 20
# After it has announced its end, requests may still be on their way to it.
FAREWELL_SECONDS = 1.0


@dataclass(frozen=True)
class SimulatedIntent:
    """The destination or the origin of a request's KV; at most one of the two is set."""

    transfer_id: str = ""
    is_sent: bool = False
    is_fetched: bool = False
    peer: str | None = None

    def key(self, prompt_index: int, child_index: int) -> TransferKey:
        """Return the transfer key of one prompt's KV for one continuation."""
        return TransferKey(self.transfer_id, "", prompt_index, child_index)


class StandIn:
    """One instance. `role` is "P", "D" or "PD"."""

    def __init__(
        self, config: EngineConfig, role: str, kv_port: int, model: MadeUpModel, cost: CostModel
    ) -> None:
        self._config = config
        self._role = role
        self._kv_port = kv_port
        self._model = model
        self._cost = cost
        self._num_running = 0
        self._num_served = 0
        self._parts = contextlib.AsyncExitStack()

    async def start(self, host: str, port: int) -> None:
        """Serve, and register with the proxy.

        Raises:
            OSError: a port is taken.
            ConfigError: the engine or the directory cannot be started.
        """
        try:
            await self._start(host, port)
        except BaseException:
            await self._parts.aclose()
            raise

    async def _start(self, host: str, port: int) -> None:
        engine = self._parts.enter_context(
            P2pNcclEngine(self._config, spec=self._model.spec, receives="D" in self._role)
        )
        self._transfers = Transfers(engine, self._model)
        self._parts.push_async_callback(self._transfers.close)
        runner = web.AppRunner(self._routes(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._parts.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, port).start()
        ranks = [RankAddress(0, engine.zmq_address, engine.epoch, self._model.spec)]
        directory = Directory(
            self._config, ranks, kv_port=self._kv_port, role=self._role, model=self._model.name
        )
        self._parts.callback(directory.close)
        self._directory = directory

    async def broken(self) -> None:
        """Wait for a fault that keeps it from moving KV.

        Raises:
            Exception: the fault.
        """
        await self._transfers.broken()

    async def leave(self, timeout: float) -> None:
        """Announce the end, serve the open requests for at most `timeout` seconds, and stop."""
        self._directory.close()
        loop = asyncio.get_running_loop()
        deadline, quiet_since = loop.time() + timeout, loop.time()
        while loop.time() < min(deadline, quiet_since + FAREWELL_SECONDS):
            await asyncio.sleep(0.05)
            quiet_since = loop.time() if self._num_running else quiet_since
        await self._parts.aclose()

    def _routes(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for path in answers.PATHS:
            app.router.add_post(path, self._complete)
        for path in ("/tokenize", "/detokenize", "/v1/embeddings"):
            app.router.add_post(path, self._echo)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._model.name, "object": "model", "owned_by": "p2p-engine"}
        return web.json_response({"object": "list", "data": [model]})

    async def _stats(self, _: web.Request) -> web.Response:
        counts = {"running": self._num_running, "served": self._num_served}
        return web.json_response({**counts, **self._transfers.stats()})

    async def _echo(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "asked": await request.json()})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._num_running += 1
        try:
            asked = await request.json()
            prompts = read_prompts(asked)
            intent = self._read_intent(asked, request.headers.get("X-Request-Id", ""))
            await self._have_kv(intent, prompts, asked)
            response = await self._answer(request, asked, intent, prompts)
            self._num_served += 1
            return response
        except (ValueError, TypeError, AttributeError) as error:
            return _error(400, str(error))
        except P2pError as error:
            return _error(500, f"{type(error).__name__}: {error}")
        finally:
            self._num_running -= 1

    def _read_intent(self, asked: Mapping[str, Any], request_id: str) -> SimulatedIntent:
        """Read the KV parameters from a request or its id, as the connector does."""
        params = asked.get("kv_transfer_params")
        if params:
            host, port = params.get("remote_host"), params.get("remote_port")
            return SimulatedIntent(
                str(params["transfer_id"]),
                bool(params.get("do_remote_decode")),
                bool(params.get("do_remote_prefill")),
                join_address(str(host), int(port)) if host and port else None,
            )
        proxy_id = parse_proxy_id(request_id)
        if proxy_id is None or not (proxy_id.prefill and proxy_id.decode):
            return SimulatedIntent()
        if proxy_id.prefill == self._directory.address:
            return SimulatedIntent(proxy_id.transfer_id, is_sent=True, peer=proxy_id.decode)
        return SimulatedIntent(proxy_id.transfer_id, is_fetched=True, peer=proxy_id.prefill)

    async def _have_kv(
        self, intent: SimulatedIntent, prompts: list[SimulatedPrompt], asked: Mapping[str, Any]
    ) -> None:
        """Fetch the KV of all prompts, or compute it and send it on."""
        children = range(int(asked.get("n") or 1))
        keyed = [
            (intent.key(index, child), prompt)
            for (index, prompt), child in itertools.product(enumerate(prompts), children)
        ]
        if intent.is_fetched and intent.peer is not None:
            pull = self._config.send_type is SendMode.GET
            fetches = (
                self._transfers.fetch(key, intent.peer, prompt, pull=pull) for key, prompt in keyed
            )
            await asyncio.gather(*fetches)
            return
        peer = None if self._config.send_type is SendMode.GET else intent.peer
        outgoing: list[SimulatedSend] = []
        if intent.is_sent:
            outgoing = [self._transfers.offer(key, peer, prompt) for key, prompt in keyed]
        try:
            await self._cost.prefill(sum(prompt.num_tokens for prompt in prompts))
        except asyncio.CancelledError:
            for item in outgoing:
                self._transfers.withdraw(item)
            raise
        for item in outgoing:
            self._transfers.computed(item)

    async def _answer(
        self,
        request: web.Request,
        asked: dict[str, Any],
        intent: SimulatedIntent,
        prompts: list[SimulatedPrompt],
    ) -> web.StreamResponse:
        usage = _usage(asked, prompts)
        with self._decoding():
            if asked.get("stream"):
                return await self._stream(request, answers.stream(request.path, asked, usage))
            for _ in range(answers.num_tokens(asked) - 1):
                await self._cost.step()
        params = self._params_for_decode(intent)
        content = answers.answer(request.path, asked, params, usage)
        return web.json_response(content)

    async def _stream(self, request: web.Request, events: list[bytes]) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for number, event in enumerate(events):
            if number:
                await self._cost.step()
            await response.write(event)
        await response.write_eof()
        return response

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        self._cost.num_decoding += 1
        try:
            yield
        finally:
            self._cost.num_decoding -= 1

    def _params_for_decode(self, intent: SimulatedIntent) -> dict[str, Any] | None:
        if not intent.is_sent:
            return None
        host, _, port = self._directory.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": intent.transfer_id,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
        }


def _usage(asked: Mapping[str, Any], prompts: list[SimulatedPrompt]) -> dict[str, int]:
    num_prompt = sum(prompt.num_tokens for prompt in prompts)
    num_new = answers.num_tokens(asked) * answers.num_choices(asked)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "server_error", "code": status}}
    return web.Response(
        status=status, body=json.dumps(body).encode(), content_type="application/json"
    )
