"""The core of what the connector promises, on one real prefill and one real decode instance."""

from __future__ import annotations

import json
import random
import secrets
import urllib.error
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.request_ids import ProxyId, new_transfer_id
from tests import marks
from tests.compat.fleet import VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all, mixed_questions
from tests.support import eventually
from tests.vllm.observing import by_label, holds_nothing, prompt_tokens

BOOT_SECONDS = 600.0
SEED = 31

pytestmark = [marks.vllm_core, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class SideBySide:
    """One of each, side by side."""

    fleet: Fleet
    single: Member
    prefill: Member
    decode: Member

    @property
    def proxy_url(self) -> str:
        assert self.fleet.proxy is not None
        return self.fleet.proxy.url

    @property
    def request_id(self) -> str:
        """A new id of the old scheme that names both instances."""
        plans = self.prefill.plan, self.decode.plan
        assert plans[0] is not None
        assert plans[1] is not None
        return str(ProxyId(plans[0].kv_address, plans[1].kv_address, new_transfer_id()))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SideBySide]:
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=(*VLLM_ARGS, "--max-num-batched-tokens=256"),  # long prompts leave in chunks
        transfer_config={EXTRA: {"connect_timeout_seconds": 2, "transfer_timeout_seconds": 20}},
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with fleet:
        fleet.start_proxy()
        members = [
            fleet.start(role) for role in (MemberRole.SINGLE, MemberRole.PREFILL, MemberRole.DECODE)
        ]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield SideBySide(fleet, *members)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return mixed_questions(str(ensure_tiny_model()), SEED)


@pytest.fixture(scope="module")
def expected(servers: SideBySide, questions: list[Question]) -> list[Answer]:
    return ask_all(servers.single.url, questions, concurrency=4)


def test_every_token_comes_from_transferred_kv(
    servers: SideBySide, questions: list[Question], expected: list[Answer]
) -> None:
    before = prompt_tokens(servers.decode)
    assert ask_all(servers.proxy_url, questions, concurrency=4) == expected
    tokens = prompt_tokens(servers.decode) - before
    assert tokens["external_kv_transfer"] > 0
    assert tokens["local_compute"] == sum(question.num_lone_tokens for question in questions)
    _assert_nothing_left(servers)


def test_prompts_that_both_sides_know_give_the_same_tokens(
    servers: SideBySide, questions: list[Question], expected: list[Answer]
) -> None:
    before = prompt_tokens(servers.decode)
    assert ask_all(servers.proxy_url, questions, concurrency=4) == expected
    tokens = prompt_tokens(servers.decode) - before
    assert tokens["local_cache_hit"] > 0
    assert tokens["local_compute"] == sum(question.num_lone_tokens for question in questions)


def test_an_id_of_the_old_scheme_is_enough(servers: SideBySide) -> None:
    for question in mixed_questions(str(ensure_tiny_model()), SEED + 1):
        before = prompt_tokens(servers.decode)
        answer = _ask_both(servers, question, servers.request_id)
        assert answer == ask(servers.single.url, question)
        tokens = prompt_tokens(servers.decode) - before
        assert tokens["local_compute"] == question.num_lone_tokens


def test_both_legs_may_be_sent_at_once(servers: SideBySide) -> None:
    questions = mixed_questions(str(ensure_tiny_model()), SEED + 2)
    before = prompt_tokens(servers.decode)
    with ThreadPoolExecutor(1) as pool:
        for question in questions:
            request_id = servers.request_id
            later = pool.submit(ask, servers.decode.url, question, {"X-Request-Id": request_id})
            ask(servers.prefill.url, _prefill_leg(question), {"X-Request-Id": request_id})
            assert later.result(timeout=120) == ask(servers.single.url, question)
    tokens = prompt_tokens(servers.decode) - before
    assert tokens["local_compute"] == sum(question.num_lone_tokens for question in questions)
    _assert_nothing_left(servers)


def test_prompts_under_one_id_of_a_client_are_all_transferred(servers: SideBySide) -> None:
    """Some in one list, and some in requests of their own at the same time."""
    [question, *_] = mixed_questions(str(ensure_tiny_model()), SEED + 7)
    texts = [f"tell me of {number} ships and of the sea" for number in range(6)]
    lists = [_with(question, prompt=each) for each in (texts[:3], texts[3:], *texts)]
    before = prompt_tokens(servers.decode)
    with ThreadPoolExecutor(len(lists)) as pool:
        headers = {"X-Request-Id": "mine"}
        asked = [pool.submit(ask, servers.proxy_url, each, headers) for each in lists]
        answers = [each.result() for each in asked]
    assert [len(answer) for answer in answers] == [3, 3, *6 * [1]]
    assert answers == ask_all(servers.single.url, lists, concurrency=4)
    assert (prompt_tokens(servers.decode) - before)["local_compute"] == 0
    _assert_nothing_left(servers)


def test_a_seed_gives_the_same_samples(servers: SideBySide) -> None:
    [question, *_] = mixed_questions(str(ensure_tiny_model()), SEED + 6)[2:]
    sampled = _with(question, temperature=1.0, seed=SEED, n=2)
    answer = ask(servers.proxy_url, sampled)
    assert answer == ask(servers.single.url, sampled)
    assert answer[0] != answer[1]


