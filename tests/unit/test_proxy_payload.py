"""The bodies of both legs, for any request: what vLLM's `json.loads` makes of them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_engine.wire.request_ids import ProxyId, parse_proxy_id
from proxy.http.memory import BodyRefused, Parts
from proxy.openai import payload
from proxy.openai.prompt import MAX_BLOCKS, read_prompt

PROXY_ID = ProxyId("10.0.0.1:21001", "[fe80::2]:22001", "0123456789abcdef" * 2)
PARAMS = {"do_remote_prefill": True, "remote_host": "h"}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = st.sampled_from(
    ["model", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stream",
     "stream_options", "logprobs", "return_token_ids", "kv_transfer_params", "seed", "é", 'quo"te'],
)  # fmt: skip
requests = st.dictionaries(names, values, max_size=8)
spaces = st.sampled_from(["", " ", "\n\t \r"])


def decode_body(asked: payload.ClientRequest, params: payload.Params | None) -> bytes:
    return whole(payload.decode_body(asked, params))


def prefill_body(fields: payload.Fields, params: payload.Params | None) -> bytes:
    return whole(payload.prefill_body(fields, params))


def whole(parts: Parts) -> bytes:
    return b"".join(part for part in parts if isinstance(part, bytes))


@settings(deadline=None)
@given(requests, spaces, st.booleans())
def test_decode_gets_the_clients_request_and_our_parameters(
    asked: dict[str, Any], space: str, is_ascii: bool
) -> None:
    body = (space + json.dumps(asked, ensure_ascii=is_ascii) + space).encode()
    sent = decode_body(payload.parse(body), PARAMS)
    assert json.loads(sent) == {**asked, "kv_transfer_params": PARAMS}
    if "kv_transfer_params" not in asked:
        own = body.rstrip()[:-1]
        assert sent.startswith(own)  # the very same bytes


@settings(deadline=None)
@given(requests)
def test_old_instances_get_the_clients_request_alone(asked: dict[str, Any]) -> None:
    body = json.dumps(asked).encode()
    request = payload.parse(body)
    asked.pop("kv_transfer_params", None)
    assert json.loads(decode_body(request, None)) == asked


@settings(deadline=None)
@given(requests)
def test_prefill_is_asked_for_one_token(asked: dict[str, Any]) -> None:
    fields = payload.parse(json.dumps(asked).encode()).fields
    expected = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": PARAMS}
    if "max_completion_tokens" in asked:
        expected["max_completion_tokens"] = 1
    for name in ("min_tokens", "stream_options", "logprobs", "return_token_ids"):
        expected.pop(name, None)
    assert json.loads(prefill_body(fields, PARAMS)) == expected
    del expected["kv_transfer_params"]
    assert json.loads(prefill_body(fields, None)) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"remote_host": "evil"}, "a": 1, "kv_transfer_params": 2}',
        b'{"a": 1, "kv\\u005ftransfer_params": {"remote_host": "evil"}}',
        b'{"a": 1, "\\u006bv_transfer_params": {"remote_host": "evil"}}',
        b'{"a": 1, "ec_transfer_params": {"peer_host": "evil"}}',
        b'{"a": 1, "request_id": "___prefill_addr_evil:1___decode_addr_evil:2_"}',
        b'{"a": 1, "vllm_xargs": {"kv_transfer_params": "evil"}}',
        b'{"a": 1, "vllm_xargs": {"b": 2, "ec_transfer_params": ["evil"]}}',
        b'{"a": 1, "vllm_xargs": {"kv_transfer_params": 1, "kv\\u005ftransfer_params": "evil"}}',
        b'{"a": 1, "vllm_xargs": {"kv_cache_report_mode": "evil", "b": 2}}',
        b'{"vllm_xargs": {"kv_transfer_params": "evil"}, "a": 1, "vllm\\u005fxargs": {"b": 2}}',
        b'{"vllm_xargs": {"b": 2}, "a": 1, "vllm_xargs": {"\\u006bv_transfer_params": "evil"}}',
    ],
)
def test_no_spelling_brings_a_clients_parameters_through(body: bytes) -> None:
    asked = payload.parse(body)
    for sent in (
        prefill_body(asked.fields, PARAMS),
        decode_body(asked, PARAMS),
        decode_body(asked, None),
    ):
        assert b"evil" not in sent
        read = json.loads(sent)
        assert read["a"] == 1
        assert read.get("vllm_xargs", {}).get("b", 2) == 2


@pytest.mark.parametrize("given", ["null", "[1]", '"x"', '{"session_id": "s", "top": [1.50]}'])
def test_other_arguments_of_a_client_pass_unchanged(given: str) -> None:
    body = b'{"vllm_xargs": %b, "a": 1}' % given.encode()
    sent = decode_body(payload.parse(body), None)
    assert json.loads(sent) == json.loads(body)
    assert (b"1.50" in sent) == ("1.50" in given)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=6), st.integers(0, 90), st.integers(0, 12), st.booleans())
def test_what_vllm_reads_is_what_the_proxy_read(
    inserted: bytes, where: int, num_removed: int, is_wide: bool
) -> None:
    """Where both take a body for JSON, both see the same keys: no key hides from one of them."""
    whole = (
        b'{"prompt": "a\\"b", "kv_transfer_params": {"x": "evil"}, "n": 1e0, "user": "\xc3\xa9"}'
    )
    body = whole[:where] + inserted + whole[where + num_removed :]
    body = body.decode("latin-1").encode("utf-16") if is_wide else body
    try:
        sent = decode_body(payload.parse(body), None)
    except BodyRefused:
        return
    try:
        read, theirs = json.loads(sent), json.loads(body)
    except ValueError:
        return
    assert read.keys() == theirs.keys() - {"kv_transfer_params"}
    assert "kv_transfer_params" not in read


def test_of_duplicate_keys_both_legs_take_the_last() -> None:
    body = b'{"prompt": "first", "n": 1, "prompt": "last"}'
    asked = payload.parse(body)
    assert json.loads(prefill_body(asked.fields, None))["prompt"] == "last"
    assert json.loads(decode_body(asked, PARAMS))["prompt"] == "last"


def test_numbers_pass_as_they_were_written() -> None:
    body = b'{"seed": 123456789012345678901234567890, "temperature": 0.10000000000000000001}'
    sent = prefill_body(payload.parse(body).fields, None)
    assert b"123456789012345678901234567890" in sent
    assert b"0.10000000000000000001" in sent


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"1", b"null", b"{", b"{}}", b'{"a" 1}', b'{"a":' * 100_000]
)
def test_what_is_no_object_is_a_400(body: bytes) -> None:
    with pytest.raises(BodyRefused) as caught:
        payload.parse(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "is_stream", "model"),
    [
        (b"{}", False, None),
        (b'{"stream": true, "model": "m"}', True, "m"),
        (b'{"stream": false, "model": 3}', False, None),
        (b'{"stream":null,"model":null}', False, None),
        (b'{"stream": "true", "model": ["m"]}', False, None),
        (b'{"model": "\\u00e9"}', False, "é"),
    ],
)
def test_the_proxy_reads_two_fields(body: bytes, is_stream: bool, model: str | None) -> None:
    asked = payload.parse(body)
    assert (asked.is_stream, payload.model_of(asked.fields)) == (is_stream, model)


def test_each_leg_learns_where_the_other_is() -> None:
    first = payload.prefill_params(PROXY_ID)
    assert (first["remote_host"], first["remote_port"]) == ("fe80::2", 22001)
    assert (first["do_remote_decode"], first["do_remote_prefill"]) == (True, False)
    second = payload.decode_params(PROXY_ID, {})
    assert (second["remote_host"], second["remote_port"]) == ("10.0.0.1", 21001)
    assert (second["do_remote_decode"], second["do_remote_prefill"]) == (False, True)
    assert first["transfer_id"] == second["transfer_id"] == PROXY_ID.transfer_id
    assert parse_proxy_id(str(PROXY_ID)) == PROXY_ID


def test_what_prefill_answers_wins() -> None:
    answer = b'{"choices": [{}], "kv_transfer_params": {"remote_port": 7, "new": [1]}, "x": 1}'
    params = payload.decode_params(PROXY_ID, payload.read_prefill(answer).params)
    sent = json.loads(msgspec.json.encode(params))
    assert (sent["remote_port"], sent["new"], sent["remote_host"]) == (7, [1], "10.0.0.1")


@pytest.mark.parametrize(
    "answer", [b'{"choices": [1]}', b'{"choices":[1],"kv_transfer_params":null}']
)
def test_a_prefill_may_answer_no_parameters(answer: bytes) -> None:
    assert payload.read_prefill(answer).params == {}


@pytest.mark.parametrize(
    "answer",
    [b"", b"ok", b"[]", b"{}", b'{"choices": []}', b'{"choices": [1], "kv_transfer_params": [1]}',
     b'{"choices": [' + b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_completion_is_no_prefill(answer: bytes) -> None:
    with pytest.raises(ValueError, match="no completion"):
        payload.read_prefill(answer)


@pytest.mark.parametrize(
    "answer",
    [b'{"choices": [1], "kv_transfer_params": {%b}}' % b",".join(
        b'"%d":1' % number for number in range(100_000)
     ),
     b'{"choices": [1], "usage": {"x": [%b1]}}' % (b"1," * payload.MAX_PARAMS_BYTES)],
    ids=["parameters", "usage"],
)  # fmt: skip
def test_what_should_be_small_in_a_prefills_answer_is(answer: bytes) -> None:
    with pytest.raises(ValueError, match="a part of more than"):
        payload.read_prefill(answer)


def test_the_choices_of_a_prefills_answer_are_not_taken_apart() -> None:
    size = payload.MAX_PREFILL_BYTES
    answer = b'{"choices":[%b1],"usage":{"prompt_tokens":7}}' % (b"1," * (size // 2))
    tracemalloc.start()
    try:
        assert payload.read_prefill(answer).prompt_tokens == 7
        assert tracemalloc.get_traced_memory()[1] < 3 * size
    finally:
        tracemalloc.stop()


def test_an_endless_number_of_choices_counts_as_one() -> None:
    fields = payload.parse(b'{"n": %b}' % (b"9" * 10_000)).fields
    assert payload.num_choices(fields) == 1


@pytest.mark.parametrize(
    "field",
    ['"key %d": 1', '"model": "%d"', '"vllm_xargs": {"a": %d}', '"\\u006bv_transfer_params": %d'],
)
def test_a_large_body_of_many_fields_is_refused_before_they_are_taken_apart(field: str) -> None:
    fields = ", ".join(field % number for number in range(60_000))
    with pytest.raises(BodyRefused, match="bytes; at most 262144 are taken"):
        payload.parse(b"{%b}" % fields.encode())


@pytest.mark.parametrize("name", [b"f%d", b"a" * 5000 + b"%d"])
def test_a_large_body_of_few_fields_that_should_be_small_is_refused(name: bytes) -> None:
    body = b'{"prompt": "p", %b}' % b", ".join(
        b'"%b": "%b"' % (name % number, b"x" * 5000) for number in range(60)
    )
    with pytest.raises(BodyRefused, match="bytes; at most 262144 are taken"):
        payload.parse(body)


@pytest.mark.parametrize("name", [b"\xed\xa0\x80", b"\xff", b"\xc0\xaf"])
def test_arguments_that_only_a_lenient_reader_takes_are_refused(name: bytes) -> None:
    """Python's reader takes the first of these names, and what stands behind it."""
    body = b'{"a": 1, "vllm_xargs": {"%b": 1, "kv_transfer_params": "evil"}}' % name
    with pytest.raises(BodyRefused, match="vllm_xargs"):
        payload.parse(body)


@pytest.mark.parametrize("name", ["prompt", "messages", "tools", "response_format"])
def test_a_large_body_of_one_large_field_is_taken(name: str) -> None:
    large = [{"role": "user", "content": "a: b"}] * 20_000
    body = json.dumps({"model": "m", name: large, "n": 2}).encode()
    asked = payload.parse(body)
    assert json.loads(decode_body(asked, PARAMS)) == {
        "model": "m", name: large, "n": 2, "kv_transfer_params": json.loads(json.dumps(PARAMS)),
    }  # fmt: skip


def test_a_prompt_is_compared_up_to_a_bound() -> None:
    asked = payload.parse(json.dumps({"prompt": "x" * 10_000_000}).encode())
    prompt = read_prompt(asked.fields)
    assert len(prompt.blocks) == MAX_BLOCKS + 1
    assert prompt.num_tokens == 10_000_002 // 4
