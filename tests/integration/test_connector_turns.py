"""A session's turns: what is there already is not sent, and what decode has computed comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from p2p_engine.bounded import Budget, Notes
from p2p_engine.errors import ConfigError
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles.instance import BLOCK_SIZE, continuation
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.support import eventually

pytestmark = marks.simulated_vllm

ANSWER = 50
TURNS: dict[str, Any] = {
    "prefill_role": "kv_both", "policy": "recompute", "stash_seconds": 60.0, "num_blocks": 300,
}  # fmt: skip


@pytest.mark.parametrize(
    ("send_type", "order"),
    [("GET", "prefill first"), ("GET", "decode first"), ("PUT", "decode first"),
     ("PUT_ASYNC", "decode first")],
)  # fmt: skip
def test_what_decode_has_is_not_sent_again(make_pair: MakePair, send_type: str, order: str) -> None:
    """With PUT, if decode has asked before: else prefill cannot know what it has."""
    pair = make_pair(send_type=send_type)
    prompt = prompt_of(10 * BLOCK_SIZE)
    sent = []
    for length in (4, 7, 10):
        before = pair.landed_bytes()
        pair.ask(prompt[: length * BLOCK_SIZE], order=order, by="params")
        pair.run()
        sent.append((pair.landed_bytes() - before) // pair.block_bytes)
    # vLLM computes the last token again, so it never takes a prompt's last block from its cache.
    assert sent == [4, 3, 3]
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


class Chat:
    """Turns of one session: each prompt is all that was said before, and something new."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.said: list[int] = []
        self.last: str | None = None

    def turn(self, num_new: int = 60, max_tokens: int = ANSWER, **more: Any) -> str:
        """Ask; returns prefill's request."""
        self.said += prompt_of(num_new, len(self.said))
        name = new_transfer_id()
        decode_id = self.pair.ask(
            self.said, by="params", max_tokens=max_tokens, transfer_id=name, earlier=self.last,
            order="prefill first", more={"stash": True}, **more,
        )  # fmt: skip
        prefill_id = self.pair.prefill_ids[-1]
        self.pair.run()
        assert self.pair.d.params[decode_id] is None  # who asks for it knows where it is
        self.said += continuation(self.said, max_tokens)
        self.last = name
        return prefill_id

    def end(self) -> None:
        """Let go what is stashed."""
        for instance in (self.pair.p, self.pair.d):
            instance.scheduler.reset_prefix_cache(reset_connector=True)
            instance.step()
        self.pair.run()
        self.pair.check_at_rest()


