"""Anthropic's messages and OpenAI's responses on real vLLM: what one instance alone says, from KV
that was sent."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.vllm.doors import MESSAGES, RESPONSES, post, said
from tests.vllm.load import ENVIRONMENT
from tests.vllm.observing import prompt_tokens

pytestmark = [marks.vllm, pytest.mark.timeout(1800)]

ARGS = (
    "--served-model-name=tiny", "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice", "--tool-call-parser=hermes",
)  # fmt: skip
TEXT = "Once upon a time there was a small engine that moved what others had computed. " * 5
TURNS = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "An engine."},
    {"role": "user", "content": TEXT},
]
TOOL = {"name": "move", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": (MESSAGES, {"messages": TURNS, "max_tokens": 40, "system": "Be brief."}),
    "a message of blocks": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
         "max_tokens": 1, "metadata": {"user_id": "alice"}},
    ),
    "a response": (RESPONSES, {"input": TEXT, "max_output_tokens": 40, "instructions": "Brief."}),
    "a response of turns": (RESPONSES, {"input": TURNS, "max_output_tokens": 12}),
    "a response with a tool": (
        RESPONSES,
        {"input": TEXT, "max_output_tokens": 12, "store": False, "tool_choice": "none",
         "tools": [{"type": "function", "strict": False, **TOOL}]},
    ),
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "background": {"background": True},
    "an earlier response": {"previous_response_id": "resp_1"},
    "a tool of vLLM's": {"tools": [{"type": "web_search_preview"}]},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One instance alone, one that prefills, one that decodes."""
    with Fleet(
        ensure_tiny_model(),
        vllm_args=(*VLLM_ARGS, *ARGS),
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:
        fleet.start_proxy()
        fleet.start(MemberRole.SINGLE)
        fleet.start(MemberRole.PREFILL)
        fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_answer_is_that_of_one_instance_and_its_kv_was_sent(
    fleet: Fleet, name: str, is_stream: bool
) -> None:
    single, prefill, decode = fleet.instances
    assert fleet.proxy is not None
    path, asked = SHAPES[name]
    asked = {**asked, "stream": is_stream}
    before = prompt_tokens(prefill), prompt_tokens(decode)
    split = said(post(fleet.proxy.url + path, asked), is_stream=is_stream)
    alone = said(post(single.url + path, asked), is_stream=is_stream)
    assert split == alone
    assert alone[0]
    assert alone[1]["cached"] == 0
    assert alone[1]["answered"] == asked.get("max_tokens", asked.get("max_output_tokens"))
    by_prefill = prompt_tokens(prefill) - before[0]
    by_decode = prompt_tokens(decode) - before[1]
    assert by_decode["local_compute"] == 0
    assert by_decode["external_kv_transfer"] == by_prefill["local_compute"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_instance_would_keep_or_run_is_refused(fleet: Fleet, name: str) -> None:
    assert fleet.proxy is not None
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(fleet.proxy.url + RESPONSES, {"input": "x", **REFUSED[name]})
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["code"] in ("kept_by_one_instance", "builtin_tool")


# What vLLM refuses: the two legs say what one instance says.
INVALID: dict[str, tuple[str, dict[str, Any]]] = {
    "no limit": (MESSAGES, {"messages": TURNS}),
    "a budget above the limit": (
        MESSAGES,
        {"messages": TURNS, "max_tokens": 40,
         "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "a budget without a reasoning model": (
        MESSAGES,
        {"messages": TURNS, "max_tokens": 1100,
         "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    # vLLM reads the arguments as JSON, and what it has of them is none.
    "a tool whose arguments are cut off": (
        MESSAGES,
        {"messages": TURNS, "max_tokens": 400,
         "tools": [{"name": "move", "input_schema": {"type": "object"}}],
         "tool_choice": {"type": "tool", "name": "move"}},
    ),
    "a prompt template": (RESPONSES, {"input": "x", "prompt": {"id": "p"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_what_vllm_refuses_is_refused_alike(fleet: Fleet, name: str) -> None:
    assert fleet.proxy is not None
    path, asked = INVALID[name]
    refusals = []
    for member in (fleet.proxy, fleet.instances[0]):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(member.url + path, asked)
        text = re.sub(r"<dict of \d+ items>", "", caught.value.read().decode())
        refusals.append((caught.value.code, json.loads(text)))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] == 400


def test_a_prompt_that_may_be_truncated_is_computed_by_decode(fleet: Fleet) -> None:
    assert fleet.proxy is not None
    single, prefill, _ = fleet.instances
    asked = {"input": TEXT, "max_output_tokens": 12, "truncation": "auto"}
    before = prompt_tokens(prefill)
    one, other = (post(member.url + RESPONSES, asked) for member in (fleet.proxy, single))
    assert said(one, is_stream=False) == said(other, is_stream=False)
    assert prompt_tokens(prefill) == before
