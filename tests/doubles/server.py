"""ServerDouble: a vLLM server as the proxy sees it, with heartbeats, a fault script and a memory.

It is a real HTTP server on 127.0.0.1, without an engine: what it answers is what the stand-ins of
`p2p-engine simulate` answer, unless its script says otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from multidict import CIMultiDict

from p2p_engine.simulate.answers import MESSAGES, PATHS, RESPONSES, answer, stream
from p2p_engine.wire.messages import PROTOCOL_VERSION, Publisher
from tests.doubles.weights import DoorsDouble

PREFILL, DECODE, BOTH = "P", "D", "PD"
INTERVAL_SECONDS = 3.0


@dataclass
class Behaviour:
    """How the next requests are treated; every default is how a healthy instance does it."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # instead of a completion
    pieces: list[bytes] | None = None  # instead of an event for each token
    reads: asyncio.Event | None = None  # waited for before the body is read
    hold: asyncio.Event | None = None  # waited for before the answer begins
    hold_after: tuple[int, asyncio.Event] | None = None  # waited for after so many pieces
    hang: bool = False  # no answer ever
    hang_after: int | None = None  # nothing more after so many pieces
    pace: float = 0.0  # seconds before each piece
    cut_after: int | None = None  # the connection breaks after so many pieces
    reset: bool = False  # the connection breaks before the answer
    reset_reused: bool = False  # the same, but only on a connection that served before


@dataclass(eq=False)
class Received:
    """One request, and how it ended: "" while it runs, then "answered", "left" or "failed"."""

    path: str
    headers: CIMultiDict[str]
    body: bytes
    ended: str = ""
    pieces_sent: int = 0

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body as vLLM reads it: of duplicate keys the last one wins."""
        content: dict[str, Any] = json.loads(self.body)
        return content

    @property
    def rank(self) -> int:
        """The data-parallel rank to which vLLM's server would hand it."""
        return int(self.headers.get("X-data-parallel-rank", 0))