def test_a_request_without_transfer_data_is_computed_locally(
    servers: SideBySide, questions: list[Question], expected: list[Answer]
) -> None:
    for member in (servers.prefill, servers.decode):
        assert ask_all(member.url, questions, concurrency=4) == expected


def test_kv_that_never_comes_fails_the_one_request_by_its_deadline(servers: SideBySide) -> None:
    [question, *_] = mixed_questions(str(ensure_tiny_model()), SEED + 3)[3:]
    params = {
        "do_remote_prefill": True,
        "transfer_id": secrets.token_hex(16),
        "remote_host": "127.0.0.1",
        "remote_port": 9,
    }
    with pytest.raises(urllib.error.HTTPError) as refusal:
        ask(servers.decode.url, _with(question, kv_transfer_params=params))
    assert refusal.value.code == 500
    refusal.value.close()
    answer = _ask_both(servers, question, servers.request_id)
    assert answer == ask(servers.single.url, question)


def test_a_replayed_id_never_swaps_kv(servers: SideBySide) -> None:
    """The same id for different prompts: an error, or the right tokens, never another's."""
    asked = mixed_questions(str(ensure_tiny_model()), SEED + 4)[3:7]
    request_id = servers.request_id
    with ThreadPoolExecutor(len(asked)) as pool:
        outcomes = [pool.submit(_try_both, servers, question, request_id) for question in asked]
    for question, outcome in zip(asked, outcomes, strict=True):
        assert outcome.result() in (None, ask(servers.single.url, question))
    fresh = _ask_both(servers, asked[0], servers.request_id)
    assert fresh == ask(servers.single.url, asked[0])


def test_no_client_can_end_an_instance(servers: SideBySide) -> None:
    source = random.Random(SEED)
    [question, *_] = mixed_questions(str(ensure_tiny_model()), SEED + 5)[2:]
    expected = ask(servers.single.url, question)
    outcomes: Counter[str] = Counter()
    for _ in range(60):
        body = _with(question, kv_transfer_params=_nonsense(source))
        member = source.choice((servers.prefill, servers.decode))
        headers = {"X-Request-Id": _nonsense_id(source, servers.request_id)}
        try:
            outcomes["answered"] += ask(member.url, body, headers) == expected
        except urllib.error.HTTPError as error:
            outcomes[f"status {error.code}"] += 1
            error.close()
    servers.fleet.check()
    assert _ask_both(servers, question, servers.request_id) == expected
    assert outcomes["answered"] > 0


def _nonsense(source: random.Random) -> Any:
    values: list[Any] = [
        *(None, True, False, 0, -1, 1 << 70, 3.5, "", "x" * 5000, "127.0.0.1", "\x00", [], {}),
        *([[1, 2], [3]], {"a": {"b": []}}, "PUT", "GET", "DELETE", 14579, "99999"),
    ]
    names = [
        *("do_remote_prefill", "do_remote_decode", "transfer_id", "remote_host", "remote_port"),
        *("remote_request_id", "remote_block_ids", "remote_engine_id", "tp_size", "send_type"),
        *("remote_handshake_port", "remote_bootstrap_addr", "transfer_mode"),
    ]
    params = {name: source.choice(values) for name in source.sample(names, source.randrange(9))}
    if source.random() < 0.5:  # flags that are right, so that the rest is looked at
        params["do_remote_prefill"], params["do_remote_decode"] = source.choice(
            [(True, False), (False, True), (True, True)]
        )
        params["remote_host"], params["remote_port"] = "127.0.0.1", source.choice([1, 9, "9"])
    return params


def _nonsense_id(source: random.Random, good: str) -> str:
    return source.choice(
        [
            good,
            good[:-1],
            good + ":99",
            good.replace("127", "[::1"),
            "cmpl-cmpl-0-0",
            "_" * 300,
            "7",
        ]
    )


def _prefill_leg(question: Question) -> Question:
    return _with(question, max_tokens=1, stream=False)


def _ask_both(servers: SideBySide, question: Question, request_id: str) -> Answer:
    """As an old proxy does: only the header, prefill first."""
    headers = {"X-Request-Id": request_id}
    ask(servers.prefill.url, _prefill_leg(question), headers)
    return ask(servers.decode.url, question, headers)


def _try_both(servers: SideBySide, question: Question, request_id: str) -> Answer | None:
    try:
        return _ask_both(servers, question, request_id)
    except urllib.error.HTTPError as error:
        error.close()
        return None


def _with(question: Question, **changes: Any) -> Question:
    body: Mapping[str, Any] = {**json.loads(json.dumps(question.body)), **changes}
    return Question(question.path, body, question.num_prompts)


def _assert_nothing_left(servers: SideBySide) -> None:
    for member in (servers.prefill, servers.decode):
        eventually(lambda member=member: holds_nothing(member), 30, member.name)  # type: ignore[misc]
    assert by_label(servers.decode, "vllm:p2p_landed_bytes", "place")["buffer"] > 0
