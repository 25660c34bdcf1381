"""DoorsDouble: vLLM's HTTP doors for weights, as vLLM 0.29 to 0.33 have them, and how they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

OLD, NEW = "old", "new"
# What vLLM says from 0.33 on to a request that comes while it is paused; before, it waits.
REFUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}
ABORTED = {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}], "usage": {}}


@dataclass
class DoorsDouble:
    """The weights of one instance. What is asked of it while it is paused waits."""

    weights: str = OLD
    label: str = "default"
    has_changed: bool = False  # by a method of the workers, or a label
    # By path: "hang", never answer; a status, as "500"; "lie", say that all is well and do nothing.
    faults: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    # The weights with which each leg was computed, by its transfer id.
    used: dict[str, str] = field(default_factory=dict)

    # By path: what a door waits for before it does anything.
    slow: dict[str, asyncio.Event] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)  # that were shown to a door
    refuses: bool = False  # what comes while it is paused, as vLLM 0.33
    # So a stream is refused: vLLM notices in it that it is paused, its status has gone by then.
    refusal: str = f"data: {json.dumps(REFUSED)}\n\ndata: [DONE]\n\n"
    has_load: bool = False  # a request loads its KV, so vLLM 0.29 to 0.31 do not wait for the end
    on_label: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self.running: set[asyncio.Future[Any]] = set()
        self._goes = asyncio.Event()
        self._goes.set()

    @property
    def is_paused(self) -> bool:
        return not self._goes.is_set()

    def pause(self) -> None:
        self._goes.clear()

    def resume(self) -> None:
        self._goes.set()

    def open(self, app: web.Application) -> None:
        """Serve the doors."""
        for method, path, door in (
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("GET", "/is_paused", self._is_paused),
            ("POST", "/collective_rpc", self._collective_rpc),
            ("POST", "/reset_prefix_cache", self._reset_prefix_cache),
            ("POST", "/update_weight_version", self._update_weight_version),
            ("GET", "/weight_info", self._weight_info),
        ):
            app.router.add_route(method, path, self._faulty(path, door))

    async def serve(
        self, asked: dict[str, Any], answering: Coroutine[Any, Any, web.StreamResponse]
    ) -> web.StreamResponse:
        """Let a request run, unless we are paused; end it when all are aborted."""
        if self.refuses and self.is_paused:
            answering.close()
            if not asked.get("stream"):
                return web.json_response(REFUSED, status=503)
            return web.Response(text=self.refusal, content_type="text/event-stream")

        async def run() -> web.StreamResponse:
            await self._goes.wait()
            before = self.weights
            response = await answering
            transfer = (asked.get("kv_transfer_params") or {}).get("transfer_id", "")
            self.used[transfer] = before if before == self.weights else "mixed"
            return response

        task = asyncio.ensure_future(run())
        self.running.add(task)
        try:
            await asyncio.wait([task])
            return web.json_response(ABORTED) if task.cancelled() else task.result()
        finally:
            task.cancel()
            answering.close()
            self.running.discard(task)

    def _faulty(self, path: str, door: Any) -> Any:
        async def serve(request: web.Request) -> web.Response:
            self.asked.append(path)
            self.keys.add(request.headers.get("Authorization", ""))
            body = await request.read()
            if path in self.slow:
                await self.slow[path].wait()
            fault = self.faults.get(path)
            if fault == "hang":
                await asyncio.Event().wait()
            if path == "/pause" and request.query["mode"] == "wait" and self.has_load:
                self.pause()
                fault = "500"
            if fault is not None and fault.isdigit():
                return web.json_response({"error": {"message": "it broke"}}, status=int(fault))
            said = {} if fault == "lie" else await door(request, json.loads(body or b"{}"))
            return web.json_response(said)

        return serve

    async def _pause(self, request: web.Request, _: Any) -> dict[str, Any]:
        self.pause()
        if request.query["mode"] == "abort":
            for task in self.running:
                task.cancel()
        while self.running:
            await asyncio.wait(self.running)
        return {"status": "paused"}

    async def _resume(self, *_: Any) -> dict[str, Any]:
        self.resume()
        return {"status": "resumed"}

    async def _is_paused(self, *_: Any) -> dict[str, Any]:
        return {"is_paused": self.is_paused}

    async def _collective_rpc(self, _: web.Request, asked: dict[str, Any]) -> dict[str, Any]:
        assert self.is_paused, "weights change while it may compute"
        assert not self.running, "weights change under a request"
        self.weights, self.has_changed = asked["kwargs"]["weights_path"], True
        return {"results": [None]}

    async def _reset_prefix_cache(self, *_: Any) -> dict[str, Any]:
        return {"success": not self.running}

    async def _update_weight_version(self, _: web.Request, asked: Any) -> dict[str, Any]:
        self.label, self.has_changed = asked["new_version"], True
        if self.on_label is not None:
            await self.on_label()
        return {"success": True, "new_version": self.label}

    async def _weight_info(self, *_: Any) -> dict[str, Any]:
        return {"weight_version": self.label}
