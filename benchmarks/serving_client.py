"""A client of real vLLM servers that times each leg of a request itself, without a proxy."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

import aiohttp

from benchmarks.process_tree import cpu_seconds
from benchmarks.vllm_servers import OneCoreServer

ANSWER_SECONDS = 120.0


@dataclass
class Stream:
    """An answer that comes token by token: when each event came, and the tokens so far."""

    asked_at: float = 0.0
    events_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Note that the question is asked now."""
        self.asked_at = time.perf_counter()

    @property
    def first(self) -> float:
        """Seconds from the question to the first token."""
        return self.events_at[0] - self.asked_at


@dataclass(frozen=True)
class TimedAnswer:
    """What came of one request; seconds from its beginning. `prefill` is None if no leg came
    before the other."""

    prefill: float | None
    decode: float | None
    first: float
    tokens: list[int]


class ServingClient:
    """Asks one server; a context manager. Every answer must come within ANSWER_SECONDS."""

    def __init__(self, server: OneCoreServer) -> None:
        self.kv_port = server.kv_port
        self._pid = server.pid
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(server.path), limit=0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            read_bufsize=1 << 20,
        )

    async def __aenter__(self) -> ServingClient:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._session.close()

    def cpu_seconds(self) -> float:
        """The processor time that the server has used so far."""
        return cpu_seconds(self._pid)

    async def complete(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Compute one token; returns the answer's transfer parameters.

        Raises:
            RuntimeError: an error status.
        """
        return dict((await self.whole(prompt, 1, params)).get("kv_transfer_params") or {})

    async def whole(
        self, prompt: list[int], num_tokens: int, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Decode so many tokens; returns the answer, in one piece.

        Raises:
            RuntimeError: an error status.
        """
        async with self._post(question(prompt, num_tokens, params)) as answer:
            await check_answer(answer)
            return dict(await answer.json())

    async def stream(
        self,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        into: Stream | None = None,
    ) -> Stream:
        """Decode so many tokens; `into` is filled while they come.

        Raises:
            RuntimeError: an error status, or an error in the stream.
        """
        found = into or Stream()
        found.begin()
        async with self._post(question(prompt, num_tokens, params) | {"stream": True}) as answer:
            await check_answer(answer)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    take_event(found, json.loads(line[6:]))
        return found

    def _post(self, body: dict[str, Any]) -> Any:
        return self._session.post("http://server/v1/completions", json=body)


def question(
    prompt: list[int], num_tokens: int, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body of a completion request of so many tokens."""
    body = {
        "model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return body if params is None else {**body, "kv_transfer_params": params}


async def check_answer(answer: aiohttp.ClientResponse) -> None:
    """Check the status of an answer.

    Raises:
        RuntimeError: an error status.
    """
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")


def take_event(stream: Stream, event: dict[str, Any]) -> None:
    """Add an event to the answer that it belongs to.

    Raises:
        RuntimeError: the event is an error.
    """
    if "error" in event:
        raise RuntimeError(str(event["error"])[:300])
    tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    if tokens:
        stream.events_at.append(time.perf_counter())
        stream.tokens += tokens


@dataclass(frozen=True)
class ServingPair:
    """A prefill and a decode server; a single one is both."""

    prefill: ServingClient
    decode: ServingClient

    def cpu_seconds(self) -> tuple[float, float]:
        """The processor time that both have used so far; none for prefill if they are the same."""
        decode = self.decode.cpu_seconds()
        return (0.0 if self.prefill is self.decode else self.prefill.cpu_seconds()), decode


Way: TypeAlias = Callable[[ServingPair, list[int], int], Awaitable[TimedAnswer]]


async def alone(pair: ServingPair, prompt: list[int], num_tokens: int) -> TimedAnswer:
    """Compute and decode in one instance."""
    stream = await pair.decode.stream(prompt, num_tokens)
    return TimedAnswer(None, None, stream.first, stream.tokens)


def one_after_the_other(send_type: str) -> Way:
    """Our connector: prefill first, then decode."""

    async def ask(pair: ServingPair, prompt: list[int], num_tokens: int) -> TimedAnswer:
        prefill, decode = _our_params(pair, send_type)
        asked_at = time.perf_counter()
        await pair.prefill.complete(prompt, prefill)
        return await _decode(pair, prompt, num_tokens, decode, asked_at)

    return ask


async def both_at_once(pair: ServingPair, prompt: list[int], num_tokens: int) -> TimedAnswer:
    """Our connector: both legs at the same moment, as with --dispatch concurrent."""
    prefill, decode = _our_params(pair, "PUT_ASYNC")
    leg = asyncio.create_task(pair.prefill.complete(prompt, prefill))
    try:
        stream = await pair.decode.stream(prompt, num_tokens, decode)
    finally:
        await leg
    return TimedAnswer(None, None, stream.first, stream.tokens)


async def by_handshake(pair: ServingPair, prompt: list[int], num_tokens: int) -> TimedAnswer:
    """NixlConnector: decode is told what prefill has answered."""
    names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(names)}
    asked_at = time.perf_counter()
    told = await pair.prefill.complete(prompt, params)
    return await _decode(pair, prompt, num_tokens, told, asked_at)


async def _decode(
    pair: ServingPair, prompt: list[int], num_tokens: int, params: dict[str, Any], asked_at: float
) -> TimedAnswer:
    prefill = time.perf_counter() - asked_at
    stream = await pair.decode.stream(prompt, num_tokens, params)
    return TimedAnswer(prefill, stream.first, stream.events_at[0] - asked_at, stream.tokens)


def _our_params(pair: ServingPair, send_type: str) -> Sequence[dict[str, Any]]:
    common = {
        "transfer_id": uuid.uuid4().hex, "remote_host": "127.0.0.1", "send_type": send_type
    }  # fmt: skip
    sends = {"do_remote_decode": True, "remote_port": pair.decode.kv_port}
    loads = {"do_remote_prefill": True, "remote_port": pair.prefill.kv_port}
    return common | sends, common | loads
