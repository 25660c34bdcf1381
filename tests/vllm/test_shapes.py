"""Requests of every shape: a prefill and a decode instance behind our proxy answer as one does.

Ids and times aside. Greedy throughout: vLLM's CPU runner ends when a seeded prompt is cut in parts.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.vllm.load import ENVIRONMENT
from tests.vllm.observing import prompt_tokens

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(2400)]

SECONDS = 120.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEVER_EQUAL = {"id", "created", "kv_transfer_params", "system_fingerprint", "request_id"}
# Prefill's last layer sees the prompt in another batch than a single instance does.
TOLERANCE = 1e-3
TEXT = "Once upon a time there was a small engine that moved what others had computed. " * 3
IDS = [5 + position * 37 % 890 for position in range(150)]
TWO: dict[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1}
STREAM: dict[str, Any] = {"stream": True}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "Tell me of the sea, and of those who cross it."}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "An engine."},
    {"role": "user", "content": "What do you move?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move a block",
        "parameters": {"type": "object", "properties": {"block": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class RequestShape:
    """One request. Those of an error are refused alike; no KV of theirs is moved."""

    path: str
    body: dict[str, Any]
    status: int = 200


def completion(prompt: Any = TEXT, status: int = 200, **more: Any) -> RequestShape:
    """A completion of twelve tokens, unless it says otherwise."""
    return RequestShape(COMPLETIONS, {"prompt": prompt, "max_tokens": 12, **more}, status)


def chat(messages: Any = None, status: int = 200, **more: Any) -> RequestShape:
    """A chat of twelve tokens, unless it says otherwise."""
    return RequestShape(CHAT, {"messages": messages or MESSAGES, "max_tokens": 12, **more}, status)


SHAPES: dict[str, RequestShape] = {
    "text": completion(),
    "token ids": completion(IDS),
    "one token": completion([17]),
    "one block": completion(IDS[:32]),
    "a long prompt": completion(IDS * 5),
    "unicode": completion("Ünïcödé, 私は機関車です 🚂 " * 8),
    "several texts": completion([TEXT, "another", "and one more"]),
    "several lists of ids": completion([IDS[:40], IDS[:90]]),
    "stream": completion(**STREAM),
    "stream of several": completion([TEXT, "another"], **STREAM),
    "stream with usage": completion(**WITH_USAGE),
    "stream with usage all along": completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "two choices": completion(IDS, **TWO),
    "stream of two choices": completion(IDS, **TWO, **WITH_USAGE),
    "max_tokens 1": completion(max_tokens=1),
    "max_tokens 1, stream": completion(max_tokens=1, **WITH_USAGE),
    "no max_tokens": RequestShape(COMPLETIONS, {"prompt": "short"}),
    "min_tokens": completion(min_tokens=12, max_tokens=20),
    "ignore_eos": completion(ignore_eos=True, max_tokens=40),
    "stop": completion(stop=["e", "a"]),
    "stop, kept": completion(stop="e", include_stop_str_in_output=True),
    "stop token": completion(IDS, stop_token_ids=list(range(100, 500))),
    "stop, stream": completion(stop=["e", "a"], **STREAM),
    "logprobs": completion(logprobs=3),
    "logprobs, stream": completion(IDS, logprobs=2, **STREAM),
    "logprobs by id": completion(logprobs=1, return_tokens_as_token_ids=True),
    "prompt_logprobs": completion(IDS[:40], prompt_logprobs=2),
    "echo": completion(echo=True),
    "echo with logprobs": completion(IDS[:40], echo=True, logprobs=1),
    "echo, stream": completion(echo=True, **STREAM),
    "penalties": completion(IDS, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=12),
    "repetition penalty": completion(IDS, repetition_penalty=1.3, ignore_eos=True),
    "logit_bias": completion(logit_bias={"42": 5.0}),
    "allowed_token_ids": completion(allowed_token_ids=[41, 42, 43]),
    "bad words": completion(bad_words=["the"]),
    "return_token_ids": completion(return_token_ids=True),
    "special tokens kept": completion(skip_special_tokens=False, add_special_tokens=False),
    "truncated": completion(IDS, truncate_prompt_tokens=50),
    "chat": chat(),
    "chat of several turns": chat(TALK),
    "chat, unicode": chat([{"role": "user", "content": "Grüße, 世界 🌍"}]),
    "chat, stream": chat(**STREAM),
    "chat, stream with usage": chat(**WITH_USAGE),
    "chat, max_completion_tokens": RequestShape(
        CHAT, {"messages": MESSAGES, "max_completion_tokens": 7}
    ),
    "chat, max_tokens 1": chat(max_tokens=1),
    "chat, two choices": chat(**TWO),
    "chat, logprobs": chat(logprobs=True, top_logprobs=2),
    "chat, stop": chat(stop=["e"]),
    "chat, tools unused": chat(tools=[TOOL], tool_choice="none"),
    "chat, a tool by name": chat(
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "move"}},
        status=400,  # vLLM was started without a parser of tool calls
    ),
    "chat, echo of the last turn": chat(
        TALK[:3], add_generation_prompt=False, continue_final_message=True
    ),
    "best_of": completion(best_of=2, **TWO),
    "two greedy choices": completion(n=2, status=400),
    "no prompt": RequestShape(COMPLETIONS, {"max_tokens": 4}, 400),
    "a model that is not there": completion(model="another", status=404),
    "max_tokens below zero": completion(max_tokens=-1, status=400),
    "too long": completion(IDS * 20, status=400),
    "no temperature": completion(temperature=-1.0, status=400),
    "a suffix": completion(suffix="end", status=400),
    "no messages": RequestShape(CHAT, {"messages": "hi", "max_tokens": 4}, 400),
    "an unknown role": chat([{"content": "hi"}], status=400),
}


@dataclass
class Said:
    """An answer without ids and times; a stream is put together by choice."""

    status: int
    content: Any = None
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: Any = None
    is_done: bool = False


def ask(url: str, shape: RequestShape, model: str) -> Said:
    """Post one request."""
    body = {"model": model, "temperature": 0, **shape.body}
    request = urllib.request.Request(
        url + shape.path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=SECONDS) as response:
            text = response.read().decode()
            status = response.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    if status != 200 or not body.get("stream"):
        return Said(status, without_ids(json.loads(text)))
    return joined(text)


def joined(stream: str) -> Said:
    """Join the pieces of a stream: how many tokens share an event is a matter of time."""
    said = Said(200)
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            said.is_done = True
        elif data != line:
            part = without_ids(json.loads(data))
            said.usage = part.get("usage") or said.usage
            for piece in part["choices"]:
                add(said.choices.setdefault(piece["index"], {}), piece)
    return said


def add(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append texts and lists, go into objects, and keep the last of everything else."""
    for key, value in piece.items():
        known: Any = whole.get(key)
        if isinstance(value, dict):
            add(whole.setdefault(key, {}) if known is None else known, value)
        elif key != "role" and isinstance(value, str | list) and known:
            whole[key] = known + value
        elif value is not None or key not in whole:
            whole[key] = value


