"""Every router's requests, played to two simulated instances with real engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from p2p_engine.transfer_config import NIXL_NAME
from tests import marks
from tests.doubles.clock import Clock
from tests.doubles.instance import BLOCK_SIZE, continuation
from tests.doubles.pair import HOST, MakePair, Pair, prompt_of
from tests.doubles.routers import (
    AibrixNixl,
    AibrixShfs,
    LlmdCoordinator,
    LlmdMooncake,
    LlmdMoriio,
    LlmdMoriioAtOnce,
    LlmdNextTurn,
    LlmdNixlPush,
    LlmdSidecar,
    ProductionStack,
    ProductionStackPassingIds,
    Served,
    SmgMooncake,
    SmgMoriio,
    SmgMoriioAtOnce,
    SmgNixl,
    SmgUnlabelled,
    VllmRouterAtUrls,
    VllmRouterDiscovery,
)

pytestmark = marks.simulated_vllm

LENGTHS = (1, BLOCK_SIZE + 1, 100)
PULLED = [
    *(LlmdSidecar, LlmdCoordinator, LlmdNixlPush, LlmdNextTurn, VllmRouterAtUrls),
    *(ProductionStack, ProductionStackPassingIds, AibrixShfs, SmgNixl),
]
PUSHED = [LlmdMoriio, LlmdMoriioAtOnce, VllmRouterDiscovery, SmgMoriio, SmgMoriioAtOnce]
COMPUTED = [AibrixNixl, SmgUnlabelled, LlmdMooncake, SmgMooncake]


def play(pair: Pair, router: type[LlmdSidecar]) -> list[dict[str, Any] | None]:
    """Ask for a prompt of each length by this router; what prefill answered."""
    memory: dict[str, Any] = {}
    answers = [_play_one(pair, router, length, memory) for length in LENGTHS]
    pair.run(lambda: all(name in pair.d.finished for name in pair.decode_ids))
    return answers


def _play_one(
    pair: Pair, kind: type[LlmdSidecar], length: int, memory: dict[str, Any]
) -> dict[str, Any] | None:
    router, prompt = kind(*_served(pair), memory), prompt_of(length, seed=length)
    external_id = router.headers["X-Request-Id"]
    prefill_id, decode_id = (f"cmpl-{external_id}-0-0000000{leg}" for leg in "ab")

    def add_decode(answer: dict[str, Any] | None) -> None:
        body = router.decode_body({}, answer)
        pair.d.add(decode_id, prompt, params=_sent(body))
        pair.expect(decode_id, prompt)

    if router.is_concurrent:
        add_decode(None)
    answered = _ask_prefill(pair, router, prefill_id, prompt)
    router.take_answer(answered)
    if not router.is_concurrent:
        add_decode({"kv_transfer_params": answered})
    return answered


def _served(pair: Pair) -> tuple[Served, Served]:
    return Served("127.0.0.1:1", pair.p.address), Served("127.0.0.1:2", pair.d.address)


def _ask_prefill(
    pair: Pair, router: LlmdSidecar, request_id: str, prompt: list[int]
) -> dict[str, Any] | None:
    """What prefill answers when the prompt is computed."""
    pair.p.add(request_id, prompt, max_tokens=1, params=_sent(router.prefill_body({})))
    pair.run(lambda: request_id in pair.p.finished)
    return pair.p.params.get(request_id)


def _sent(body: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters as they arrive."""
    params: dict[str, Any] | None = json.loads(json.dumps(body)).get("kv_transfer_params")
    return params


@pytest.mark.parametrize("router", [*PULLED, *PUSHED])
def test_kv_moves_and_is_not_computed_again(make_pair: MakePair, router: type[LlmdSidecar]) -> None:
    nobody = {"proxy_ip": HOST, "proxy_port": 9, "http_port": 1}
    pair = make_pair(**(nobody if router.is_told_by_heartbeats else {}))
    answers = play(pair, router)
    pair.check_answers(num_computed=1)
    how = {answer["transfer_mode"] for answer in answers if answer is not None}
    assert how == {"push" if router in PUSHED else "pull"}
    pair.run()
    pair.check_at_rest()


@pytest.mark.parametrize("router", [LlmdSidecar, SmgNixl, LlmdMoriio])
@pytest.mark.parametrize("named", [("prefill", "decode"), ("prefill",), ("decode",)])
def test_kv_moves_under_nixls_name(
    make_pair: MakePair, router: type[LlmdSidecar], named: tuple[str, ...]
) -> None:
    """Of both instances, or of one."""
    under = {"connector": NIXL_NAME, "kv_lease_duration": 30, "backends": ["UCX"]}
    pair = make_pair(**dict.fromkeys(named, under))
    play(pair, router)
    pair.check_answers(num_computed=1)
    pair.run()
    pair.check_at_rest()


