"""The fields of an identity on the wire: their digest, their bounds, and what is said to differ."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.identity import (
    MAX_NAMED,
    MAX_PLAIN_BYTES,
    MAX_SHOWN,
    NO_FIELDS,
    differences,
    digest_of,
    pack,
    unpack,
)
from p2p_engine.wire.messages import MAX_IDENTITY_BYTES
from tests.support import SeededRandom


def test_fields_come_back_as_they_were_packed(rng: SeededRandom) -> None:
    fields = {f"field.{rng.random()}": "ü" * rng.randrange(160) for _ in range(300)}
    assert unpack(pack(fields)) == fields
    assert unpack(pack({})) == {}


def test_the_digest_knows_no_order_and_each_value() -> None:
    one = digest_of({"a": "1", "b": "2"})
    assert digest_of({"b": "2", "a": "1"}) == one
    others = [{"a": "1"}, {"a": "1", "b": "3"}, {"a": "12", "b": ""}, {"b": "1", "a": "2"}]
    assert one not in map(digest_of, others)


def test_fields_that_no_message_can_carry_are_left_out(rng: SeededRandom) -> None:
    fields = {f"{rng.random()}": f"{rng.random()}" for _ in range(4000)}
    assert pack(fields) == NO_FIELDS
    assert unpack(pack(fields)) == {}


@pytest.mark.parametrize(
    "packed",
    [
        b"x",
        zlib.compress(b""),
        zlib.compress(msgspec.msgpack.encode([1, 2])),
        zlib.compress(msgspec.msgpack.encode([("a", 1)])),
        zlib.compress(msgspec.msgpack.encode([("a", "1")]))[:-2],
        zlib.compress(b"\x91" * 100_000),
    ],
    ids=["noise", "nothing", "numbers", "a number", "cut", "deep"],
)
def test_what_are_no_fields_is_refused(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(packed)


def test_a_few_bytes_cannot_become_many() -> None:
    bomb = zlib.compress(bytes(1 << 24))
    assert len(bomb) < MAX_IDENTITY_BYTES
    with pytest.raises(RemoteProtocolError, match=f"more than {MAX_PLAIN_BYTES} bytes"):
        unpack(bomb)


def test_a_difference_names_both_values_and_there_is_an_end() -> None:
    here, there = {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}
    assert differences(here, there) == [
        "b: '2' here, '3' there", "c: '(default, or accepted)' here, '4' there",
    ]  # fmt: skip
    many = {f"{number}": "x" for number in range(100)}
    named = differences({}, many)
    assert len(named) == MAX_NAMED + 1
    assert named[-1] == f"and {100 - MAX_NAMED} more"
    assert len(differences({}, many, at_most=100)) == 100


def test_what_a_peer_has_chosen_stays_short_and_on_one_line() -> None:
    named = differences({"a\nWARNING": "x" * 9000, "b" * 9000: "\x1b[2J"}, {})
    assert len(named) == 2
    assert all(text.isprintable() and len(text) < 3 * MAX_SHOWN for text in named)
