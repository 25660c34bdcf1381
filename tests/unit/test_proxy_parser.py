"""What a parser process finds in a large body is what the proxy finds in the same body itself."""

from __future__ import annotations

import json

import msgspec
import pytest

from proxy.http.memory import BodyRefused
from proxy.openai import payload
from proxy.openai.parser import COMPARED_BYTES, SPAN_BYTES, Parsed, parse
from tests.attack.clients import KINDS, body_of


def values_of(body: bytes, parsed: Parsed) -> dict[str, bytes]:
    spans = {name: body[start:end] for name, (start, end, _) in parsed.spans.items()}
    return {**parsed.fields, **spans}


@pytest.mark.parametrize("kind", [*KINDS, "keys"])
@pytest.mark.parametrize("num_bytes", [SPAN_BYTES, 1 << 20])
def test_a_parser_finds_what_the_proxy_finds(kind: str, num_bytes: int) -> None:
    body = body_of(kind, num_bytes) + b" \r\n\t" * SPAN_BYTES
    parsed = parse(memoryview(body))
    if parsed.error is not None:
        with pytest.raises(BodyRefused) as caught:
            payload.parse(body)
        assert (400, caught.value.code, str(caught.value)) == parsed.error
        return
    asked = payload.parse(body)
    expected = {k: bytes(v) for k, v in asked.fields.items() if isinstance(v, msgspec.Raw)}
    assert values_of(body, parsed) == expected
    assert (body[: parsed.end],) == asked.body
    assert all(len(value) <= SPAN_BYTES for value in parsed.fields.values())


def test_large_values_are_told_by_their_places() -> None:
    asked = {
        "tools": ["x" * COMPARED_BYTES], "chat_template": "y" * (COMPARED_BYTES // 2),
        "model": "m", "messages": ["z" * SPAN_BYTES],
    }  # fmt: skip
    body = json.dumps(asked).encode()
    parsed, again = parse(memoryview(body)), parse(memoryview(b" " + body))
    assert set(parsed.spans) == {"tools", "messages"}
    assert set(parsed.fields) == {"chat_template", "model"}
    assert json.loads(values_of(body, parsed)["tools"]) == asked["tools"]
    digests = {name: digest for name, (_, _, digest) in parsed.spans.items()}
    assert digests == {name: digest for name, (_, _, digest) in again.spans.items()}
    assert digests["tools"]


def test_nothing_that_only_the_proxy_may_say_is_found() -> None:
    large = json.dumps({"remote_host": "x" * SPAN_BYTES})
    asked = f"""{{"prompt": "p", "kv_transfer_params": {large}, "request_id": {large},
        "\\u006bv_transfer_params": 1, "vllm_xargs": {{"ec_transfer_params": {large}, "a": 1}}}}"""
    parsed = parse(memoryview(asked.encode()))
    assert parsed.is_changed
    assert (parsed.fields, parsed.spans) == (
        {"prompt": b'"p"', "vllm_xargs": b'{"a":1}'}, {},
    )  # fmt: skip
