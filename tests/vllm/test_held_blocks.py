"""Real vLLM tells what it holds: a prompt goes to the prefill instance that has it, and not to one
that has evicted it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import BLOCK, Question, ask
from tests.support import eventually
from tests.vllm.events import events_config
from tests.vllm.load import ENVIRONMENT
from tests.vllm.observing import by_label, prompt_tokens

pytestmark = [marks.vllm, pytest.mark.timeout(1800)]

NUM_BLOCKS = 64  # of the first instance's cache
MAX_LENGTH = (NUM_BLOCKS - 1) * BLOCK
LENGTH = 20 * BLOCK
CHAT_LENGTH = 8 * BLOCK  # at least, whatever the tokenizer makes of it


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two prefill instances, the first with a small cache, and one that decodes."""
    with Fleet(
        ensure_tiny_model(),
        vllm_args=(*VLLM_ARGS, f"--max-model-len={MAX_LENGTH}", "--enable-prefix-caching"),
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:
        fleet.start_proxy(arguments=("--prefill-policy", "prefix_aware"))
        small = [f"--num-gpu-blocks-override={NUM_BLOCKS}"]
        members = [(MemberRole.PREFILL, small), (MemberRole.PREFILL, []), (MemberRole.DECODE, [])]
        for role, sizes in members:
            fleet.start(role, vllm_args=(*sizes, "--kv-events-config", events_config()))
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet


def question(prompt: list[int] | str, **more: Any) -> Question:
    body = {
        "model": str(ensure_tiny_model()), "max_tokens": 4, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        return Question("/v1/chat/completions", body | {"messages": messages})
    return Question("/v1/completions", body | {"prompt": prompt})


def num_known(proxy: Member) -> int:
    return sum(by_label(proxy, "p2p_proxy_known_kv_blocks", "").values())


def ask_and_be_heard(
    proxy: Member, instance: Member, asked: Question, length: int = LENGTH
) -> None:
    """Ask an instance directly for something new, and wait until the proxy has heard of it."""
    before = num_known(proxy)
    ask(instance.url, asked)
    eventually(lambda: num_known(proxy) >= before + length // BLOCK, 20)


def hits(fleet: Fleet, asked: Question) -> list[int]:
    """Ask the proxy, and return how many tokens each prefill instance found in its cache."""
    assert fleet.proxy is not None
    prefills = fleet.instances[:2]
    before = [prompt_tokens(each)["local_cache_hit"] for each in prefills]
    ask(fleet.proxy.url, asked)
    return [prompt_tokens(p)["local_cache_hit"] - b for p, b in zip(prefills, before, strict=True)]


def test_a_prompt_goes_to_who_holds_it_and_not_to_who_has_evicted_it(fleet: Fleet) -> None:
    assert fleet.proxy is not None
    one, other, _ = fleet.instances
    rng = random.Random(7)

    def prompt() -> list[int]:
        return [rng.randrange(5, 900) for _ in range(LENGTH)]

    for holder, index in ((one, 0), (other, 1)):
        held = prompt()
        ask_and_be_heard(fleet.proxy, holder, question(held))
        found = hits(fleet, question([*held, 7, 8, 9]))
        assert found == [LENGTH if n == index else 0 for n in range(2)]

    evicted = prompt()
    ask_and_be_heard(fleet.proxy, one, question(evicted))
    for _ in range(2 * NUM_BLOCKS * BLOCK // LENGTH):
        ask(one.url, question(prompt()))
    ask_and_be_heard(fleet.proxy, other, question(evicted))
    assert hits(fleet, question([*evicted, 7, 8, 9])) == [0, LENGTH]


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "pepper"}], ids=["plain", "salted"])
def test_a_chat_is_found_by_the_tokens_that_vllm_makes_of_it(
    fleet: Fleet, salt: dict[str, str]
) -> None:
    assert fleet.proxy is not None
    rng = random.Random(f"chat {salt}")
    words = " ".join(str(rng.randrange(10**6)) for _ in range(200))
    ask_and_be_heard(fleet.proxy, fleet.instances[1], question(words, **salt), CHAT_LENGTH)
    found = hits(fleet, question(f"{words} and more", **salt))
    assert found[0] == 0
    assert found[1] >= CHAT_LENGTH