def computed(pair: Pair, prefill_id: str) -> int:
    return pair.p.num_computed_prompt_tokens[prefill_id]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_prefill_computes_only_what_nobody_has(
    make_pair: MakePair, send_type: str, is_async: bool
) -> None:
    pair = make_pair(send_type=send_type, is_async=is_async, **TURNS)
    session = Chat(pair)
    session.turn()
    for _ in range(4):
        num_before = len(session.said)
        name = session.turn()
        # All whole blocks but the one that the answer's last token, or the next, completes.
        shared = (num_before - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert computed(pair, name) == num_before + 60 - shared
        assert pair.d.is_idle  # no step is needed while a stash waits
    pair.check_answers(num_computed=1)
    session.end()


def test_what_prefill_has_evicted_comes_back(make_pair: MakePair) -> None:
    pair = make_pair(**TURNS, prefill={"num_blocks": 30})
    session = Chat(pair)
    session.turn(200)
    for seed in range(3):
        pair.ask(prompt_of(400, seed))
    pair.run()
    assert computed(pair, session.turn()) < 60 + 2 * BLOCK_SIZE
    pair.check_answers()
    session.end()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({"tp_size": 2}, {}), ({}, {"tp_size": 2}), ({"block_size": 32}, {}), ({}, {"block_size": 32}),
     ({}, {"pp_size": 2}), ({"attention": "latent"}, {"attention": "latent"})],
    ids=str,
)  # fmt: skip
def test_instances_that_differ(
    make_pair: MakePair, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    pair = make_pair(**TURNS, prefill=prefill, decode=decode)
    session = Chat(pair)
    session.turn(100)
    assert computed(pair, session.turn()) <= 60 + 2 * 32
    pair.check_answers()
    session.end()


def test_only_what_both_prompts_share_comes(make_pair: MakePair) -> None:
    """The client has changed the answer, or its template has written it otherwise."""
    pair = make_pair(**TURNS)
    session = Chat(pair)
    session.turn(160, max_tokens=160)
    session.said[200] += 1
    num_said = len(session.said)
    name = session.turn()
    # The next cut before token 200 of 319: at the prompt's end, or half of what differs before.
    assert num_said + 60 - 200 <= computed(pair, name) <= num_said + 60 - 160
    pair.check_answers()
    session.end()


def test_another_prompt_under_a_sessions_name_gets_nothing(make_pair: MakePair) -> None:
    pair = make_pair(**TURNS)
    session = Chat(pair)
    session.turn(160)
    session.said = prompt_of(150, seed=7)
    assert computed(pair, session.turn(50)) == 200
    pair.check_answers()
    session.end()


def test_a_router_of_nixl_passes_on_what_decode_answers(make_pair: MakePair) -> None:
    pair = make_pair(send_type="GET", **TURNS)
    prompt = prompt_of(100)
    first = pair.ask(prompt, by="params", max_tokens=ANSWER)
    pair.run()
    told = pair.d.params[first]
    assert told is not None
    assert told["do_remote_decode"]
    prompt += continuation(prompt, ANSWER) + prompt_of(30)
    pair.p.add("0_cmpl-next-0-0000000a", prompt, max_tokens=1, params=dict(told))
    pair.run(lambda: "0_cmpl-next-0-0000000a" in pair.p.params)
    assert pair.p.num_computed_prompt_tokens["0_cmpl-next-0-0000000a"] < 30 + 2 * BLOCK_SIZE
    kept = pair.p.params["0_cmpl-next-0-0000000a"]
    assert kept is not None
    pair.d.add("0_cmpl-next-0-0000000b", prompt, max_tokens=4, params={**kept, "stash": False})
    pair.run()
    assert pair.d.answers["0_cmpl-next-0-0000000b"] == continuation(prompt, 4)
    pair.check_at_rest()


def _evict(pair: Pair) -> None:
    """Decode gives its stashes up, and its directory does not know it."""
    for rank in pair.d.ranks:
        holds = rank.connector._worker.engine._parts.holds  # type: ignore[union-attr]
        for transfer in list(holds._by_transfer):
            transfer.cancel("evicted")


def _close(pair: Pair) -> None:
    """Decode's engines end, and its directory answers still."""
    for rank in pair.d.ranks:
        rank.connector.shutdown()


def _silence(pair: Pair) -> None:
    directory = pair.d.connector._directory
    assert directory is not None
    directory.close()


@pytest.mark.parametrize("loss", [_evict, _close, _silence])
def test_what_is_lost_is_computed_again(make_pair: MakePair, loss: Callable[[Pair], None]) -> None:
    pair = make_pair(**TURNS, connect_timeout_seconds=0.5, peer_timeout_seconds=1.0)
    session = Chat(pair)
    session.turn(100)
    loss(pair)
    prompt = [*session.said, *prompt_of(40)]
    host, _, port = pair.d.address.rpartition(":")
    earlier = {"stashed_as": session.last, "stashed_host": host, "stashed_port": int(port)}
    params = {"do_remote_decode": True, "transfer_id": "next", **earlier}
    pair.p.add("0_cmpl-next-0-0000000a", prompt, max_tokens=1, params=params)
    pair.run(lambda: "0_cmpl-next-0-0000000a" in pair.p.params, only=pair.p)
    assert pair.p.answers["0_cmpl-next-0-0000000a"] == continuation(prompt, 1)
    assert pair.p.num_computed_prompt_tokens["0_cmpl-next-0-0000000a"] > 40 + ANSWER // 2


@pytest.mark.parametrize("num_steps", range(6))
def test_a_turn_that_is_aborted_while_it_recalls_leaves_nothing(
    make_pair: MakePair, num_steps: int
) -> None:
    pair = make_pair(**TURNS)
    session = Chat(pair)
    session.turn(100)
    pair.ask([*session.said, *prompt_of(40)], by="params", earlier=session.last,
             order="prefill first")  # fmt: skip
    for _ in range(num_steps):
        pair.p.step()
    pair.p.abort(pair.prefill_ids[-1])
    pair.drop_waiting()
    pair.run()
    session.end()
    pair.check_finished()


def test_preempted_turns_are_right(make_pair: MakePair) -> None:
    pair = make_pair(**TURNS | {"num_blocks": 60})
    sessions = [Chat(pair) for _ in range(3)]
    for _ in range(3):
        for session in sessions:
            session.turn(60 + random.Random(len(session.said)).randrange(20))
    for seed in range(12):
        pair.ask(prompt_of(100 + 8 * seed, seed), prefill_tokens=30, max_tokens=60, by="params")
    pair.run(timeout=60)
    assert pair.p.num_preemptions > 0
    assert pair.d.num_preemptions > 0
    pair.check_answers()
    sessions[0].end()


@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_reset_ends_what_is_stashed(make_pair: MakePair, send_type: str, tells: bool) -> None:
    """However vLLM is asked for it; nothing runs."""
    pair = make_pair(send_type=send_type, **TURNS)
    session = Chat(pair)
    session.turn()
    for instance in (pair.p, pair.d):
        assert instance.is_idle
        assert instance.scheduler.reset_prefix_cache(reset_connector=tells)
        instance.step()
    name = session.turn()
    assert computed(pair, name) == len(session.said) - ANSWER
    pair.check_answers()
    session.end()


def test_a_reset_ends_a_stash_that_is_only_ordered(make_pair: MakePair) -> None:
    """Its request finished before the weights changed."""
    pair = make_pair(**TURNS)
    decode_id = pair.ask(
        prompt_of(100), by="params", max_tokens=ANSWER, transfer_id=new_transfer_id(),
        order="prefill first", more={"stash": True},
    )  # fmt: skip
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.params)
    pair.ask_waiting()
    pair.run(lambda: decode_id in pair.d.params)
    assert pair.d.connector._planner._next.stashes
    pair.d.scheduler.reset_prefix_cache(reset_connector=True)
    pair.run()
    pair.check_at_rest()


