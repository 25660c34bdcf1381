"""The number of cached tokens, wherever a stream is cut, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.openai.usage import CachedTokens, CountsAtEnd

USAGE = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":%d},"total":1}}'


def passed(content: bytes, cuts: list[int], num_tokens: int = 7) -> bytes:
    usage = CachedTokens({"cached_tokens": num_tokens})
    edges = [0, *sorted(cuts), len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges)]
    return b"".join(map(usage.feed, pieces)) + usage.finish()


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=6), st.integers(0, 10**9), st.integers(0, 10**9))
def test_it_is_replaced_wherever_the_pieces_end(cuts: list[int], old: int, new: int) -> None:
    content = b"data: %b\n\ndata: [DONE]\n\n" % (USAGE % old)
    cuts = [cut for cut in cuts if cut < len(content)]
    assert passed(content, cuts, new) == b"data: %b\n\ndata: [DONE]\n\n" % (USAGE % new)


@settings(deadline=None)
@given(st.text('"cached_tokens: 19\\', max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_what_the_model_says_is_never_changed(text: str, cuts: list[int]) -> None:
    content = json.dumps({"text": f'"cached_tokens":5 {text}'}).encode()
    assert passed(content, [cut for cut in cuts if cut < len(content)]) == content


def test_only_what_may_go_on_is_held_back() -> None:
    usage = CachedTokens({"cached_tokens": 7})
    assert usage.feed(b'{"x": "y", "cach') == b'{"x": "y", '
    assert usage.feed(b'e"') == b'"cache'  # another may begin
    assert usage.feed(b"\n\n") == b'"\n\n'
    assert usage.feed(b'"cached_tokens":12') == b""
    assert usage.feed(b"3") == b""
    assert usage.feed(b"}") == b'"cached_tokens":7}'
    assert usage.feed(b'"cached_tokens":null') == b'"cached_tokens":null'


@pytest.mark.parametrize("end", [b'"cached_tok', b'"cached_tokens":', b'"'])
def test_an_end_in_the_middle_is_passed_as_it_is(end: bytes) -> None:
    assert passed(end, []) == end


@settings(deadline=None)
@given(st.lists(st.integers(0, 120), max_size=6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_several_counts_are_replaced_at_once(cuts: list[int], new: int, cached: int) -> None:
    usage = CachedTokens({"input_tokens": new, "cache_read_input_tokens": cached})
    body = '{"usage":{"input_tokens":%d,"output_tokens":4,"cache_read_input_tokens": %d}}'
    content = (body % (1, 99)).encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges)]
    said = b"".join(map(usage.feed, pieces)) + usage.finish()
    assert said == (body % (new, cached)).encode()


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6), st.sampled_from([0, 100, 70_000]))
def test_what_looks_like_a_count_before_the_usage_stays(cuts: list[int], size: int) -> None:
    """The arguments of a tool are JSON in a message."""
    usage = CountsAtEnd({"input_tokens": 7})
    said = b'{"content":[{"input":{"usage":{"input_tokens":1},"input_tokens":2,"x":"%b"}}],' % (
        b"y" * size
    )
    content = said + b'"usage":{"input_tokens":3,"output_tokens":4}}'
    edges = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges)]
    passed_on = b"".join(map(usage.feed, pieces)) + usage.finish()
    assert passed_on == said + b'"usage":{"input_tokens":7,"output_tokens":4}}'
