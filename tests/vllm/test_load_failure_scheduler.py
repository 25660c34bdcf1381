"""Loads that fail: vLLM's scheduler and cache manager, our connector and engine, nothing mocked.

Each scenario is also held against connectors that are wrong on purpose, and must fail for each.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests.doubles.model import BLOCK
from tests.support import SeededRandom
from tests.upstream.raising import HookCalled, raising
from tests.vllm.instance import (
    CONNECTOR,
    HOST,
    TOKENS_PER_STEP,
    VllmInstance,
    distributed_environment,
)

pytestmark = pytest.mark.timeout(120)
PROMPT_TOKENS = 2 * TOKENS_PER_STEP + BLOCK + 3


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with distributed_environment(tmp_path_factory.mktemp("distributed")):
        yield


@dataclass
class VllmPair:
    """A prefill and a decode instance, and what they were asked."""

    prefill: VllmInstance
    decode: VllmInstance
    rng: SeededRandom

    def prompt(self) -> list[int]:
        return [self.rng.randrange(3, 900) for _ in range(PROMPT_TOKENS)]

    def start_decode(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Let decode wait for a prompt's KV; returns what the prefill leg is to be told."""
        transfer_id = uuid.UUID(int=self.rng.getrandbits(128)).hex
        params = {"transfer_id": transfer_id, "remote_host": HOST}
        loads = {"do_remote_prefill": True, "remote_port": self.prefill.kv_port, **params}
        request = self.decode.add(name, prompt, loads)
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.decode.step_until(lambda: request.status is waiting)
        return {"do_remote_decode": True, "remote_port": self.decode.kv_port, **params}

    def send_nothing(self, name: str, prompt: list[int]) -> None:
        """Let decode wait; prefill is asked, but its client leaves before anything is computed."""
        self.prefill.add(name, prompt, self.start_decode(name, prompt), max_tokens=1)
        self.prefill.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def send_part(self, name: str, prompt: list[int], *, and_die: bool = False) -> None:
        """Let decode wait; prefill sends what one step computes, and is then aborted or gone."""
        self.prefill.add(name, prompt, self.start_decode(name, prompt), max_tokens=1)
        self.prefill.step()
        self.decode.step_until(lambda: self.decode.holds(name, TOKENS_PER_STEP))
        if and_die:
            self.prefill.close()
        else:
            self.prefill.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def send_all(self, name: str, prompt: list[int]) -> None:
        self.prefill.add(name, prompt, self.start_decode(name, prompt), max_tokens=1)

    def step_until(self, condition: Callable[[], bool]) -> None:
        def both() -> bool:
            self.prefill.step()
            return condition()

        self.decode.step_until(both)

    def finish(self, name: str) -> FinishReason:
        """Step both until this request has ended on decode, and say how."""
        self.step_until(lambda: self.decode.finish_reason(name) is not None)
        return cast("FinishReason", self.decode.finish_reason(name))

    def local_tokens(self, prompt: list[int]) -> list[int]:
        """What one instance alone says: prefill, asked without any transfer."""
        name = f"local-{len(self.prefill.outputs)}"
        self.prefill.add(name, prompt)
        assert self.prefill.finish(name) is FinishReason.LENGTH
        return self.prefill.tokens(name)

    def check_nothing_is_left(self) -> None:
        """No block is held, and the prefix cache offers no block that holds something else."""
        self.step_until(lambda: not (self.decode.num_used_blocks or self.prefill.num_used_blocks))
        assert not self.decode.scheduler.requests
        assert not self.decode.wrong_cached_blocks()


MakePair = Callable[..., VllmPair]  # (failure policy, timeout in seconds)


@pytest.fixture
def make_pair(rng: SeededRandom) -> Iterator[MakePair]:
    """Make the pair for one policy; whatever was made is closed in the end."""
    model = ensure_tiny_model()
    made: list[VllmInstance] = []
    with PortPlan(HOST) as ports:

        def instance(kv_role: str, policy: str, timeout: float) -> VllmInstance:
            extra = {"transfer_timeout_seconds": timeout, "reset_keeps_weights": True}
            made.append(
                VllmInstance(
                    model, kv_role, ports.take(), failure_policy=policy, extra_config=extra
                )
            )
            return made[-1]

        def pair(policy: str, timeout: float = 60.0) -> VllmPair:
            prefill = instance("kv_producer", policy, timeout)
            return VllmPair(prefill, instance("kv_consumer", policy, timeout), rng)

        yield pair
        for each in made:
            each.close()


def prefill_never_hears_of_it_and_the_request_fails(make_pair: MakePair) -> None:
    pair = make_pair("fail", timeout=0.5)
    prompt = pair.prompt()
    pair.start_decode("lost", prompt)
    assert pair.finish("lost") is FinishReason.ERROR
    assert pair.decode.cached_tokens(prompt) == 0
    pair.check_nothing_is_left()


def nothing_arrives_and_the_request_fails(make_pair: MakePair) -> None:
    pair = make_pair("fail")
    prompt = pair.prompt()
    pair.send_nothing("lost", prompt)
    assert pair.finish("lost") is FinishReason.ERROR
    assert pair.decode.tokens("lost") == []
    assert pair.decode.cached_tokens(prompt) == 0
    pair.check_nothing_is_left()


def nothing_arrives_and_the_request_is_recomputed(make_pair: MakePair) -> None:
    pair = make_pair("recompute")
    prompt = pair.prompt()
    pair.send_nothing("lost", prompt)
    assert pair.finish("lost") is FinishReason.LENGTH
    assert pair.decode.tokens("lost") == pair.local_tokens(prompt)
    assert pair.decode.num_computed_tokens["lost"] == PROMPT_TOKENS + 3
    pair.check_nothing_is_left()


