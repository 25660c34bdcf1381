"""A small mixed set of requests, and the tokens that a server answers them with."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

BLOCK = 32
# One token; around one block; around two; more than one chunk of a chunked prefill.
PROMPT_LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 300, 700)
_REQUEST_SECONDS = 120.0
_EXTERNAL = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE
)
# Never through a proxy that the environment names: all addresses are of this machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Answer = dict[int, list[int]]  # choice -> its token ids


@dataclass(frozen=True)
class Question:
    """One request: where it is posted and what it says."""

    path: str
    body: Mapping[str, Any]
    num_prompts: int = 1  # transfers that it needs

    @property
    def num_lone_tokens(self) -> int:
        """Prompts of one token: what decode's metrics count as computed even after a transfer.

        vLLM computes the last token of every prompt again, but counts it where it is the only one.
        """
        prompt = self.body.get("prompt")
        return self.num_prompts if isinstance(prompt, list) and len(prompt) == 1 else 0


def mixed_questions(model: str, seed: int) -> list[Question]:
    """Return completions of all lengths, several prompts, n > 1, a stream, and a chat."""
    source = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [source.randrange(5, 900) for _ in range(length)]

    def completion(prompts: Any, num_prompts: int = 1, **more: Any) -> Question:
        return Question("/v1/completions", {**common, "prompt": prompts, **more}, num_prompts)

    common = {
        "model": model,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    messages = [{"role": "user", "content": f"tell me of {source.random()} and of the sea"}]
    return [
        *(completion(prompt(length)) for length in PROMPT_LENGTHS),
        completion(prompt(150), stream=True),
        completion([prompt(40), prompt(90)], num_prompts=2),
        # Not sampled with a seed: vLLM's CPU runner ends when such a prompt is cut into chunks.
        completion(prompt(120), num_prompts=2, n=2, temperature=1.0, top_k=1),
        Question("/v1/chat/completions", {**common, "messages": messages}),
    ]


def ask(
    url: str,
    question: Question,
    headers: Mapping[str, str] | None = None,
    timeout: float = _REQUEST_SECONDS,
) -> Answer:
    """Post one request and return the tokens of each of its choices; blocks for the answer.

    Raises:
        OSError: it was refused or not answered in time; an error status is urllib's HTTPError.
    """
    request = urllib.request.Request(
        url + question.path,
        data=json.dumps(question.body).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    with _direct.open(request, timeout=timeout) as response:
        text = response.read().decode()
    answer: Answer = {}
    for part in _parts(text) if question.body.get("stream") else [json.loads(text)]:
        for choice in part["choices"]:
            answer.setdefault(choice["index"], []).extend(choice["token_ids"] or ())
    return answer


def ask_all(url: str, questions: Sequence[Question], *, concurrency: int) -> list[Answer]:
    """Ask several at a time; the answers are in the order of the questions."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda question: ask(url, question), questions))


def prompt_tokens_by_source(url: str) -> dict[str, int]:
    """Return how many prompt tokens an instance computed, found in its cache, or was sent."""
    with _direct.open(f"{url}/metrics", timeout=_REQUEST_SECONDS) as response:
        text = response.read().decode()
    return {source: int(float(value)) for source, value in _EXTERNAL.findall(text)}


def _parts(stream: str) -> Iterator[Any]:
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)