def test_off_by_default(make_pair: MakePair) -> None:
    pair = make_pair(policy="recompute", prefill_role="kv_both", num_blocks=300)
    session = Chat(pair)
    session.turn()
    num_before = len(session.said)
    assert computed(pair, session.turn()) >= num_before - 60
    pair.check_at_rest()


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"prefill_role": "kv_producer"}, "kv_both"), ({"policy": "fail"}, "kv_load_failure_policy"),
     ({"attention": "mixed"}, "window")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_recalled_is_refused_at_start(
    make_pair: MakePair, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"stash_seconds.*{named}"):
        make_pair(**TURNS | changes)


def test_a_stash_is_let_go_when_prefill_needs_nothing_of_it(make_pair: MakePair) -> None:
    pair = make_pair(**TURNS)
    session = Chat(pair)
    session.turn(100, max_tokens=2)  # prefill has it all
    session.turn(0, max_tokens=2)
    engine = pair.d.ranks[0].connector._worker.engine  # type: ignore[union-attr]
    eventually(lambda: engine.stats()["open_transfers"] == 1)
    session.end()


def _pull(pair: Pair, session: Chat) -> None:
    """Prefill computes the next turn with what it recalls."""
    _ask_on_prefill(pair, session, 1)


def _abort(pair: Pair, session: Chat) -> None:
    """The client goes away while prefill recalls."""
    pair.ask([*session.said, *prompt_of(40)], by="params", earlier=session.last,
             order="prefill first")  # fmt: skip
    name = pair.prefill_ids[-1]
    loading = pair.p.connector._planner._loading
    # On a busy machine, a recall may begin and end within one step: then nothing is aborted.
    pair.run(
        lambda: name in pair.p.finished or any(item.is_open for item in loading.values()),
        only=pair.p,
    )
    if name not in pair.p.finished:
        pair.p.abort(name)
        pair.drop_waiting()
    pair.run()


