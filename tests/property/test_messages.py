"""Whatever can be said comes back the same; whatever else comes in is a RemoteProtocolError."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import hypothesis.strategies as st
import msgpack  # type: ignore[import-untyped]
import msgspec
from hypothesis import given, settings

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import (
    AnyMessage,
    CacheSpec,
    Done,
    Manifest,
    PageShape,
    Part,
    Plane,
    TransferKey,
    decode,
    decode_heartbeat,
    encode,
)

counts = st.integers(0, 1 << 31)
sizes = st.integers(0, 1 << 48)
words = st.integers(0, (1 << 63) - 1)
texts = st.text(max_size=20)
digests = st.binary(max_size=16)
keys = st.builds(TransferKey, texts, texts, counts, counts, counts)
planes = st.builds(Plane, sizes, sizes, sizes)
shapes = st.builds(PageShape, counts, sizes, st.lists(planes, min_size=1, max_size=4).map(tuple))
manifests = st.builds(
    Manifest,
    counts,
    counts,
    st.lists(sizes, max_size=5),
    counts,
    texts,
    st.lists(sizes, max_size=3),
    st.none() | st.builds(Part, counts, counts, counts, counts, st.integers(1, 1 << 20), shapes),
)
numbers = st.lists(counts, max_size=3).map(tuple)
groups = st.builds(
    CacheSpec,
    identity=digests,
    block_size=counts,
    page_bytes=st.lists(sizes, max_size=3),
    layer_cuts=numbers,
    shape=st.none() | shapes,
    layers=st.none() | numbers,
    window=counts,
    number=counts,
)
specs = st.builds(
    lambda spec, more: msgspec.structs.replace(spec, more=tuple(more)),
    groups,
    st.lists(groups, max_size=2),
)
endpoints = st.dictionaries(texts, st.dictionaries(texts, texts, max_size=3), max_size=3)
BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "source_epoch": words, "destination_epoch": words, "seq": words, "trailer": words,
    "number": words, "generation": words, "answers": words,
    "version": counts, "rank": counts, "num_ranks": counts, "attempt": counts,
    "first_block": counts, "num_blocks": counts, "offset": sizes, "word_offset": sizes,
    "largest_landing": sizes,
    "retry_after": st.floats(0, 86400), "lease": st.floats(0, 86400), "is_pushed": st.booleans(),
    "is_promised": st.booleans(),
    "contents": st.lists(st.tuples(keys, st.binary(max_size=64)), max_size=3),
    "marks": st.lists(st.tuples(counts, st.binary(max_size=64)), max_size=3),
    "address": texts, "reason": texts, "code": texts, "transport": texts,
    "identity": digests,
    "binding": st.binary(max_size=64), "key": keys, "manifest": manifests,
    "spec": st.none() | specs, "endpoints": endpoints,
}  # fmt: skip


def _values_of(kind: type[Any], field: str) -> st.SearchStrategy[Any]:
    if field == "checksum":
        return st.integers(0, (1 << 32) - 1) if kind is Done else st.booleans()
    return BY_FIELD[field]


messages = st.sampled_from(get_args(AnyMessage)).flatmap(
    lambda kind: st.builds(kind, *(_values_of(kind, name) for name in kind.__struct_fields__))
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip
quick = settings(max_examples=200, deadline=None)


@quick
@given(messages)
def test_round_trip(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@quick
@given(messages, st.data())
def test_truncated_or_changed_frames(message: AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    position = data.draw(st.integers(0, len(frame) - 1))
    with contextlib.suppress(RemoteProtocolError):
        decode(bytes(frame[:position]))
        raise AssertionError("half a frame was accepted")
    frame[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        decode(bytes(frame))


@quick
@given(st.binary())
def test_noise(frame: bytes) -> None:
    for read in (decode, decode_heartbeat):
        with contextlib.suppress(RemoteProtocolError):
            read(frame)


@quick
@given(values, st.sampled_from(get_args(AnyMessage)))
def test_values_of_any_shape(value: object, kind: type) -> None:
    tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
    listed = value if isinstance(value, list) else [value]
    for frame in (msgpack.packb(value), msgpack.packb([tag, *listed])):
        with contextlib.suppress(RemoteProtocolError):
            decode(frame)
        with contextlib.suppress(RemoteProtocolError):
            decode_heartbeat(frame)