def without_ids(value: Any) -> Any:
    """Leave out what no two answers share."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in NEVER_EQUAL}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Name what differs; numbers may by a rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key, "-"), other.get(key, "-"), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{path}[{number}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, abs_tol=TOLERANCE):
            yield f"{path}: {one} and {other}"
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


@dataclass(frozen=True)
class Answers:
    """What one instance alone says, what the two say, and what was moved between them."""

    alone: dict[str, Said]
    split: dict[str, Said]
    moved_tokens: float


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    model = ensure_tiny_model()
    args = (*VLLM_ARGS, "--served-model-name=tiny")
    folder = tmp_path_factory.mktemp("shapes")

    def ask_all(url: str) -> dict[str, Said]:
        return {name: ask(url, shape, "tiny") for name, shape in SHAPES.items()}

    with Fleet(model, vllm_args=args, env=ENVIRONMENT, log_dir=folder / "alone") as fleet:
        single = fleet.start(MemberRole.SINGLE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        alone = ask_all(single.url)
    with Fleet(model, vllm_args=args, env=ENVIRONMENT, log_dir=folder / "split") as fleet:
        proxy = fleet.start_proxy()
        fleet.start(MemberRole.PREFILL)
        decode = fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        split = ask_all(proxy.url)
        moved = prompt_tokens(decode)["external_kv_transfer"]
    return Answers(alone, split, moved)


@pytest.mark.parametrize("name", SHAPES)
def test_the_two_answer_as_one_does(name: str, answers: Answers) -> None:
    alone, split = answers.alone[name], answers.split[name]
    assert alone.status == SHAPES[name].status, alone.content
    assert list(differences(vars(alone), vars(split))) == []


def test_kv_was_moved(answers: Answers) -> None:
    assert answers.moved_tokens > 1000