def _ask_on_prefill(pair: Pair, session: Chat, seed: int) -> str:
    pair.ask([*session.said, *prompt_of(40, seed)], by="params", earlier=session.last,
             order="prefill first")  # fmt: skip
    name = pair.prefill_ids[-1]
    pair.run(lambda: name in pair.p.params, only=pair.p)
    pair.run()
    return name


def _replace(pair: Pair, session: Chat) -> None:
    """Decode's engines are others, at the old addresses; its directory had answered before."""
    _evict(pair)
    for rank in pair.d.ranks:
        rank.connector._worker.engine._parts.endings._final = Notes(Budget())  # type: ignore[union-attr]


@pytest.mark.parametrize("use", [_pull, _abort, lambda pair, _: _evict(pair), _replace],
                         ids=["pulled", "aborted", "evicted", "replaced"])  # fmt: skip
def test_a_stash_is_recalled_once_and_nobody_waits_for_a_second_time(
    make_pair: MakePair, use: Callable[[Pair, Chat], None]
) -> None:
    """The deadline of a transfer is later than the test's."""
    pair = make_pair(**TURNS, transfer_timeout_seconds=300.0)
    session = Chat(pair)
    session.turn(200)
    pair.p.evict()
    use(pair, session)
    names = []
    for seed in (2, 3):
        pair.p.evict()
        names.append(_ask_on_prefill(pair, session, seed))
    assert computed(pair, names[-1]) == len(session.said) + 40
    session.end()


@pytest.mark.parametrize("order", ["prefill first", "together"])
def test_a_turn_that_is_sent_again_is_answered(make_pair: MakePair, order: str) -> None:
    """Decode has vLLM's default failure policy."""
    pair = make_pair(**TURNS, transfer_timeout_seconds=300.0, decode={"policy": "fail"})
    session = Chat(pair)
    session.turn(200)
    pair.p.evict()
    _abort(pair, session)
    decode_id = pair.ask([*session.said, *prompt_of(40)], by="params", earlier=session.last,
                         order=order)  # fmt: skip
    pair.run()
    assert pair.d.answers[decode_id] == continuation([*session.said, *prompt_of(40)], 4)
    session.end()


def test_decode_forgets_the_notes_of_stashes_that_have_ended(make_pair: MakePair) -> None:
    pair = make_pair(**TURNS, decode={"tp_size": 2})
    directory = pair.d.connector._directory
    assert directory is not None
    sessions = [Chat(pair) for _ in range(3)]
    for session in sessions:
        session.turn(100)
    assert len(directory.stashed) == 3
    sessions[0].turn()
    eventually(lambda: _num_noted(pair) == 3)
    _evict(pair)
    sessions[1].turn()
    eventually(lambda: _num_noted(pair) == 1)
    sessions[1].end()


def _num_noted(pair: Pair) -> int:
    """After another step: a sleeping instance hears nothing of its workers."""
    pair.ask(prompt_of(20), by="params", order="prefill first", more={"stash": False})
    pair.run()
    directory = pair.d.connector._directory
    assert directory is not None
    return len(directory.stashed)
