"""Who may answer a chat in bench_chat.py: processes behind our proxy, or a pair of NixlConnector
in its bidirectional mode, with the client in the place of a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from benchmarks.harness import progress
from benchmarks.serving_client import (
    ANSWER_SECONDS,
    ServingClient,
    Stream,
    check_answer,
    question,
    take_event,
)
from benchmarks.vllm_servers import BLOCK_TOKENS, MODEL, OneCoreServer, nixl_environment
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.ports import PortPlan
from p2p_engine.transfer_config import EXTRA
from tests.vllm.observing import by_label, prompt_tokens

STASH_SECONDS = 120.0
VLLM_ARGS = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=8192", "--max-num-batched-tokens=8192",
    f"--block-size={BLOCK_TOKENS}", "--enable-prefix-caching",
)  # fmt: skip
UNASKED = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@dataclass(frozen=True)
class Setup:
    """A way to serve the chats: one instance (None), or a pair in this mode, whether it stashes,
    and further arguments of the proxy; "NIXL": a pair of NixlConnector."""

    send_type: str | None = "PUT_ASYNC"
    stashes: bool = False
    proxy: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatAnswer:
    """One answer; seconds since it was asked for. `first` is None if it came in one piece."""

    first: float | None
    whole: float
    tokens: list[int]


class ChatWorld(Protocol):
    """Processes that answer."""

    async def ask(self, prompt: list[int], num_tokens: int, chat: str) -> ChatAnswer:
        """Ask for the next turn of a chat.

        Raises:
            RuntimeError: an error status, or an error in the stream.
        """

    async def ask_decode(self, prompt: list[int], num_tokens: int, into: Stream) -> None:
        """Ask the instance that decodes, alone; `into` is filled while the answer comes."""

    def counts(self) -> dict[str, int]:
        """What has moved, and how many prompt tokens each has computed, so far. One instance
        alone counts as decode."""


@contextlib.asynccontextmanager
async def world_of(setup: Setup) -> AsyncIterator[ChatWorld]:
    """Bring up a stage's processes, each instance on a core of its own."""
    logs = Path(tempfile.mkdtemp(prefix="bench-chat-"))
    progress(f"logs in {logs}")
    made = nixl_world(logs) if setup.send_type == "NIXL" else fleet_world(setup, logs)
    async with made as world:
        yield world


@dataclass(frozen=True)
class ProxyWorld:
    """Our instances; a pair is behind our proxy."""

    fleet: Fleet
    session: aiohttp.ClientSession

    async def ask(self, prompt: list[int], num_tokens: int, chat: str) -> ChatAnswer:
        """See ChatWorld."""
        first = self.fleet.proxy or self.fleet.instances[0]
        stream = Stream()
        await self._stream(first.url, prompt, num_tokens, {"X-Session-Id": chat}, stream)
        return ChatAnswer(stream.first, time.perf_counter() - stream.asked_at, stream.tokens)

    async def ask_decode(self, prompt: list[int], num_tokens: int, into: Stream) -> None:
        """See ChatWorld."""
        await self._stream(self.fleet.instances[-1].url, prompt, num_tokens, {}, into)

    async def _stream(
        self, url: str, prompt: list[int], num_tokens: int, headers: Mapping[str, str], into: Stream
    ) -> None:
        body = {**question(prompt, num_tokens), "model": str(MODEL.path), "stream": True}
        into.begin()
        post = self.session.post(f"{url}/v1/completions", json=body, headers=dict(headers))
        async with post as answer:
            await check_answer(answer)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    take_event(into, json.loads(line[6:]))

    def counts(self) -> dict[str, int]:
        """See ChatWorld."""
        prefill, decode = self.fleet.instances[0], self.fleet.instances[-1]
        landed = [by_label(item, "vllm:p2p_landed_bytes", "")[""] for item in (prefill, decode)]
        computed = [prompt_tokens(item)["local_compute"] for item in (prefill, decode)]
        if prefill is decode:
            landed[0], computed[0] = 0, 0
        return {
            "to_prefill_bytes": landed[0], "to_decode_bytes": landed[1],
            "computed_by_prefill": computed[0], "computed_by_decode": computed[1],
        }  # fmt: skip


