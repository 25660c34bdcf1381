"""Prompts with images on real vLLM: what one instance alone says, from KV that was sent, in each
send mode and by each API; no image's KV is ever another's. The tiny model places tokens of an image
in three dimensions, so decode must know its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import HEAD_DIM
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import BLOCK, Question, ask
from tests.support import eventually
from tests.vllm.doors import MESSAGES, RESPONSES, post, said
from tests.vllm.events import events_config
from tests.vllm.load import ENVIRONMENT, check_nothing_held, landed_bytes
from tests.vllm.observing import by_label
from tests.vllm.other_models import IMAGE, ensure_model
from tests.vllm.pair import SEND_TYPES, DirectTrio, TokensSince, changed
from tests.vllm.pictures import CHAT, NUM_ANSWERED, Part, Picture, chat, chat_parts, turns, words

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]

STEP = 256  # tokens; longer prompts leave in chunks
ARGS = (
    *VLLM_ARGS, "--served-model-name=tiny", "--enable-prefix-caching",
    f"--max-num-batched-tokens={STEP}", "--enable-prompt-tokens-details",
    "--trust-request-chat-template",
)  # fmt: skip
SETTINGS = {
    "kv_load_failure_policy": "recompute",
    EXTRA: {"stash_seconds": 120.0, "transfer_timeout_seconds": 8.0},
}
BLOCK_BYTES = BLOCK * 6 * 2 * 2 * HEAD_DIM * 4  # layers, keys and values, heads, float32
# As it lies in the template, and nothing behind it.
ENDS_IN_IMAGE = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}" + IMAGE + "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectTrio]:
    with Fleet(
        ensure_model("ocr"),
        vllm_args=ARGS,
        transfer_config=SETTINGS,
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:
        policies = ("--prefill-policy=prefix_aware", "--decode-policy=session_affinity")
        fleet.start_proxy(arguments=policies)
        single = fleet.start(MemberRole.SINGLE)
        events = [("--kv-events-config", events_config()) for _ in range(2)]
        prefill = fleet.start(
            MemberRole.PREFILL, vllm_args=events[0], transfer_config={"kv_role": "kv_both"}
        )
        decode = fleet.start(MemberRole.DECODE, vllm_args=events[1])
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield DirectTrio(fleet, prefill, decode, single)


def shapes(seed: str) -> list[tuple[Part, ...]]:
    """Images at all places: whole blocks, parts of one, several steps, one behind another."""
    return [
        (Picture(f"{seed} 0"), words(f"{seed} 0")),
        (words(f"{seed} 1"), Picture(f"{seed} 1", 2, 2), words(f"{seed} 1b")),
        (words(f"{seed} 2"), Picture(f"{seed} 2", 7, 5), "?"),
        (Picture(f"{seed} 3a", 3, 9), Picture(f"{seed} 3b", 9, 3), words(f"{seed} 3", 3)),
        (words(f"{seed} 4", 60), Picture(f"{seed} 4a", 12, 12), Picture(f"{seed} 4b", 16, 16)),
        (Picture(f"{seed} 5", 5, 5), words(f"{seed} 5"), Picture(f"{seed} 5", 5, 5), "the same?"),
    ]


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_every_token_comes_from_transferred_kv(trio: DirectTrio, send_type: str) -> None:
    for parts in shapes(send_type):
        question = chat(*parts)
        by_prefill, by_decode = TokensSince(trio.prefill), TokensSince(trio.decode)
        assert trio.transfer(question, send_type) == trio.alone(question)
        num_images = sum(part.num_tokens for part in parts if isinstance(part, Picture))
        assert by_decode["local_compute"] == 0
        assert by_decode["external_kv_transfer"] == by_prefill["local_compute"] > num_images
    check_nothing_held(trio.both)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_each_api_takes_images(trio: DirectTrio, path: str, is_stream: bool) -> None:
    seed = f"{path} {is_stream}"
    text, picture = words(seed), Picture(seed, 6, 7)
    source = {"type": "base64", "media_type": "image/png", "data": picture.base64}
    asked: dict[str, dict[str, Any]] = {
        MESSAGES: {
            "messages": [{"role": "user", "content": [
                {"type": "image", "source": source}, {"type": "text", "text": text}]}],
            "max_tokens": NUM_ANSWERED,
        },
        RESPONSES: {
            "input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": picture.url, "detail": "auto"},
                {"type": "input_text", "text": text}]}],
            "max_output_tokens": NUM_ANSWERED,
        },
    }  # fmt: skip
    by_prefill, by_decode = TokensSince(trio.prefill), TokensSince(trio.decode)
    if path == CHAT:
        body = {**chat(picture, text).body, "stream": is_stream}
        one, other = (post(url + path, body) for url in (trio.proxy_url, trio.single.url))
        assert chat_ids(one, is_stream=is_stream) == chat_ids(other, is_stream=is_stream)
    else:
        body = {**asked[path], "stream": is_stream}
        both = [post(url + path, body) for url in (trio.proxy_url, trio.single.url)]
        split, alone = (said(each, is_stream=is_stream) for each in both)
        assert split == alone
        assert alone[1]["answered"] == NUM_ANSWERED
    assert by_decode["local_compute"] == 0
    assert by_decode["external_kv_transfer"] == by_prefill["local_compute"] > picture.num_tokens


def chat_ids(text: str, *, is_stream: bool) -> list[int]:
    """The tokens of a chat's answer."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in (lines if is_stream else [text])]
    choices = [choice for part in parts for choice in part["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert len(ids) == NUM_ANSWERED
    return ids


def test_two_images_behind_one_text_share_nothing(trio: DirectTrio) -> None:
    """Both sides cache prefixes: only the text before the images may be found there."""
    before, after = words("before", 40), words("after", 40)
    questions = [chat(before, Picture(f"one of two {n}"), after) for n in range(2)]
    expected = [trio.alone(question) for question in questions]
    assert expected[0] != expected[1]
    found = []
    for number in (0, 1, 0, 1):
        caches = TokensSince(trio.prefill), TokensSince(trio.decode)
        assert ask(trio.proxy_url, questions[number]) == expected[number]
        assert caches[1]["local_compute"] == 0
        found.append([cache["local_cache_hit"] for cache in caches])
    num_tokens = len(prompt_ids(trio, questions[0]))
    for first_time in found[:2]:
        assert max(first_time) <= num_tokens - Picture("").num_tokens
    for second_time in found[2:]:
        assert min(second_time) >= num_tokens // BLOCK * BLOCK - 1


def prompt_ids(trio: DirectTrio, question: Question) -> list[int]:
    """The tokens of a prompt, with those of its images."""
    body = {name: value for name, value in question.body.items() if name != "temperature"}
    ids: list[int] = json.loads(post(trio.single.url + CHAT, body))["prompt_token_ids"]
    return ids


def test_the_tokens_of_an_image_without_it_are_another_prompt(trio: DirectTrio) -> None:
    """Everybody holds the blocks of the image under the same tokens, the proxy knows of them by
    events, and one session has them: none is taken."""
    question = chat(words("tokens", 80), Picture("tokens", 12, 12), words("tokens 2"))
    session = {"X-Session-Id": "tokens"}
    with_image = ask(trio.proxy_url, question, session)
    ids = prompt_ids(trio, question)
    same = {name: question.body[name] for name in question.body if name != "messages"}
    without = Question("/v1/completions", {**same, "prompt": ids})
    by_decode = TokensSince(trio.decode)
    answer = ask(trio.proxy_url, without, session)
    assert answer == trio.alone(without)
    assert answer != with_image
    assert by_decode["local_compute"] == 0
    assert by_decode["local_cache_hit"] <= len(ids) - Picture("", 12, 12).num_tokens


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_kv_of_another_image_is_not_taken(trio: DirectTrio, send_type: str) -> None:
    """Prefill is shown one image and decode another one, under one name: decode computes its
    own."""
    text = words(f"lie {send_type}")
    one, other = (chat(Picture(f"lie {send_type} {n}"), text) for n in range(2))
    transfer_id = new_transfer_id()
    by_decode = TokensSince(trio.decode)
    trio.ask_prefill(one, transfer_id, send_type)
    assert trio.ask_decode(other, transfer_id, send_type) == trio.alone(other)
    assert by_decode["external_kv_transfer"] == 0
    assert by_decode["local_compute"] > Picture("").num_tokens


def live_bytes(member: Member) -> int:
    return by_label(member, "vllm:p2p_live_bytes", "place").total()


def test_turns_of_a_session(trio: DirectTrio) -> None:
    """What decode has is not pushed again. Prompts with media are not stashed, so nothing comes
    back to prefill."""
    messages: list[dict[str, Any]] = []
    held = live_bytes(trio.decode)
    for turn in range(4):
        parts: list[Part] = [words(f"turn {turn}", 30)]
        if turn in (0, 2):
            parts.insert(0, Picture(f"turn {turn}", 10, 6))
        messages.append({"role": "user", "content": chat_parts(*parts)})
        question = turns(*messages, max_tokens=40)
        by_prefill, by_decode = TokensSince(trio.prefill), TokensSince(trio.decode)
        landed = landed_bytes([trio.decode]).total()
        answer = ask(trio.proxy_url, question, {"X-Session-Id": "turns"})
        assert answer == trio.alone(question)
        assert by_decode["local_compute"] == 0
        assert by_prefill["external_kv_transfer"] == 0
        if turn:
            assert by_decode["local_cache_hit"] > 0
            num_bytes = landed_bytes([trio.decode]).total() - landed
            assert num_bytes <= BLOCK_BYTES * (-(-by_decode["external_kv_transfer"] // BLOCK) + 1)
        messages.append({"role": "assistant", "content": words(f"answer {turn}", 10)})
    eventually(lambda: live_bytes(trio.decode) <= held, 30)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_prompt_that_ends_in_an_image(trio: DirectTrio, send_type: str) -> None:
    """Decode computes the last token itself: a part of the image."""
    parts = words(f"end {send_type}"), Picture(f"end {send_type}", 5, 7)
    question = changed(chat(*parts), chat_template=ENDS_IN_IMAGE)
    assert prompt_ids(trio, question)[-1] == prompt_ids(trio, question)[-parts[1].num_tokens]
    by_decode = TokensSince(trio.decode)
    assert trio.transfer(question, send_type) == trio.alone(question)
    assert by_decode["local_compute"] == 0
    assert by_decode["external_kv_transfer"] > 0
