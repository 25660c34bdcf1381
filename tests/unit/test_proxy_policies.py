"""Each policy by itself, and what the router makes of two of them."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.fleet.held_blocks import Sighting
from proxy.fleet.instances import Instance, Role
from proxy.openai import payload
from proxy.openai.prompt import BLOCK_BYTES, Prompt, read_prompt
from proxy.routing.policies import POLICIES, Policy
from proxy.routing.prefix_tree import PrefixTree
from tests.rigs.routing import RoutingFleet
from tests.support import SeededRandom

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def policy(name: str) -> Policy:
    return POLICIES[name](random.Random(1), PrefixTree[Instance](1000))


def loaded(fleet: RoutingFleet, *loads: int) -> list[Instance]:
    """Return decode instances with so many tokens in flight, in the order that policies get."""
    instances = [fleet.add("D") for _ in loads]
    for instance, load in zip(instances, loads, strict=True):
        fleet.registry.take_leg(instance, Role.DECODE, load)
    return sorted(instances, key=lambda instance: (instance.load, instance.last_turn))


def text(words: str, num_blocks: int = 1) -> bytes:
    return (words.encode() * BLOCK_BYTES * num_blocks)[: BLOCK_BYTES * num_blocks]


def test_least_loaded_counts_tokens_and_not_requests() -> None:
    fleet = RoutingFleet()
    fleet.add("P")
    decodes = [fleet.add("D") for _ in range(2)]
    fleet.registry.take_leg(decodes[0], Role.DECODE, 1000)
    for _ in range(3):
        fleet.registry.take_leg(decodes[1], Role.DECODE, 100)
    assert fleet.choose()[1] is decodes[1]


def seen(num_tokens: int, held: dict[Instance, int], words: bytes = b"") -> Prompt:
    """A prompt of so many tokens, of which instances are known to hold some."""
    return Prompt(text=words, sighting=Sighting(1, num_tokens, held))


def test_prefix_aware_goes_by_real_blocks_where_they_are_known() -> None:
    fleet = RoutingFleet(prefill_policy="prefix_aware")
    first, second, untold = (fleet.add("P") for _ in range(3))
    fleet.add("D")
    words = text("once upon a time", 10)  # 640 tokens by the guess
    for _ in range(3):
        assert fleet.pair(Prompt(text=words)).prefill is first  # whom the guess knows from now on
    pair = fleet.pair(seen(600, {first: 0, second: 320}, words))
    assert pair.prefill is second
    assert (pair.prefill_tokens, pair.decode_tokens) == (280, 600 + 256)
    # Evicted everywhere: the guess for the one without events stays, and there is none.
    assert fleet.pair(seen(600, {first: 16, second: 0, untold: 0}, words)).prefill is first
    fleet.registry.take_leg(first, Role.PREFILL, 1000)
    assert fleet.pair(seen(600, {first: 600, second: 0}, text("new", 9))).prefill in (
        second,
        untold,
    )


def test_an_instance_that_tells_of_some_blocks_only_is_guessed_as_well() -> None:
    fleet = RoutingFleet(prefill_policy="prefix_aware")
    first, second = (fleet.add("P") for _ in range(2))
    fleet.add("D")
    words = text("once upon a time", 10)
    assert fleet.pair(Prompt(text=words)).prefill is first
    held = {first: 0, second: 160}
    assert fleet.pair(seen(640, held, words)).prefill is second
    fleet = RoutingFleet(prefill_policy="prefix_aware")
    first, second = (fleet.add("P") for _ in range(2))
    fleet.add("D")
    assert fleet.pair(Prompt(text=words)).prefill is first
    prompt = Prompt(text=words, sighting=Sighting(1, 640, {first: 0, second: 160}, {first}))
    assert fleet.pair(prompt).prefill is first


def test_decode_computes_alone_what_it_really_holds() -> None:
    fleet = RoutingFleet(bypass_tokens=100)
    prefill, decode = fleet.add("P"), fleet.add("D")
    words = text("a conversation", 10)
    assert fleet.pair(seen(600, {decode: 480}, words)).prefill is prefill
    assert fleet.pair(seen(600, {decode: 512}, words)).prefill is None
    # The guess says that decode holds it all by now.
    assert fleet.pair(Prompt(text=words)).prefill is None
    assert fleet.pair(seen(600, {decode: 0}, words)).prefill is prefill


def test_round_robin_takes_turns_whatever_the_load() -> None:
    fleet = RoutingFleet(decode_policy="round_robin")
    fleet.add("P")
    instances = loaded(fleet, 500, 1, 30)
    chosen: Counter[Instance] = Counter()
    for _ in range(9):
        _, decode = fleet.choose()
        fleet.registry.take_leg(decode, Role.DECODE, 7)
        chosen[decode] += 1
    assert chosen == dict.fromkeys(instances, 3)


def test_random_reaches_all() -> None:
    instances = loaded(RoutingFleet(), 5, 1, 3)
    assert {policy("random").choose(instances, Prompt()) for _ in range(50)} <= set(instances)
    one = policy("random")
    assert {one.choose(instances, Prompt()) for _ in range(100)} == set(instances)


def test_power_of_two_never_takes_the_most_loaded() -> None:
    instances = loaded(RoutingFleet(), 5, 1, 3, 9)
    one = policy("power_of_two")
    assert {one.choose(instances, Prompt()) for _ in range(100)} == set(instances[:3])
    assert one.choose(instances[:1], Prompt()) is instances[0]


def test_prefix_aware_goes_where_the_prompt_is_until_that_costs_more() -> None:
    fleet = RoutingFleet()
    idle, holder = loaded(fleet, 10, 100)
    one = policy("prefix_aware")
    prompt = Prompt(text=text("shared ", 8))
    one.tree.insert(prompt.blocks, holder)
    assert one.choose([idle, holder], prompt) is holder
    assert one.choose([idle, holder], Prompt(text=text("other ", 8))) is idle
    fleet.registry.take_leg(holder, Role.DECODE, 1000)
    assert one.choose([idle, holder], prompt) is idle


def test_a_session_stays_and_only_the_share_of_a_leaver_moves() -> None:
    instances = loaded(RoutingFleet(), 0, 0, 0, 0)
    one = policy("session_affinity")
    sessions = [Prompt(session=f"s{number}") for number in range(200)]
    before = {prompt: one.choose(instances, prompt) for prompt in sessions}
    assert set(before.values()) == set(instances)
    after = {prompt: one.choose(instances[1:], prompt) for prompt in sessions}
    assert all(after[p] is before[p] for p in sessions if before[p] is not instances[0])


def test_a_session_leaves_an_overloaded_instance_and_none_takes_the_least_loaded() -> None:
    fleet = RoutingFleet()
    instances = loaded(fleet, 0, 0, 0)
    one = policy("session_affinity")
    home = one.choose(instances, Prompt(session="s"))
    fleet.registry.take_leg(home, Role.DECODE, 10_000)
    assert one.choose(instances, Prompt(session="s")) is not home
    assert one.choose(instances, Prompt()) is instances[0]


def test_both_roles_have_a_policy_of_their_own() -> None:
    fleet = RoutingFleet(prefill_policy="session_affinity", decode_policy="round_robin")
    for kind in "PPPDDD":
        fleet.add(kind)
    pairs = set()
    for _ in range(9):
        pair = fleet.pair(Prompt(session="s"))
        fleet.registry.take_leg(pair.decode, Role.DECODE).release()
        pairs.add((pair.prefill, pair.decode))
    assert len({prefill for prefill, _ in pairs}) == 1
    assert len({decode for _, decode in pairs}) == 3


@pytest.mark.parametrize(("num_blocks", "is_alone"), [(1, True), (2, True), (4, False)])
def test_a_short_prompt_needs_no_prefill(num_blocks: int, is_alone: bool) -> None:
    fleet = RoutingFleet(bypass_tokens=200)
    fleet.add("P")
    fleet.add("D")
    assert (fleet.pair(Prompt(text=text("x", num_blocks))).prefill is None) is is_alone


def test_a_prompt_that_decode_holds_needs_no_prefill() -> None:
    fleet = RoutingFleet(bypass_tokens=200)
    fleet.add("P")
    decodes = [fleet.add("D") for _ in range(3)]
    long = text("long ", 20)
    first = fleet.pair(Prompt(text=long))
    assert first.prefill is not None
    fleet.registry.take_leg(first.decode, Role.DECODE, 5000)  # busy, yet it holds the prompt
    again = fleet.pair(Prompt(text=long + b"and a little more"))
    assert (again.prefill, again.decode) == (None, first.decode)
    assert fleet.pair(Prompt(text=text("another ", 20))).prefill is not None
    assert first.decode in decodes


def test_without_a_limit_every_prompt_has_its_prefill() -> None:
    fleet = RoutingFleet()
    fleet.add("P")
    fleet.add("D")
    for _ in range(2):
        assert fleet.pair(Prompt(text=b"x")).prefill is not None
    assert fleet.router.num_prefix_blocks == 0  # and nobody pays for a memory that nobody reads


def test_what_prefill_must_still_compute_is_its_load() -> None:
    fleet = RoutingFleet(prefill_policy="prefix_aware")
    fleet.add("P")
    fleet.add("D")
    prompt = Prompt(text=text("shared ", 8))
    assert fleet.pair(prompt).prefill_tokens == prompt.num_tokens
    assert fleet.pair(prompt).prefill_tokens == 1
    assert fleet.pair(prompt).decode_tokens == prompt.num_tokens + prompt.num_output_tokens


def test_a_new_incarnation_holds_nothing() -> None:
    fleet = RoutingFleet(prefill_policy="prefix_aware")
    prefill = fleet.add("P", epoch=1)
    fleet.add("D")
    prompt = Prompt(text=text("shared ", 8))
    fleet.pair(prompt)
    reborn = fleet.add_at(prefill.identity.http_address, "P", epoch=2)
    pair = fleet.pair(prompt)
    assert (pair.prefill, pair.prefill_tokens) == (reborn, prompt.num_tokens)


@pytest.mark.parametrize("policy_name", POLICIES)
def test_any_policy_serves_any_fleet(policy_name: str, rng: SeededRandom) -> None:
    fleet = RoutingFleet(prefill_policy=policy_name, decode_policy=policy_name)
    instances = [fleet.add(rng.choice(["P", "D", "PD"])) for _ in range(9)] + [fleet.add("PD")]
    for number in range(300):
        shared = text(f"shared {number % 5}", 3)
        pair = fleet.pair(Prompt(text=shared + b"%d" % number, session=str(number % 7)))
        assert pair.prefill in instances
        assert pair.decode in instances
        assert pair.prefill is not pair.decode
        if rng.random() < 0.5:
            fleet.registry.take_leg(pair.decode, Role.DECODE, rng.randint(1, 900))


@pytest.mark.parametrize(
    ("asked", "session", "num_output_tokens", "needs_whole_prompt"),
    [
        ({}, "", 256, False),
        ({"user": "me", "max_tokens": 7}, "me", 7, False),
        ({"user": 3, "max_tokens": "7", "max_completion_tokens": 5}, "", 5, False),
        ({"max_tokens": 100_000, "prompt_logprobs": None, "echo": False}, "", 256, False),
        ({"max_tokens": -4, "prompt_logprobs": 0}, "", 256, True),
        ({"echo": True}, "", 256, True),
        ({"use_beam_search": True}, "", 256, True),
    ],
)
def test_what_is_read_of_a_request(
    asked: dict[str, Any], session: str, num_output_tokens: int, needs_whole_prompt: bool
) -> None:
    prompt = read_prompt(payload.parse(msgspec.json.encode(asked)).fields)
    assert prompt.session == session
    assert prompt.num_output_tokens == num_output_tokens
    assert prompt.needs_whole_prompt is needs_whole_prompt


def test_prompts_share_blocks_only_where_vllm_would() -> None:
    def blocks(**asked: Any) -> tuple[int, ...]:
        return read_prompt(payload.parse(msgspec.json.encode(asked)).fields).blocks

    base = blocks(model="m", prompt="x" * 1000)
    assert len(base) == 1 + 1002 // BLOCK_BYTES
    assert blocks(model="m", prompt="x" * 1000, temperature=1.0) == base
    assert blocks(model="m", prompt="x" * 999 + "y")[:-1] == base[:-1]
    assert blocks(model="other", prompt="x" * 1000)[0] != base[0]
    assert blocks(model="m", prompt="x" * 1000, tools=[1])[0] != base[0]


def test_the_exercise_in_the_book_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING.md adds a policy in ten lines; here it is added and used."""
    (exercise,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in exercise.splitlines()) <= 10
    monkeypatch.setattr("proxy.routing.policies.POLICIES", dict(POLICIES))
    space: dict[str, Any] = {}
    exec(compile(exercise, "CONTRIBUTING.md", "exec"), space)
    added = next(c for c in space.values() if isinstance(c, type) and c.__base__ is Policy)
    instances = loaded(RoutingFleet(), 3, 1, 2)
    assert added(random.Random(1), PrefixTree(10)).choose(instances, Prompt()) in instances
