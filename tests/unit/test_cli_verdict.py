"""One wrong token, one token computed again or one byte too few is a failed demo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from p2p_engine.cli.client import CompletionAnswer
from p2p_engine.cli.demo import last_line, report
from p2p_engine.cli.tiny_model import TinyModel
from p2p_engine.cli.verdict import Moved, Shape, Verdict, judge, parse_samples
from p2p_engine.cli.workload import COMPLETIONS, Request, Workload

SHAPE = Shape(bytes_per_token=100, block_size=4)
REQUESTS = [
    Request("plain", COMPLETIONS, {}),
    Request("two", COMPLETIONS, {}, num_sequences=2),
]


def answers() -> list[CompletionAnswer]:
    return [
        CompletionAnswer({0: [7, 8, 9]}, {0: [1] * 9}, {0: "length"}, seconds_to_first=0.5),
        CompletionAnswer({0: [3], 1: [4]}, {0: [2] * 4, 1: [2]}, {0: "length", 1: "stop"}),
    ]


# Prompts of 9, 4 and 1 tokens: 3 + 1 + 1 blocks; vLLM counts the last as computed.
MOVED = Moved(cached_tokens=0, received_tokens=13, landed_bytes={"buffer": 1600, "pool": 400})


def verdict_of(answered: list[CompletionAnswer], moved: Moved = MOVED) -> Verdict:
    return judge("GET", REQUESTS, answers(), answered, moved=moved, shape=SHAPE)


def test_all_right() -> None:
    verdict = verdict_of(answers())
    assert verdict.failures == []
    assert verdict.num_identical == 2
    assert verdict.seconds_to_first == 0.5
    assert last_line([verdict]) == "2/2 identical, 0 recomputed, 2000 bytes transferred"


def change_token(answered: list[CompletionAnswer]) -> None:
    answered[0].tokens[0][2] ^= 1


def lose_sequence(answered: list[CompletionAnswer]) -> None:
    del answered[1].tokens[1]


def add_token(answered: list[CompletionAnswer]) -> None:
    answered[0].tokens[0].append(1)


def end_otherwise(answered: list[CompletionAnswer]) -> None:
    answered[1].endings[1] = "length"


def read_another_prompt(answered: list[CompletionAnswer]) -> None:
    answered[1].prompts[0][0] ^= 1


def fail(answered: list[CompletionAnswer]) -> None:
    answered[0].error = "HTTP 503: no decode instance"


def swap_sequences(answered: list[CompletionAnswer]) -> None:
    tokens = answered[1].tokens
    tokens[0], tokens[1] = tokens[1], tokens[0]


@pytest.mark.parametrize(
    "fault",
    [
        change_token,
        lose_sequence,
        add_token,
        end_otherwise,
        read_another_prompt,
        fail,
        swap_sequences,
    ],
)
def test_each_kind_of_wrong_answer_is_seen(fault: Callable[[list[CompletionAnswer]], None]) -> None:
    answered = copy.deepcopy(answers())
    fault(answered)
    verdict = verdict_of(answered)
    assert len(verdict.failures) == 1
    assert verdict.num_identical == 1


def test_two_failures_are_not_alike() -> None:
    """An instance that answers nothing must not agree with another one that answers nothing."""
    broken = [CompletionAnswer(error="HTTP 500"), CompletionAnswer(error="HTTP 500")]
    verdict = judge("GET", REQUESTS, broken, broken, moved=MOVED, shape=SHAPE)
    assert verdict.num_identical == 0


@pytest.mark.parametrize(
    ("moved", "failures"),
    [
        (Moved(0, 12, {"buffer": 2000}), ["1 prompt tokens were not transferred"]),
        (Moved(0, 13, {"buffer": 1999}), ["1999 bytes landed; the model's shape implies 2000"]),
        (Moved(0, 13, {"buffer": 2001}), ["2001 bytes landed; the model's shape implies 2000"]),
        (Moved(8, 5, {"buffer": 1200}), []),  # two blocks were known and not wanted
        (Moved(8, 5, {"buffer": 2000}), []),  # they were pushed all the same
        (Moved(8, 5, {"blocks": 1199}), ["1199 bytes landed; the model's shape implies 1200 to"]),
        (Moved(8, 13, {"buffer": 2000}), ["8 prompt tokens were not transferred"]),
        (Moved(0, 13, {"pool": 2000}, leftover_bytes=4), ["4 bytes are held after"]),
        (Moved(0, 0, {}), ["13 prompt tokens were not", "0 bytes landed"]),
    ],
)
def test_equal_tokens_prove_nothing_when_kv_was_not_moved(
    moved: Moved, failures: list[str]
) -> None:
    found = verdict_of(answers(), moved).failures
    assert len(found) == len(failures)
    assert all(said.startswith(expected) for said, expected in zip(found, failures, strict=True))


def test_the_exit_code_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    good = verdict_of(answers())
    bad = verdict_of(answers(), Moved(0, 12, {"buffer": 2000}))
    assert report([good], Console(width=160)) == 0
    assert report([good, bad], Console(width=160)) == 1
    said = capsys.readouterr().out.splitlines()
    assert "GET: 1 prompt tokens were not transferred" in said
    assert said[-1] == "4/4 identical, 1 recomputed, 4000 bytes transferred"
    assert "buffer 0.0 MB, pool 0.0 MB" in said[1]


PAGE = """
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 8.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 40.0
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 2.0
# TYPE vllm:p2p_landed_bytes counter
vllm:p2p_landed_bytes_total{engine="0",place="pool"} 64.0
# TYPE vllm:p2p_live_bytes gauge
vllm:p2p_live_bytes{engine="0",rank="0",place="pool"} 3.0
vllm:p2p_live_bytes{engine="0",rank="1",place="pool"} 4.0
# TYPE vllm:p2p_writing_seconds counter
vllm:p2p_writing_seconds_total{engine="0"} 1.5
"""


def test_counters_are_read_from_the_metrics_page() -> None:
    before = parse_samples(PAGE.replace("64.0", "60.0").replace(" 2.0", " 1.0"))
    after = parse_samples(PAGE)
    assert Moved.between([{}, before], [after, after]) == Moved(
        cached_tokens=0,
        received_tokens=1,
        landed_bytes={"blocks": 0, "buffer": 0, "pool": 4},
        leftover_bytes=14,
        writing_seconds=1.5,
    )


def workload(seed: int) -> list[Request]:
    return Workload("m", vocab_size=100, block_size=32, seed=seed).requests(36)


def prompts_of(request: Request) -> list[list[int]]:
    prompt: Any = request.body.get("prompt", [])
    return prompt if prompt and isinstance(prompt[0], list) else [prompt]


def test_the_same_seed_gives_the_same_requests() -> None:
    assert workload(1) == workload(1)
    assert workload(1) != workload(2)


def test_the_requests_are_varied() -> None:
    requests = workload(1)
    lengths = {len(prompt) for request in requests for prompt in prompts_of(request)}
    assert len({request.kind for request in requests}) == 12
    assert {request.is_stream for request in requests} == {True, False}
    assert {len(prompts_of(request)) for request in requests} >= {1, 3}
    assert {request.body.get("n", 1) for request in requests} == {1, 2}
    assert {1, 32, 129} <= lengths
    assert any(length > 512 for length in lengths)
    assert len({request.path for request in requests}) == 2


def test_a_known_prefix_is_one_of_an_earlier_prompt() -> None:
    requests = workload(3)
    longs = [prompts_of(request)[0] for request in requests if request.kind == "long"]
    known = [prompts_of(request)[0] for request in requests if request.kind == "known prefix"]
    assert len(known) == 3
    for long, prompt in zip(longs, known, strict=True):
        shared = sum(1 for a, b in zip(long, prompt, strict=False) if a == b)
        assert shared > 0
        assert prompt[: min(shared, 8)] == long[: min(shared, 8)]


def test_what_the_tiny_models_shape_implies() -> None:
    model = TinyModel(num_layers=8, num_kv_heads=4)
    assert model.kv_bytes_per_token(4) == 2 * 8 * 4 * 64 * 4
    assert model.path.name != TinyModel(seed=1).path.name