@pytest.mark.parametrize("attention", ["full", "mixed", "states"])
@pytest.mark.parametrize("router", [LlmdSidecar, LlmdMoriio])
def test_a_prompt_that_goes_on_with_prefills_is_loaded_as_far_as_that(
    make_pair: MakePair, router: type[LlmdSidecar], attention: str
) -> None:
    """LMCache's proxy puts prefill's first token behind the prompt."""
    pair = make_pair(attention=attention, policy="fail", has_prefix_cache=False)
    names = []
    for length in (BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 100):
        prompt = prompt_of(length)
        asked = router(*_served(pair), {})
        request_id = f"cmpl-{asked.headers['X-Request-Id']}-0-000000"
        answered = _ask_prefill(pair, asked, f"{request_id}0a", prompt)
        params = _sent(asked.decode_body({}, {"kv_transfer_params": answered}))
        longer = [*prompt, *continuation(prompt, 1)]
        names.append(f"{request_id}0b")
        pair.d.add(names[-1], longer, params=params)
        pair.expect(names[-1], longer)
        pair.run()
    pair.check_answers()
    pair.check_at_rest()
    computed = [pair.d.num_computed_prompt_tokens[name] for name in names]
    assert computed == [1 if attention == "full" else 2] * 3


@pytest.mark.parametrize("router", COMPUTED)
def test_decode_computes_what_nobody_would_send_to_it(
    make_pair: MakePair, router: type[LlmdSidecar], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="p2p_engine")
    pair = make_pair(lease_seconds=1)
    play(pair, router)
    pair.check_answers()
    assert pair.landed_bytes() == 0
    refused = [text for text in caplog.messages if "remote_bootstrap_addr" in text]
    assert len(refused) == issubclass(router, LlmdMooncake)
    pair.run()  # until the leases of what prefill holds for nobody have ended
    pair.check_at_rest()


# What proxies of their own tell prefill, and decode.
OWN_PROXIES = {
    "a counter": ("{both}_17", "{both}_17"),
    "a dashed UUID": ("{both}_{uuid}", "{both}_{uuid}"),
    "a client's before": ("client_req_{uuid}{both}_1", "client_req_{uuid}{both}_1"),
    "Ray's replicas": ("{both}___prefill_replica_id_a___rid_1",) * 2,
    "halves": ("{uuid}___decode_addr_{d}", "{uuid}___prefill_addr_{p}___"),
}


@pytest.mark.parametrize("legs", OWN_PROXIES.values(), ids=OWN_PROXIES)
@pytest.mark.parametrize("form", ["cmpl-{}-0", "chatcmpl-{}", "{}_0"])
def test_any_id_that_names_the_instances_moves_kv(
    make_pair: MakePair, legs: tuple[str, str], form: str
) -> None:
    pair, prompt = make_pair(), prompt_of(100)
    p, d = pair.p.address, pair.d.address
    both = f"___prefill_addr_{p}___decode_addr_{d}"
    uuid = "93923d63-113b-4b33-8973-f24d19d4bf11"
    ids = [form.format(leg.format(both=both, uuid=uuid, p=p, d=d)) for leg in legs]
    pair.p.add(f"{ids[0]}-0000000a", prompt, max_tokens=1)
    pair.d.add(f"{ids[1]}-0000000b", prompt)
    pair.expect(f"{ids[1]}-0000000b", prompt)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_a_pair_that_moves_no_kv_says_so(make_pair: MakePair) -> None:
    """Its router says nothing of the other instance, until it is mended."""
    pair, clock, told = make_pair(), Clock(), list[str]()
    for half in (pair.p.connector._scheduler, pair.d.connector._scheduler):
        assert half is not None
        half.untransferred._clock, half.untransferred.tell = clock, told.append
    for number in range(3):
        prompt = prompt_of(100, number)
        pair.p.add(f"cmpl-{number}-0-0000000a", prompt, max_tokens=1)
        pair.d.add(f"cmpl-{number}-0-0000000b", prompt)
        clock.now += 40
    pair.run()
    assert len(told) == 2
    for warning in told:
        assert warning.startswith("no KV has moved for 80 s; requests: 3 with neither")
    assert pair.d.stats["p2p_untransferred_requests"] == {"no_id": 3}
    for seed in (4, 5):
        pair.ask(prompt_of(100, seed))
        pair.run()
        clock.now += 80
    assert told[2:] == ["", ""]