@contextlib.asynccontextmanager
async def fleet_world(setup: Setup, logs: Path) -> AsyncIterator[ChatWorld]:
    """Bring up one instance, or a proxy and a pair."""
    settings: dict[str, Any] = {EXTRA: {"stash_seconds": STASH_SECONDS}} if setup.stashes else {}
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} if setup.stashes else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    with Fleet(
        MODEL.path,
        send_type=setup.send_type or "PUT_ASYNC",
        vllm_args=VLLM_ARGS,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        log_dir=logs,
    ) as fleet:
        if setup.send_type is None:
            fleet.start(MemberRole.SINGLE)
        else:
            fleet.start_proxy(arguments=setup.proxy)
            fleet.start(MemberRole.PREFILL, transfer_config={**settings, **both})
            fleet.start(MemberRole.DECODE, transfer_config=settings)
        await asyncio.to_thread(fleet.wait_ready)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
            yield ProxyWorld(fleet, session)


@dataclass
class NixlWorld:
    """A pair of NixlConnector with `bidirectional_kv_xfer`. Decode says what it keeps only in an
    answer of one piece, and the next turn's prefill is told."""

    prefill: ServingClient
    decode: ServingClient
    _kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # by chat
    _computed: Counter[str] = field(default_factory=Counter)

    async def ask(self, prompt: list[int], num_tokens: int, chat: str) -> ChatAnswer:
        """See ChatWorld."""
        asked_at = time.perf_counter()
        params = {**UNASKED, **self._kept.get(chat, {})}
        params |= {"do_remote_decode": True, "do_remote_prefill": False}
        told = await self._whole("prefill", prompt, 1, params)
        answer = await self._whole("decode", prompt, num_tokens, told["kv_transfer_params"])
        self._kept[chat] = answer["kv_transfer_params"] or {}
        [choice] = answer["choices"]
        return ChatAnswer(None, time.perf_counter() - asked_at, choice["token_ids"])

    async def _whole(
        self, role: str, prompt: list[int], num_tokens: int, params: dict[str, Any]
    ) -> dict[str, Any]:
        client = self.prefill if role == "prefill" else self.decode
        answer = await client.whole(prompt, num_tokens, params)
        found = answer["usage"]["prompt_tokens_details"] or {}
        self._computed[role] += len(prompt) - (found.get("cached_tokens") or 0)
        return answer

    async def ask_decode(self, prompt: list[int], num_tokens: int, into: Stream) -> None:
        """See ChatWorld."""
        await self.decode.stream(prompt, num_tokens, into=into)

    def counts(self) -> dict[str, int]:
        """See ChatWorld; by what the answers say was not computed. Bytes are not counted."""
        return {f"computed_by_{role}": self._computed[role] for role in ("prefill", "decode")}


@contextlib.asynccontextmanager
async def nixl_world(logs: Path) -> AsyncIterator[ChatWorld]:
    """Bring up a pair of NixlConnector, without its pinning of workers: on two cores it would put
    both instances on one."""
    transfer = {
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
        EXTRA: {"bidirectional_kv_xfer": True},
    }  # fmt: skip
    asked = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
    ports = PortPlan("127.0.0.1")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ports.close)
        servers = []
        for core, name in enumerate(("prefill", "decode")):
            environment = nixl_environment(logs, ports.take(), is_pinned=False)
            server = OneCoreServer(
                name, logs, core, transfer, arguments=asked, environment=environment
            )
            stack.callback(server.close)
            servers.append(server)
        for server in servers:
            await asyncio.to_thread(server.wait)
        clients = [await stack.enter_async_context(ServingClient(item)) for item in servers]
        yield NixlWorld(clients[0], clients[1])
