"""What engines of the oldest protocol version that is spoken here say, as it was recorded, is
understood, and they can read what is said now."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from p2p_engine.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    Gone,
    TransferKey,
    decode,
    decode_heartbeat,
    encode,
    understand_each_other,
)

FRAMES = {
    name: bytes.fromhex(text)
    for name, text in json.loads(
        Path(__file__).with_name("frames_of_version_9.json").read_text()
    ).items()
}
# What each says since then behind what it said in that version.
ADDED: dict[str, list[Any]] = {}


def test_the_record_has_every_message() -> None:
    known = {kind.__name__ for kind in get_args(AnyMessage)}
    assert set(FRAMES) == known | {"Heartbeat"}


@pytest.mark.parametrize("name", sorted(FRAMES.keys() - {"Heartbeat"}))
def test_what_version_9_says_is_said_in_the_same_way(name: str) -> None:
    """All fields of the record differ from their defaults."""
    message = decode(FRAMES[name])
    assert type(message).__name__ == name
    now, then = msgspec.msgpack.decode(encode(message)), msgspec.msgpack.decode(FRAMES[name])
    assert now == [*then, *ADDED.get(name, [])]


def test_a_heartbeat_of_version_9_registers() -> None:
    beat = decode_heartbeat(FRAMES["Heartbeat"])
    assert (beat.type, beat.protocol, beat.kv_bytes_per_token) == ("P", 9, 100)


def test_version_9_reads_a_message_with_more_fields() -> None:
    """Its messages were these structs, and did not mind what is behind their fields."""

    class OldGone(msgspec.Struct, array_like=True, tag_field="type", tag="GONE"):
        source_epoch: int
        destination_epoch: int
        key: TransferKey
        reason: str
        generation: int

    frame = encode(Gone(1, 2, TransferKey("r"), "why", 3, b"binding"))
    assert msgspec.msgpack.decode(frame, type=OldGone).generation == 3


def test_versions_without_an_identity_and_later_ones_are_not_paired() -> None:
    """Proxies of version 8 pair neighbours, too."""
    assert not any(understand_each_other(8, version) for version in (9, PROTOCOL_VERSION))
    assert PROTOCOL_VERSION > 8 + 1


def test_a_version_and_the_one_before_work_together() -> None:
    versions = (None, OLDEST_VERSION - 1, OLDEST_VERSION, PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    together = {pair for pair in product(versions, versions) if understand_each_other(*pair)}
    neighbours = {(9, 10), (10, 9), (10, 11), (11, 10)}
    assert together == {(one, one) for one in versions} | neighbours