def part_arrives_and_the_request_fails(make_pair: MakePair) -> None:
    pair = make_pair("fail")
    prompt = pair.prompt()
    pair.send_part("cut", prompt)
    assert pair.finish("cut") is FinishReason.ERROR
    assert pair.decode.tokens("cut") == []
    assert pair.decode.cached_tokens(prompt) == 0
    pair.check_nothing_is_left()


def part_arrives_and_is_given_up_and_all_is_recomputed(make_pair: MakePair) -> None:
    """Who gives it up may mean that what it has sent is out of date."""
    pair = make_pair("recompute")
    prompt = pair.prompt()
    pair.send_part("cut", prompt)
    assert pair.finish("cut") is FinishReason.LENGTH
    assert pair.decode.tokens("cut") == pair.local_tokens(prompt)
    assert pair.decode.num_computed_tokens["cut"] == PROMPT_TOKENS + 3
    pair.check_nothing_is_left()


def part_arrives_from_who_dies_and_the_rest_is_recomputed(make_pair: MakePair) -> None:
    pair = make_pair("recompute")
    prompt = pair.prompt()
    expected = pair.local_tokens(prompt)
    assert pair.prefill.scheduler.reset_prefix_cache()
    pair.send_part("cut", prompt, and_die=True)
    assert pair.decode.finish("cut") is FinishReason.LENGTH
    assert pair.decode.tokens("cut") == expected
    missing = PROMPT_TOKENS - TOKENS_PER_STEP
    assert pair.decode.num_computed_tokens["cut"] == missing + 3
    assert not pair.decode.wrong_cached_blocks()


def invalid_blocks_are_of_the_failed_request_alone(make_pair: MakePair) -> None:
    pair = make_pair("recompute")
    cut, whole = pair.prompt(), pair.prompt()
    pair.send_part("cut", cut)
    pair.send_all("whole", whole)
    assert pair.finish("whole") is FinishReason.LENGTH
    assert pair.finish("cut") is FinishReason.LENGTH
    assert pair.decode.tokens("whole") == pair.local_tokens(whole)
    assert pair.decode.tokens("cut") == pair.local_tokens(cut)
    assert pair.decode.num_computed_tokens["whole"] == 1 + 3
    pair.check_nothing_is_left()


def a_failed_load_does_not_pollute_the_prefix_cache(make_pair: MakePair) -> None:
    pair = make_pair("fail")
    prompt = pair.prompt()
    pair.send_part("cut", prompt)
    pair.decode.add("meanwhile", prompt)  # the same prompt, while its blocks are being loaded
    assert pair.finish("cut") is FinishReason.ERROR
    assert pair.finish("meanwhile") is FinishReason.LENGTH
    pair.decode.add("after", prompt)
    assert pair.finish("after") is FinishReason.LENGTH
    expected = pair.local_tokens(prompt)
    assert pair.decode.tokens("meanwhile") == pair.decode.tokens("after") == expected
    assert pair.decode.num_computed_tokens["meanwhile"] == PROMPT_TOKENS + 3
    pair.check_nothing_is_left()


def an_error_reaches_its_client_and_nobody_else(make_pair: MakePair) -> None:
    pair = make_pair("fail")
    prompts = {name: pair.prompt() for name in ("lost", "running", "loaded")}
    pair.decode.add("running", prompts["running"], max_tokens=4)
    pair.send_nothing("lost", prompts["lost"])
    pair.send_all("loaded", prompts["loaded"])
    assert pair.finish("lost") is FinishReason.ERROR
    (only,) = pair.decode.outputs["lost"]
    assert only.new_token_ids == []
    for name in ("running", "loaded"):
        assert pair.finish(name) is FinishReason.LENGTH
        assert pair.decode.tokens(name) == pair.local_tokens(prompts[name])
    pair.check_nothing_is_left()


SCENARIOS = (
    prefill_never_hears_of_it_and_the_request_fails,
    nothing_arrives_and_the_request_fails,
    nothing_arrives_and_the_request_is_recomputed,
    part_arrives_and_the_request_fails,
    part_arrives_and_is_given_up_and_all_is_recomputed,
    part_arrives_from_who_dies_and_the_rest_is_recomputed,
    invalid_blocks_are_of_the_failed_request_alone,
    a_failed_load_does_not_pollute_the_prefix_cache,
    an_error_reaches_its_client_and_nobody_else,
)
Scenario = Callable[[MakePair], None]


def concealing(connector: type[Any]) -> type[Any]:
    """Return a connector that reports a load as done whether or not its bytes are there."""

    def get_transfer_results(self: Any, finished_req_ids: set[str]) -> Any:
        results = connector.get_transfer_results(self, finished_req_ids)
        results.failed_recving = set()
        return results

    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        connector.get_block_ids_with_load_errors(self)
        return set()

    hooks = {hook.__name__: hook for hook in (get_transfer_results, get_block_ids_with_load_errors)}
    return type(connector.__name__, (connector,), hooks)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_load_failure(scenario: Scenario, make_pair: MakePair) -> None:
    scenario(make_pair)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("broken", [raising, concealing])
def test_scenario_fails_for_a_wrong_connector(
    scenario: Scenario,
    broken: Callable[[type[Any]], type[Any]],
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = broken(KVConnectorFactory.get_connector_class_by_name(CONNECTOR))
    monkeypatch.setitem(KVConnectorFactory._registry, CONNECTOR, lambda: connector)
    with pytest.raises((AssertionError, HookCalled)):
        scenario(make_pair)
