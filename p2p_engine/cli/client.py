"""Sends requests to an OpenAI-style server and collects every token id of the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from p2p_engine.cli.workload import Request

_TIMEOUT_SECONDS = 180.0


@dataclass
class CompletionAnswer:
    """The answer, by index of the sequence; `error` is empty on success."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)
    seconds_to_first: float | None = None  # streams only
    error: str = ""

    def add(self, part: dict[str, Any]) -> None:
        """Add an answer, or one piece of a stream."""
        for choice in part.get("choices", ()):
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            prompt = choice.get("prompt_token_ids") or part.get("prompt_token_ids")
            if prompt:
                self.prompts[index] = prompt
            if choice.get("finish_reason"):
                self.endings[index] = choice["finish_reason"]


def send_all(
    url: str,
    requests: Sequence[Request],
    *,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[CompletionAnswer]:
    """Send all requests, `concurrency` at a time; block until each is answered or has failed."""
    return asyncio.run(_send_all(url, requests, concurrency, on_answer))


async def _send_all(
    url: str, requests: Sequence[Request], concurrency: int, on_answer: Callable[[], None]
) -> list[CompletionAnswer]:
    slots = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(request: Request) -> CompletionAnswer:
            async with slots:
                answer = await _send(session, url, request)
            on_answer()
            return answer

        return list(await asyncio.gather(*map(one, requests)))


async def _send(session: aiohttp.ClientSession, url: str, request: Request) -> CompletionAnswer:
    answer = CompletionAnswer()
    began = time.monotonic()
    try:
        async with session.post(url + request.path, json=request.body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:500]}"
            elif request.is_stream:
                async for part in _parts(response):
                    answer.seconds_to_first = answer.seconds_to_first or time.monotonic() - began
                    answer.add(part)
            else:
                answer.add(await response.json())
    except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the pieces of a stream of server-sent events.

    Raises:
        ValueError: a piece is an error, or the stream ended before [DONE].
    """
    async for line in response.content:
        data = line.decode().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data:
            part = json.loads(data)
            if "error" in part:
                raise ValueError(str(part["error"]))
            yield part
    raise ValueError("the stream ended early")
