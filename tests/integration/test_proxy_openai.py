"""OpenAI's surface: usage across the split, parameters, and what any one instance answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from p2p_engine.simulate.answers import completion, events
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED, CHAT, COMPLETIONS, STREAMED, fleet

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# What must reach decode as it is, and the prefill leg in some form that it can answer.
SHAPES: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "best_of": {"best_of": 2},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["\n", "END"]},
    "min_tokens": {"min_tokens": 4, "max_tokens": 9},
    "one token": {"max_tokens": 1},
    "max_completion_tokens": {"max_completion_tokens": 12},
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "guided": {"response_format": {"type": "json_object"}},
    "sampling": {"temperature": 0.1, "top_p": 0.9, "seed": 7, "logit_bias": {"5": 1}},
    "tokens": {"prompt": [1, 2, 3]},
    "batch": {"prompt": ["a", "b"]},
}
WHOLE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True, "logprobs": 1},
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_parameter_reaches_decode_unchanged(path: str, is_stream: bool) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        for shape in (*SHAPES.values(), *WHOLE.values()):
            asked = {**ASKED, **shape, "stream": is_stream}
            status, body, _ = await proxy.ask(asked, path)
            expected = b"".join(events(asked)) if is_stream else None
            assert status == 200
            assert body == expected or json.loads(body) == completion(asked, None)
            sent = decode.received[-1].json
            sent.pop("kv_transfer_params", None)
            assert sent == asked
        for received in prefill.received:
            sent = received.json
            assert (sent["max_tokens"], sent["stream"]) == (1, False)
            assert sent.get("max_completion_tokens", 1) == 1
            assert not {"min_tokens", "stream_options", "prompt_logprobs", "echo"} & set(sent)
        assert len(prefill.received) == len(SHAPES)
        await proxy.until_idle()


def usage(cached_tokens: int | None, completion_tokens: int = 5) -> dict[str, Any]:
    """Return what vLLM says, with or without --enable-prompt-tokens-details."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": 100,
        "completion_tokens": completion_tokens,
        "total_tokens": 100 + completion_tokens,
        "prompt_tokens_details": details,
    }


def compact(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_both_legs_are_in_one_trace_that_has_the_transfers_id(share: float) -> None:
    async with fleet(trace_share=share) as (proxy, [prefill], [decode]):
        for _ in range(40):
            assert (await proxy.ask())[0] == 200
        num_traced = 0
        for one, other in zip(prefill.received, decode.received, strict=True):
            trace = one.headers.get("traceparent")
            assert other.headers.get("traceparent") == trace
            if trace is not None:
                num_traced += 1
                transfer_id = one.headers["X-Request-Id"][-32:]
                assert re.fullmatch(f"00-{transfer_id}-[0-9a-f]{{16}}-01", trace)
        assert num_traced == 40 * share or (share == 0.5 and 0 < num_traced < 40)
        theirs = f"00-{'a' * 32}-{'b' * 16}-01"
        assert (await proxy.ask(headers={"traceparent": theirs}))[0] == 200
        assert {d.received[-1].headers["traceparent"] for d in (prefill, decode)} == {theirs}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("at_prefill", "seen"), [(3, 3), (0, 0), (1234567, 1234567), (None, 99)])
async def test_what_was_cached_is_what_prefill_had_cached(
    at_prefill: int | None, seen: int, is_stream: bool
) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(
            body=compact({"choices": [{}], "usage": usage(at_prefill, 1)}),
        )
        if is_stream:
            last = b"data: %b\n\n" % compact({"choices": [], "usage": usage(99)})
            decode.behaviour = Behaviour(pieces=[*events(STREAMED)[:-1], last[:70], last[70:]])
        else:
            decode.behaviour = Behaviour(body=compact({"choices": [{}], "usage": usage(99)}))
        status, body, _ = await proxy.ask(STREAMED if is_stream else ASKED)
        assert status == 200
        if is_stream:
            assert body.startswith(b"".join(events(STREAMED)[:-1]))
            body = body.rpartition(b"data: ")[2]
        assert json.loads(body)["usage"] == usage(seen)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings"])
async def test_what_one_instance_can_answer_goes_to_any(path: str) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        asked = {"model": "tiny", "input": "x", "prompt": "x", "kv_transfer_params": {"evil": 1}}
        for _ in range(4):
            status, body, headers = await proxy.ask(asked, path)
            del json.loads(body)["asked"]
            assert (status, json.loads(body)["path"]) == (200, path)
            assert headers["X-Request-Id"]
        assert len(prefill.received) == len(decode.received) == 2
        sent = decode.received[0]
        assert sent.json == {key: asked[key] for key in ("model", "input", "prompt")}
        await prefill.stop_serving()
        for _ in range(3):
            assert (await proxy.ask(asked, path))[0] == 200
        await proxy.until_idle()


async def test_one_instance_of_any_role_is_enough_for_that() -> None:
    async with fleet(1, 0) as (proxy, _, _):
        assert (await proxy.ask({"prompt": "x"}, "/tokenize"))[0] == 200
    async with fleet(0, 0) as (proxy, _, _):
        status, body, _ = await proxy.ask({"prompt": "x"}, "/tokenize")
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_instance")