@pytest.mark.parametrize("kind", ["cmpl-{}-0", "generate-tokens-{}"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_choices_that_prefill_was_not_asked_for_are_computed(
    make_pair: MakePair, kind: str, send_type: str
) -> None:
    """llm-d's coordinator asks prefill for one choice, and decode for as many as the client."""
    pair, prompt = make_pair(send_type=send_type), prompt_of(100)
    router = LlmdCoordinator(*_served(pair))
    request_id = kind.format(router.request_id)
    answered = _ask_prefill(pair, router, f"{request_id}-0000000a", prompt)
    names = [f"{child}_{request_id}-0000000b" for child in range(2)]
    for name in names:
        params = _sent(router.decode_body({}, {"kv_transfer_params": answered}))
        pair.d.add(name, prompt, params=params)
        pair.expect(name, prompt)
    pair.run()
    pair.check_answers()
    num_computed = [pair.d.num_computed_prompt_tokens[name] for name in names]
    assert num_computed == [1, 100]
    pair.check_at_rest()


@pytest.mark.parametrize("kind", ["cmpl-{}-0", "generate-tokens-{}"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_prompts_that_share_a_request_id_are_all_loaded(
    make_pair: MakePair, kind: str, send_type: str
) -> None:
    """A router, or its client, may ask for each prompt of a request by itself, with one id. Prefill
    and decode have not met before."""
    pair, prompts = make_pair(send_type=send_type), [prompt_of(100, seed) for seed in range(4)]
    router = LlmdSidecar(*_served(pair))
    stem = f"{kind.format(router.request_id)}-0000000"
    answers = [
        _ask_prefill(pair, router, f"{stem}{number}", prompt)
        for number, prompt in enumerate(prompts)
    ]
    for number, (prompt, answered) in enumerate(zip(prompts, answers, strict=True), 4):
        params = _sent(router.decode_body({}, {"kv_transfer_params": answered}))
        pair.d.add(f"{stem}{number}", prompt, params=params)
        pair.expect(f"{stem}{number}", prompt)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_each_choice_that_prefill_was_asked_for_is_loaded(
    make_pair: MakePair, send_type: str
) -> None:
    """Whichever of prefill's answers vLLM passes on."""
    pair, prompt = make_pair(send_type=send_type), prompt_of(100)
    router = ProductionStack(*_served(pair))
    kind = f"cmpl-{router.request_id}-0-0000000"
    answers = [_ask_prefill(pair, router, f"{child}_{kind}a", prompt) for child in range(2)]
    for child in range(2):
        params = _sent(router.decode_body({}, {"kv_transfer_params": answers[1 - child]}))
        pair.d.add(f"{child}_{kind}b", prompt, params=params)
        pair.expect(f"{child}_{kind}b", prompt)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_a_salt_that_prefill_was_not_told_is_decodes_alone(
    make_pair: MakePair, send_type: str
) -> None:
    """llm-d's coordinator asks prefill without the client's `cache_salt`: what it answers was
    computed behind no salt. Decode loads it, and its cache keeps it behind the salt."""
    pair, prompt = make_pair(send_type=send_type), prompt_of(100)
    router = LlmdCoordinator(*_served(pair))
    request_id = f"cmpl-{router.request_id}-0-0000000"
    answered = _ask_prefill(pair, router, f"{request_id}a", prompt)
    params = _sent(router.decode_body({}, {"kv_transfer_params": answered}))
    for name, salt, given in (("b", "red", params), ("c", "red", None), ("d", "blue", None)):
        pair.d.add(request_id + name, prompt, cache_salt=salt, params=given)
        pair.expect(request_id + name, prompt)
        pair.run()
    pair.check_answers()
    computed = [pair.d.num_computed_prompt_tokens[request_id + name] for name in "bcd"]
    assert computed == [1, 100 % BLOCK_SIZE, 100]
    pair.check_at_rest()


@pytest.mark.parametrize("said", [True, False], ids=["lied to", "told"])
@pytest.mark.parametrize("salt", [None, "blue"])
def test_salted_kv_goes_to_its_salt_only(make_pair: MakePair, salt: str | None, said: bool) -> None:
    """Whatever decode is told of it."""
    pair, prompt = make_pair(transfer_timeout_seconds=1, lease_seconds=1), prompt_of(100)
    router = LlmdSidecar(*_served(pair))
    request_id = f"cmpl-{router.request_id}-0-0000000"
    params = _sent(router.prefill_body({}))
    pair.p.add(f"{request_id}a", prompt, max_tokens=1, params=params, cache_salt="red")
    pair.run(lambda: f"{request_id}a" in pair.p.finished)
    answered = {**(pair.p.params[f"{request_id}a"] or {}), "is_unsalted": said}
    pair.d.add(f"{request_id}b", prompt, params=answered, cache_salt=salt)
    pair.run()
    assert pair.d.finished[f"{request_id}b"] is RequestStatus.FINISHED_ERROR
    assert pair.landed_bytes() == 0


@pytest.mark.parametrize("router", [LlmdMoriio, LlmdMoriioAtOnce])
def test_a_data_parallel_rank_is_found_behind_the_port_of_the_first(
    make_pair: MakePair, router: type[LlmdMoriio]
) -> None:
    """Both instances stand for the third of their ranks, so the first has a port two below."""

    class ToThirdRank(router):  # type: ignore[misc, valid-type]
        num_ranks, rank = 4, 2

        def __init__(self, prefill: Served, decode: Served, memory: dict[str, Any]) -> None:
            firsts = (
                Served(side.http_address, f"{side.host}:{side.kv_port - 2}")
                for side in (prefill, decode)
            )
            super().__init__(*firsts, memory)

    pair = make_pair()
    answers = play(pair, ToThirdRank)
    pair.check_answers(num_computed=1)
    assert {answer["transfer_mode"] for answer in answers if answer is not None} == {"push"}
    pair.run()
    pair.check_at_rest()