class ServerDouble:
    """One instance. `async with ServerDouble("P") as instance:` starts and stops its server.

    Stop the proxy first: CPython 3.11 leaks a connection that comes as a server closes.
    """

    def __init__(
        self,
        kind: str,
        *,
        protocol: int | None = PROTOCOL_VERSION,
        epoch: int = 1,
        model: str = "tiny",
        dp_size: int = 1,
        doors: DoorsDouble | None = None,
    ) -> None:
        """`dp_size`: so many data-parallel ranks behind the one HTTP address, if it is not 1.

        `doors`: vLLM's for weights, which it has in its development mode alone.
        """
        self.kind = kind
        self.doors = doors
        if doors is not None:
            doors.on_label = self.beat_once
        self.dp_size = dp_size
        self.protocol = protocol
        self.epoch = epoch
        self.model = model
        self.kv_bytes_per_token = 0
        self.has_prefix_cache = True
        self.events: Publisher | None = None  # where it says that it publishes KV events
        # What `/tokenize` makes of a request, instead of an echo.
        self.tokenizer: Callable[[dict[str, Any]], list[int]] | None = None
        self.behaviour = Behaviour()
        self.health_status = 200
        self.health_count = 0
        self.num_begun = 0  # requests whose heads have come
        self.received: list[Received] = []
        # KV that has arrived and nobody has asked for, by transfer id; and where ours is sent.
        self.kv: set[str] = set()
        self.peers: dict[str, ServerDouble] = {}
        # Which requests it answers with 500, whatever its behaviour.
        self.fails_if: Callable[[dict[str, Any]], bool] = lambda _: False
        self.http_address = ""
        self.zmq_address = ""
        self._runner: web.AppRunner | None = None
        self._served: set[object] = set()
        self._transports: set[asyncio.BaseTransport] = set()
        self._heart: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._dealer: zmq.asyncio.Socket | None = None

    async def __aenter__(self) -> ServerDouble:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen; `http_address` is valid afterwards."""
        app = web.Application(client_max_size=1 << 28)
        errands = ("/tokenize", "/detokenize", "/v1/embeddings", f"{MESSAGES}/count_tokens")
        for path in (*PATHS, *errands):
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self.doors is not None:
            self.doors.open(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        # uvicorn, which serves vLLM, lets as many wait
        await web.TCPSite(self._runner, "127.0.0.1", port, backlog=2048).start()
        host, port = self._runner.addresses[0][:2]
        self.http_address = f"{host}:{port}"
        self.zmq_address = self.zmq_address or f"{host}:{port + 1 if port < 65535 else 1024}"

    async def stop(self) -> None:
        """Stop beating and serving; open connections break."""
        await self._close_dealer()
        await self.stop_serving()

    async def stop_serving(self) -> None:
        """Stop the HTTP server alone: the engine beats on."""
        assert self._runner is not None
        await self._runner.cleanup()

    def rank_address(self, rank: int) -> str:
        """Where the KV of a data-parallel rank comes from and goes to."""
        host, _, port = self.zmq_address.rpartition(":")
        return f"{host}:{int(port) + rank}"

    @property
    def port(self) -> int:
        """The port of its HTTP server."""
        return int(self.http_address.rpartition(":")[2])

    def beat(self, registration_address: str) -> None:
        """Send heartbeats until stopped, as vLLM's engine does: whether or not HTTP is up."""
        if self._dealer is None:
            self._context = zmq.asyncio.Context()
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt_string(zmq.IDENTITY, self.zmq_address)
            self._dealer.connect(f"tcp://{registration_address}")
        self._heart = asyncio.ensure_future(self._beat())

    async def beat_once(self, **changed: Any) -> None:
        """Send one heartbeat more, with some keys changed."""
        assert self._dealer is not None
        for message in self._beats():
            await self._dealer.send(msgpack.packb({**message, **changed}))

    async def fall_silent(self) -> None:
        """Beat no more; the last beat promises the next so soon that it is missed soon."""
        await self._cancel_heart()
        await self.beat_once(interval=0.05)

    async def leave(self) -> None:
        """Say goodbye as on shutdown, and beat no more."""
        await self._cancel_heart()
        await self.beat_once(leaving=True)

    def break_connections(self) -> None:
        """Break every connection that a completion came by, as a killed process does."""
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]

    async def _close_dealer(self) -> None:
        await self._cancel_heart()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _cancel_heart(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self.beat_once()
            await asyncio.sleep(INTERVAL_SECONDS)

    def _beats(self) -> list[dict[str, Any]]:
        """One message for each role and rank, since an old proxy knows no other form."""
        extra = {
            "protocol": self.protocol,
            "epoch": self.epoch,
            "model": self.model,
            "tp_size": 1,
            "send_type": "PUT_ASYNC",
            "interval": INTERVAL_SECONDS,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "has_prefix_cache": self.has_prefix_cache,
            "weights": self.doors.label if self.doors is not None else "",
            "weights_changed": self.doors is not None and self.doors.has_changed,
            "a key of the future": {"x": [1, 2]},
        }
        if self.events is not None:
            extra["events"] = msgspec.to_builtins(self.events)
        beats = []
        for rank, kind in itertools.product(range(self.dp_size), self.kind):
            old = {"http_address": self.http_address, "zmq_address": self.rank_address(rank)}
            new = extra | ({"dp_rank": rank} if self.dp_size > 1 else {})
            beats.append({"type": kind, **old, **({} if self.protocol is None else new)})
        return beats

    async def _health(self, _: web.Request) -> web.Response:
        self.health_count += 1
        return web.Response(status=self.health_status)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.num_begun += 1
        if self.behaviour.reads is not None:
            await self.behaviour.reads.wait()
        received = Received(request.path, CIMultiDict(request.headers), await request.read())
        self.received.append(received)
        try:
            answering = self._answer(request, received)
            if self.doors is None:
                response = await answering
            else:
                response = await self.doors.serve(received.json, answering)
        except (asyncio.CancelledError, ConnectionError):
            received.ended = "left"
            raise
        except ValueError:  # no JSON that Python reads
            received.ended = "failed"
            raise
        received.ended = "answered"
        return response

    async def _answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        how = self.behaviour
        is_reused = self._note_connection(request.transport)
        if how.hang:
            await _forever()
        if how.hold is not None:
            await how.hold.wait()
        if how.reset or (how.reset_reused and is_reused):
            return await _break(request)
        if self.fails_if(received.json):
            said = {"message": "Internal server error", "type": "InternalServerError"}
            return web.json_response({"error": {**said, "code": 500}}, status=500)
        if how.body is not None or how.status != 200:
            return web.Response(
                body=how.body or b"", status=how.status, headers=how.headers,
                content_type="application/json",
            )  # fmt: skip
        if refusal := _refusal(received):
            return web.json_response(refusal, status=400)
        self._move_kv(received.json.get("kv_transfer_params") or {})
        if received.path == "/tokenize" and self.tokenizer is not None:
            tokens = self.tokenizer(received.json)
            return web.json_response({"count": len(tokens), "tokens": tokens, "token_strs": None})
        if received.path not in PATHS:
            return web.json_response({"path": received.path, "asked": received.json})
        if received.json.get("stream"):
            return await self._stream(request, received, how)
        params = self.answer_params(received.json, received.rank)
        body = json.dumps(answer(received.path, received.json, params)).encode()
        return web.Response(body=body, headers=how.headers, content_type="application/json")

    def _move_kv(self, params: dict[str, Any]) -> None:
        """Send the KV of a prefill that has come to its end; take what has come for a decode."""
        if params.get("do_remote_prefill"):
            self.kv.discard(params["transfer_id"])
        peer = self.peers.get(f"{params.get('remote_host')}:{params.get('remote_port')}")
        if params.get("do_remote_decode") and peer is not None:
            peer.kv.add(params["transfer_id"])

    def _note_connection(self, transport: asyncio.BaseTransport | None) -> bool:
        """Return whether it carried a completion before."""
        if transport is None:
            return False
        peer = transport.get_extra_info("peername")
        is_reused = peer in self._served
        self._served.add(peer)
        self._transports.add(transport)
        return is_reused

    async def _stream(
        self, request: web.Request, received: Received, how: Behaviour
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=how.headers)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        pieces = how.pieces
        if pieces is None:
            pieces = stream(received.path, received.json)
        for count, piece in enumerate([*pieces, b""]):
            if how.hold_after is not None and how.hold_after[0] == count:
                await how.hold_after[1].wait()
            if how.hang_after == count:
                await _forever()
            if how.cut_after == count:
                return await _break(request)
            await asyncio.sleep(how.pace)
            await response.write(piece)
            received.pieces_sent += 1
        await response.write_eof()
        return response

    def answer_params(self, asked: dict[str, Any], rank: int = 0) -> dict[str, Any] | None:
        """Return what our connector's prefill side hands back for decode."""
        params = asked.get("kv_transfer_params")
        if params is None or not params.get("do_remote_decode"):
            return None
        host, _, port = self.rank_address(rank).rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params["transfer_id"],
            "remote_host": host,
            "remote_port": int(port),
            "remote_request_id": "cmpl-of-the-engine",
            "remote_block_ids": None,
            "remote_engine_id": f"engine-{self.epoch}",
            "tp_size": 1,
        }


