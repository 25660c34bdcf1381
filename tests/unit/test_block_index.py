"""BlockIndex: events that no vLLM of today sends, and what they may cost."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from proxy.fleet import block_index
from proxy.fleet.block_index import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    read_events,
)

SIZE = 2
PROMPT = [1, 2, 3, 4, 5, 6]


def stored(first: int = 0, count: int = 3, **changed: Any) -> BlockStored:
    """The event that stores some blocks of the prompt; block n is called n + 1."""
    settings: dict[str, Any] = {
        "block_hashes": list(range(first + 1, first + count + 1)),
        "parent_block_hash": first or None,
        "token_ids": PROMPT[first * SIZE : (first + count) * SIZE],
        "block_size": SIZE,
        "extra_keys": [None] * count,
        "group_idx": 0,
        "medium": "GPU",
    }
    return BlockStored(**settings | changed)


def removed(*blocks: int, **changed: Any) -> BlockRemoved:
    """The event that removes blocks."""
    return BlockRemoved(list(blocks), **{"medium": "GPU", "group_idx": 0, **changed})


class IndexRig:
    """An index with some instances."""

    def __init__(self, *instances: int, **settings: int) -> None:
        self.index = BlockIndex(**settings)
        for instance in instances:
            self.index.begin(instance)

    def hear(self, *events: Any, of: int = 1) -> None:
        """Follow events of an instance, as they come over the wire."""
        payload = msgspec.msgpack.encode([1.5, [msgspec.to_builtins(e) for e in events], 0])
        self.index.apply(of, read_events(payload))
        self.index.check()

    def held(self, tokens: list[int] = PROMPT, lora: str = "", salt: str = "") -> dict[int, int]:
        """What each instance holds of a prompt."""
        return self.index.match(self.index.keys_of(tokens, lora, salt))


def test_each_instance_is_credited_with_its_own_leading_blocks() -> None:
    rig = IndexRig(1, 2, 3)
    rig.hear(stored())
    rig.hear(stored(count=1), of=2)
    assert rig.held() == {1: 6, 2: 2, 3: 0}
    assert rig.held([1, 2, 3, 4, 9, 9]) == {1: 4, 2: 2, 3: 0}
    assert rig.held([9, *PROMPT]) == {1: 0, 2: 0, 3: 0}
    assert rig.held([1]) == {1: 0, 2: 0, 3: 0}


def test_a_block_counts_until_its_last_copy_is_gone() -> None:
    rig = IndexRig(1)
    rig.hear(stored(), stored())
    rig.hear(removed(3, 2, 1))
    assert rig.held() == {1: 6}
    rig.hear(removed(3))
    assert rig.held() == {1: 4}
    rig.hear(removed(1))
    assert rig.held() == {1: 0}
    rig.hear(removed(1, 1, 99), AllBlocksCleared())
    assert rig.index.counts() == {1: 0}


@pytest.mark.parametrize(
    "event",
    [
        stored(medium="CPU"),
        stored(locality="REMOTE"),
        stored(kv_cache_spec_kind="sliding_window"),
        stored(kv_cache_spec_kind="mamba"),
        stored(block_size=0),
        stored(block_size=3),
        stored(extra_keys=[None]),
        stored(token_ids=PROMPT[:5]),
        stored(first=1, count=2),  # its parent was never seen
    ],
)
def test_what_says_nothing_of_a_whole_prefix_here_is_left_out(event: BlockStored) -> None:
    rig = IndexRig(1)
    rig.hear(event)
    assert rig.index.counts() == {1: 0}


def test_a_second_group_changes_nothing() -> None:
    rig = IndexRig(1)
    rig.hear(stored(), stored(group_idx=1, block_hashes=[7, 8, 9]), removed(1, group_idx=1))
    assert rig.held() == {1: 6}


def test_blocks_of_other_keys_do_not_count() -> None:
    rig = IndexRig(1, 2, 3)
    rig.hear(stored(extra_keys=[["salt"], None, None]))
    rig.hear(stored(extra_keys=[["ada"]] * 3, lora_name="ada"), of=2)
    rig.hear(stored(extra_keys=[None, [["image", 3]], None]), of=3)
    assert rig.held() == {1: 0, 2: 0, 3: 2}
    assert rig.held(salt="salt") == {1: 6, 2: 0, 3: 0}
    assert rig.held(lora="ada") == {1: 0, 2: 6, 3: 0}
    assert rig.held(lora="ada", salt="salt") == {1: 0, 2: 0, 3: 0}


def test_an_older_release_names_the_adapter_only() -> None:
    rig = IndexRig(1)
    rig.hear(stored(extra_keys=None, lora_name="ada"))
    assert rig.held() == {1: 0}
    assert rig.held(lora="ada") == {1: 6}


def test_unknown_kinds_and_fields_are_passed_over_and_broken_events_are_not() -> None:
    known = {**msgspec.to_builtins(stored()), "new_field": {"a": [1, {}]}}
    payload = msgspec.msgpack.encode([1, [{"type": "BlockMoved", "to": 1}, known], 0, "more"])
    rig = IndexRig(1)
    rig.index.apply(1, read_events(payload))
    assert rig.held() == {1: 6}
    for broken in (
        b"", b"\xc1", b"\x93", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([1, [7]]),
        msgspec.msgpack.encode([1, [{**known, "token_ids": ["a"]}], 0]),
        msgspec.msgpack.encode([1, [{"type": "BlockStored"}], 0]),
    ):  # fmt: skip
        with pytest.raises(msgspec.MsgspecError):
            list(read_events(broken))


def test_an_instance_that_leaves_takes_its_blocks_along() -> None:
    rig = IndexRig(1, 2)
    rig.hear(stored())
    rig.hear(stored(), of=2)
    rig.index.promise(1, rig.index.keys_of(PROMPT, "", ""))
    rig.index.end(1)
    rig.index.check()
    assert rig.held() == {2: 6}
    rig.index.begin(3)  # in its place
    rig.hear(stored(count=1), of=3)
    assert rig.held() == {2: 6, 3: 2}


def test_the_number_of_blocks_is_bounded_and_each_instance_has_its_share() -> None:
    rig = IndexRig(1, max_blocks=4)
    rig.hear(stored())
    rig.index.begin(2)
    rig.index.check()
    assert rig.held() == {1: 4, 2: 0}  # the first blocks of a prompt are kept
    rig.hear(stored(), of=2)
    assert rig.held() == {1: 4, 2: 4}
    rig.hear(removed(1))
    rig.hear(stored(count=1))
    assert rig.held() == {1: 4, 2: 4}


def test_a_promise_is_believed_for_a_while() -> None:
    rig = IndexRig(1, 2)
    rig.hear(stored(count=1))
    rig.index.promise(1, rig.index.keys_of(PROMPT, "", ""))
    rig.index.promise(2, rig.index.keys_of(PROMPT[:4], "", ""))  # it has no block yet
    rig.index.age()
    assert rig.held() == {1: 6, 2: 4}
    rig.index.age()
    assert rig.held() == {1: 2, 2: 0}
    rig.index.promise(1, rig.index.keys_of(PROMPT, "", ""))
    rig.hear(AllBlocksCleared())
    assert rig.held() == {1: 0, 2: 0}


def test_promises_to_others_outlive_a_clear() -> None:
    rig = IndexRig(1, 2)
    keys = rig.index.keys_of(PROMPT, "", "")
    assert not keys
    rig.hear(stored(count=1))
    keys = rig.index.keys_of(PROMPT, "", "")
    for _ in range(2):
        for instance in (1, 2):
            rig.index.promise(instance, keys)
        rig.index.age()
    rig.index.promise(1, keys)
    rig.index.check()
    rig.hear(AllBlocksCleared(), of=2)
    assert rig.held() == {1: 6, 2: 0}
    rig.hear(AllBlocksCleared(), AllBlocksCleared())
    assert not any(rig.index._promised)


def test_a_clear_costs_the_same_whatever_is_promised_of_others() -> None:
    def seconds(num_tokens: int) -> float:
        rig = IndexRig(1, 2)
        rig.hear(stored(count=1))
        rig.index.promise(1, rig.index.keys_of([*range(num_tokens)], "", ""))
        began = time.thread_time()
        rig.index.apply(2, [AllBlocksCleared()] * 200)
        return time.thread_time() - began

    few, many = (min(seconds(number) for _ in range(5)) for number in (20, 20_000))
    assert many < 8 * few


def test_an_event_of_many_blocks_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(*events: Any) -> IndexRig:
        rig = IndexRig(1)
        rig.hear(*events)
        return rig

    events = [stored(extra_keys=[["s"], None, None]), stored(first=1, count=2), removed(3, 3)]
    odd = [stored(token_ids=PROMPT[:5]), stored(extra_keys=[]), stored(extra_keys=[None] * 2)]
    whole = [hear(*events[:count]) for count in range(4)] + [hear(event) for event in odd]
    monkeypatch.setattr(block_index, "MAX_EVENT_BLOCKS", 2)
    parts = [hear(*events[:count]) for count in range(4)] + [hear(event) for event in odd]
    assert [r.held() for r in parts] == [r.held() for r in whole]
    assert [r.held(salt="s") for r in parts] == [r.held(salt="s") for r in whole]
    assert [r.index.counts()[1] for r in whole] == [0, 3, 3, 2, 0, 3, 0]
    payload = msgspec.msgpack.encode([1.5, [msgspec.to_builtins(e) for e in events], 0])
    sizes = [
        len(e.block_hashes) for e in read_events(payload) if not isinstance(e, AllBlocksCleared)
    ]
    assert sizes == [2, 1, 2, 2]


def test_promises_and_look_ups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "MAX_PROMISED", 2)
    monkeypatch.setattr(block_index, "MAX_CHAIN", 2)
    monkeypatch.setattr(block_index, "MAX_SIZES", 1)
    rig = IndexRig(1, 2, 3)
    rig.hear(stored())
    rig.hear(stored(), of=2)
    rig.hear(stored(block_size=1, token_ids=[1, 2, 3]), of=3)
    keys = rig.index.keys_of(PROMPT, "", "")
    assert {size: len(chain) for size, chain in keys.items()} == {SIZE: 2}
    assert rig.held() == {1: 4, 2: 4, 3: 0}
    for token in range(10):
        rig.index.promise(1, rig.index.keys_of([token] * 6, "", ""))
        assert sum(map(len, rig.index._promised)) <= 2 * (2 + 2)


def test_parts_of_blocks_do_not_fix_the_block_size() -> None:
    rig = IndexRig(1)
    rig.hear(stored(count=1))
    whole = stored(count=1, block_hashes=[77], token_ids=PROMPT[:4], block_size=4)
    rig.hear(whole)
    assert rig.held() == {1: 4}
    rig.hear(stored(count=1), removed(77))
    assert rig.held() == {1: 0}
