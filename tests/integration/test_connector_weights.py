"""Weights have a name, and two instances exchange KV while their names are equal: what happens for
each order in which they are labelled, reset and started again (the table of docs/weights.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm")

from tests import marks
from tests.doubles.instance import InstanceDouble
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.doubles.sleeping import CoreDouble

pytestmark = marks.simulated_vllm

LEASE_SECONDS = 30.0  # long: what ends at once does not end by it


@dataclass
class NamedPair:
    """A pair whose instances are told of weights by their side's letter."""

    pair: Pair

    def side(self, letter: str) -> InstanceDouble:
        """The instance with this letter."""
        return {"p": self.pair.p, "d": self.pair.d}[letter]

    def label(self, letters: str, name: str) -> None:
        """Say what the weights are called, as vLLM's engine core is told it. It makes a step then,
        and tells the workers."""
        for letter in letters:
            self.side(letter).connector.weights_labelled(name)
        self.pair.step()

    def reset(self, letters: str, *, tells: bool = False) -> None:
        """Reset vLLM's caches; it `tells` its connector if it was asked to. Then it looks for
        work."""
        for letter in letters:
            assert self.side(letter).scheduler.reset_prefix_cache(reset_connector=tells)
        self.pair.step()

    def run_method(self, letters: str) -> None:
        """Have the workers run a method of a trainer's."""
        for letter in letters:
            CoreDouble(self.side(letter)).collective_rpc("take_weights", args=("step-41",))
        self.pair.step()

    def moves(self, seed: int) -> bool:
        """Ask for a prompt. It is answered right, before a lease ends, and decode has loaded all of
        it but a token, or computed it."""
        prompt = prompt_of(100, seed)
        name = self.pair.ask(prompt, order="together")
        self.pair.run(lambda: name in self.pair.d.finished, timeout=LEASE_SECONDS / 2)
        self.pair.check_answers()
        num_computed = self.pair.d.num_computed_prompt_tokens[name]
        assert num_computed in (1, len(prompt))
        return num_computed == 1


MakeNamedPair = Callable[..., NamedPair]


@pytest.fixture
def make_fleet(make_pair: MakePair) -> MakeNamedPair:
    def make(send_type: str = "PUT_ASYNC", **settings: object) -> NamedPair:
        return NamedPair(
            make_pair(
                send_type=send_type, policy="recompute", lease_seconds=LEASE_SECONDS, **settings
            )
        )

    return make


def nothing(fleet: NamedPair) -> None:
    """Leave all as it was started."""


def label_both(fleet: NamedPair) -> None:
    fleet.label("pd", "step-41")


def label_prefill(fleet: NamedPair) -> None:
    fleet.label("p", "step-41")


def label_decode(fleet: NamedPair) -> None:
    fleet.label("d", "step-41")


def label_both_otherwise(fleet: NamedPair) -> None:
    fleet.label("p", "step-41")
    fleet.label("d", "step-42")


def label_both_by_long_names(fleet: NamedPair) -> None:
    fleet.label("p", "a very long name that a trainer gives to its weights: step-41")
    fleet.label("d", "a very long name that a trainer gives to its weights: step-42")


def label_and_take_the_label_back(fleet: NamedPair) -> None:
    fleet.label("pd", "step-41")
    fleet.label("p", "default")
    fleet.label("d", "default")


def reset_prefill(fleet: NamedPair) -> None:
    fleet.reset("p")


def reset_decode(fleet: NamedPair) -> None:
    fleet.reset("d")


def reset_both(fleet: NamedPair) -> None:
    fleet.reset("pd")


def reset_both_and_tell(fleet: NamedPair) -> None:
    fleet.reset("pd", tells=True)


def reset_prefill_in_vain(fleet: NamedPair) -> None:
    """Something runs. A trainer that does not look at the answer changes the weights."""
    prefill = fleet.side("p")
    prefill.add("other", prompt_of(20, 9), max_tokens=3)
    prefill.step()
    assert not prefill.scheduler.reset_prefix_cache()
    fleet.pair.run(lambda: "other" in prefill.finished)


def run_a_method_of_decodes_workers(fleet: NamedPair) -> None:
    fleet.run_method("d")


def run_a_method_then_label(fleet: NamedPair) -> None:
    """Nobody has reset vLLM's prefix cache: the label does."""
    fleet.run_method("pd")
    fleet.label("pd", "step-41")


def run_a_method_then_label_while_blocks_are_in_use(fleet: NamedPair) -> None:
    """vLLM's prefix cache cannot be emptied: it would have KV of both weights."""
    decode = fleet.side("d")
    decode.add("other", prompt_of(20, 9), max_tokens=3)
    decode.step()
    run_a_method_then_label(fleet)
    fleet.pair.run(lambda: "other" in decode.finished)


def label_behind_a_reset_in_vain(fleet: NamedPair) -> None:
    """What was in use then is over."""
    reset_prefill_in_vain(fleet)
    fleet.label("pd", "step-41")