def _refusal(received: Received) -> dict[str, Any] | None:
    """Return vLLM's answer to what it does not take from a client of the newer APIs; the rest of
    what it checks is not looked at."""
    asked = received.json
    params = asked.get("kv_transfer_params") or {}
    if received.path == MESSAGES:
        limit = asked.get("max_tokens")
        budget = (asked.get("thinking") or {}).get("budget_tokens", 0)
        if not isinstance(limit, int) or limit <= 0:
            return {"error": {"type": "BadRequestError", "message": "max_tokens"}}
        if budget >= limit and not params.get("do_remote_decode"):
            return {"error": {"type": "BadRequestError", "message": "thinking.budget_tokens"}}
        if limit == 1 and (asked.get("tool_choice") or {}).get("type") == "tool":
            error = {"type": "BadRequestError", "message": "Expecting value"}
            return {"type": "error", "error": error}
    if received.path == RESPONSES and (asked.get("background") or "input" not in asked):
        return {"error": {"type": "invalid_request_error", "message": "background, or no input"}}
    return None


async def _break(request: web.Request) -> web.StreamResponse:
    """Break the connection and wait for the cancellation that follows."""
    with suppress(AttributeError):  # it is broken already
        request.transport.abort()  # type: ignore[union-attr]
    await _forever()
    raise AssertionError("a handler without a connection is cancelled")


async def _forever() -> None:
    await asyncio.Event().wait()
