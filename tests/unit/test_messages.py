"""The wire format: what an independent MessagePack decoder sees, limits, and named differences."""

from __future__ import annotations

from typing import get_args

import msgpack  # type: ignore[import-untyped]
import pytest

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_LAYERS,
    PROTOCOL_VERSION,
    AnyMessage,
    CacheSpec,
    Heartbeat,
    Hello,
    Manifest,
    Offer,
    PageShape,
    Part,
    Ping,
    Plane,
    TransferKey,
    decode,
    decode_heartbeat,
    encode,
    encode_heartbeat,
)

OFFER = Offer(1, 2, 3, 0, TransferKey("a"), Manifest(0, 1, [8]), b"", "shm")


def test_heartbeat_is_the_old_map_with_more_keys() -> None:
    beat = Heartbeat("P", "1.2.3.4:80", "1.2.3.4:14579", protocol=1, epoch=7, model="m")
    seen = msgpack.unpackb(encode_heartbeat(beat))
    old = {key: seen[key] for key in ("type", "http_address", "zmq_address")}
    assert old == {"type": "P", "http_address": "1.2.3.4:80", "zmq_address": "1.2.3.4:14579"}
    assert (seen["protocol"], seen["epoch"]) == (1, 7)
    assert decode_heartbeat(encode_heartbeat(beat)) == beat


def test_heartbeat_of_the_old_wire_has_no_protocol() -> None:
    old = {"type": "D", "http_address": "a:1", "zmq_address": "b:2", "unknown": [1]}
    assert decode_heartbeat(msgpack.packb(old)).protocol is None


@pytest.mark.parametrize("value", [{}, [], 5, {"type": 1, "http_address": "", "zmq_address": ""}])
def test_what_is_no_heartbeat_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_heartbeat(msgpack.packb(value))


def test_message_is_a_tagged_array() -> None:
    assert msgpack.unpackb(encode(Ping(1, 2, 3))) == ["PING", 1, 2, 3]


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(AnyMessage)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "change",
    [
        {1: -1},
        {1: 1 << 63},
        {1: "1"},
        {3: None},
        {5: ["a" * 513]},
        {5: []},
        {5: ["a", "", -1]},
        {6: [0, 1, [8] * (MAX_LAYERS + 1)]},
        {6: [0, 1, [-1]]},
        {6: [0, 1 << 32, [8]]},
        {6: [0, 1, [8], 0, "f" * 33]},
        {6: [0, 1, [8], 0, "", [1] * 17]},
        {7: b"x" * 65},
        {7: "text"},
        {8: b"shm"},
        {8: "s" * 513},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(change: dict[int, object]) -> None:
    fields = msgpack.unpackb(encode(OFFER))
    assert decode(msgpack.packb(fields)) == OFFER
    for position, value in change.items():
        fields[position] = value
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb(fields))


def test_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=str(MAX_FRAME_BYTES)):
        decode(encode(Ping(1, 2)) + b"\xc0" * MAX_FRAME_BYTES)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 60_000)


def test_groups_of_groups_are_refused() -> None:
    """A frame of them would take a hundred times its length for as long as its sender is here."""
    nested: dict[str, object] = {"more": [{"more": [{}] * 64}] * 64}
    hello = msgpack.unpackb(encode(Hello(1, 0, PROTOCOL_VERSION, "h:1", CacheSpec(), {})))
    assert isinstance(decode(msgpack.packb(hello)), Hello)
    hello[hello.index({})] = nested
    with pytest.raises(RemoteProtocolError, match="no groups of its own"):
        decode(msgpack.packb(hello))


def test_largest_offer_fits_a_frame() -> None:
    key = TransferKey("é" * 512, "é" * 512, 1 << 31, 1 << 31)
    planes = (Plane(1 << 48, 1 << 48, 1 << 48, 1 << 31, 1 << 48),) * 4
    part = Part(1 << 31, 1 << 31, 1 << 31, 1 << 31, 1 << 20, PageShape(1 << 31, -(1 << 48), planes))
    manifest = Manifest(1 << 31, 1 << 31, [1 << 48] * MAX_LAYERS, 1, "f" * 32, [1 << 48] * 16, part)
    offer = Offer((1 << 63) - 1, 0, 0, 0, key, manifest, b"x" * 64, "é" * 512)
    assert decode(encode(offer)) == offer


def test_manifest_counts_bytes() -> None:
    manifest = Manifest(2, 3, [100, 50])
    assert (manifest.block_bytes, manifest.nbytes) == (150, 450)


def test_key_shows_all_its_parts() -> None:
    assert str(TransferKey("id", "layer", 1, 2)) == "id/1/2/layer"