def run_a_method_behind_a_reset_then_label(fleet: NamedPair) -> None:
    fleet.reset("pd")
    fleet.run_method("pd")
    fleet.label("pd", "step-41")


def run_a_method_then_label_then_reset(fleet: NamedPair) -> None:
    run_a_method_then_label(fleet)
    fleet.reset("pd")


def reset_then_label(fleet: NamedPair) -> None:
    fleet.reset("pd")
    fleet.label("pd", "step-41")


def reset_and_tell_then_label(fleet: NamedPair) -> None:
    fleet.reset("pd", tells=True)
    fleet.label("pd", "step-41")


def label_then_reset(fleet: NamedPair) -> None:
    fleet.label("pd", "step-41")
    fleet.reset("pd")


def label_with_the_same_name_behind_a_reset(fleet: NamedPair) -> None:
    fleet.label("pd", "step-41")
    fleet.reset("pd")
    fleet.label("pd", "step-41")


def name_the_checkpoint_behind_a_reset(fleet: NamedPair) -> None:
    fleet.reset("pd")
    fleet.label("pd", "default")


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize(
    ("change", "moves"),
    [
        (nothing, True),
        (label_both, True),
        (label_prefill, False),
        (label_decode, False),
        (label_both_otherwise, False),
        (label_both_by_long_names, False),
        (label_and_take_the_label_back, True),
        (reset_prefill, False),
        (reset_decode, False),
        (reset_both, False),
        (reset_both_and_tell, False),
        (reset_prefill_in_vain, False),
        (run_a_method_of_decodes_workers, False),
        (run_a_method_then_label, True),
        (run_a_method_then_label_while_blocks_are_in_use, False),
        (label_behind_a_reset_in_vain, True),
        (run_a_method_behind_a_reset_then_label, True),
        (run_a_method_then_label_then_reset, False),
        (reset_then_label, True),
        (reset_and_tell_then_label, True),
        (label_then_reset, False),
        (label_with_the_same_name_behind_a_reset, True),
        (name_the_checkpoint_behind_a_reset, True),
    ],
)
def test_kv_moves_while_the_names_are_equal(
    make_fleet: MakeNamedPair, change: Callable[[NamedPair], None], moves: bool, send_type: str
) -> None:
    """After each change, too, and again when both have one label."""
    fleet = make_fleet(send_type)
    assert fleet.moves(0)
    change(fleet)
    assert [fleet.moves(seed) for seed in (1, 2)] == [moves, moves]
    fleet.label("pd", "step-50")
    assert fleet.moves(3)


@pytest.mark.parametrize("tells", [True, False])
def test_a_reset_keeps_the_weights_where_an_operator_says_so(
    make_fleet: MakeNamedPair, tells: bool
) -> None:
    fleet = make_fleet(reset_keeps_weights=True)
    assert fleet.moves(0)
    fleet.reset("pd", tells=tells)
    assert fleet.moves(1)


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_method_of_the_workers_keeps_no_name_whatever_is_said_of_resets(
    make_fleet: MakeNamedPair, who: str
) -> None:
    fleet = make_fleet(reset_keeps_weights=True)
    fleet.run_method(who)
    assert not fleet.moves(0)
    fleet.label(who, "default")
    assert fleet.moves(1)
    fleet.reset(who)
    assert fleet.moves(2)


def test_without_prefix_caching_a_label_waits_for_nothing(make_fleet: MakeNamedPair) -> None:
    """There is nothing to empty, so blocks may be in use."""
    fleet = make_fleet(has_prefix_cache=False)
    run_a_method_then_label_while_blocks_are_in_use(fleet)
    assert fleet.moves(0)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("by_label", [True, False])
def test_no_label_is_taken_over_pictures_of_weights_before(
    make_fleet: MakeNamedPair, by_label: bool, has_prefix_cache: bool
) -> None:
    """vLLM's route for resets leaves its encoder cache as it is, and what comes between the change
    and the reset fills it again."""
    prefill = make_fleet(has_prefix_cache=has_prefix_cache).side("p")
    core, pictures = CoreDouble(prefill), prefill.scheduler.encoder_cache_manager.cached
    pictures["logo"] = set()
    core.reset_prefix_cache()
    assert pictures  # nobody has changed the weights
    core.collective_rpc("take_weights", args=("step-41",))
    pictures["logo"] = set()
    if by_label:
        core.set_weight_version("step-41")
    else:
        core.reset_prefix_cache()
    assert not pictures
    assert core.model_executor.calls == ["take_weights", "reset_encoder_cache"]


def test_pictures_stay_while_the_prefix_cache_does(make_fleet: MakeNamedPair) -> None:
    """Requests run, and may need them; no label is taken."""
    decode = make_fleet().side("d")
    core, pictures = CoreDouble(decode), decode.scheduler.encoder_cache_manager.cached
    decode.add("other", prompt_of(20, 9), max_tokens=3)
    decode.step()
    core.collective_rpc("take_weights", args=("step-41",))
    pictures["logo"] = set()
    core.set_weight_version("step-41")
    assert pictures
