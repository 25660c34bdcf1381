"""Request ids: the table of what vLLM makes of them, and what must not be taken for one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_engine.wire.request_ids import (
    EngineId,
    ProxyId,
    looks_like_proxy_id,
    new_transfer_id,
    parse_engine_id,
    parse_proxy_id,
)

TRANSFER_ID = "93923d63113b4b338973f24d19d4bf11"
PROXY_ID = ProxyId("10.0.1.2:21001", "10.0.1.3:22001", TRANSFER_ID)
NEARLY_ENGINE_IDS = st.from_regex(r"[0-9]?_?(chat)?cmpl-[-_a-f0-9]{0,40}", fullmatch=True)
EXTERNAL_IDS = [str(PROXY_ID), "my-own-id", "deadbeef-deadbeef", "cmpl-0", "a_b", "x-3-12345678"]


def engine_request_id(
    kind: str, external_id: str, index: int | None, child: int | None, *, is_randomized: bool
) -> str:
    """Derive an engine's id as vLLM does: prompt index, random suffix, then the child's index."""
    separator = "-" if kind == "cmpl" else "_"
    request_id = f"{kind}-{external_id}" + ("" if index is None else f"{separator}{index}")
    if is_randomized:
        request_id += "-1a2b3c4d"
    return request_id if child is None else f"{child}_{request_id}"


@pytest.mark.parametrize("is_randomized", [True, False])
@pytest.mark.parametrize("child", [None, 0, 1, 15])
@pytest.mark.parametrize(
    ("kind", "index"),
    [("cmpl", 0), ("cmpl", 7), ("chatcmpl", None), ("chatcmpl", 2), ("generate-tokens", None)],
)
@pytest.mark.parametrize("external_id", EXTERNAL_IDS)
def test_engine_id_gives_back_what_it_was_made_of(
    kind: str, external_id: str, index: int | None, child: int | None, is_randomized: bool
) -> None:
    request_id = engine_request_id(kind, external_id, index, child, is_randomized=is_randomized)
    expected = EngineId(external_id, index or 0, child or 0)
    assert parse_engine_id(request_id, is_randomized=is_randomized) == expected


def test_suffix_is_never_guessed() -> None:
    """An external id may end in eight hexadecimal digits of its own."""
    external_id = "run-1a2b3c4d"
    assert parse_engine_id(f"chatcmpl-{external_id}", is_randomized=False) == EngineId(external_id)
    assert parse_engine_id(f"cmpl-{external_id}-0", is_randomized=True) is None


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        "0-1a2b3c4d",
        "cmpl--0-1a2b3c4d",
        "cmpl-x-1a2b3c4d",
        "cmpl-x-01-1a2b3c4d",
        "cmpl-x-0-1A2B3C4D",
        "cmpl-x-0-1a2b3c4d-0",
        "resp_68ab-1a2b3c4d",
        "-1_cmpl-x-0-1a2b3c4d",
        "0_1_cmpl-x-0-1a2b3c4d",
        "x-chatcmpl-y-1a2b3c4d",
        "embd-x-0-1a2b3c4d",
    ],
)
def test_other_request_ids_are_not_parsed(request_id: str) -> None:
    assert parse_engine_id(request_id, is_randomized=True) is None


def test_beam_search_derives_no_proxy_id() -> None:
    """Each beam has a prompt of its own; its id must not lead to the parent's KV."""
    for kind in ("cmpl", "chatcmpl"):
        for digits in (16, 32):  # of vLLM's random part, by release
            beam = f"{kind}-{PROXY_ID}-{new_transfer_id()[:digits]}-beam-0-1a2b3c4d"
            assert parse_engine_id(beam, is_randomized=True) is None


def test_the_turns_of_a_response_differ() -> None:
    """vLLM makes no prefix for them, and counts a response's calls of tools."""
    turns = [f"{PROXY_ID}_{turn}-1a2b3c4d" for turn in (0, 1)]
    parsed = [parse_engine_id(turn, is_randomized=True) for turn in turns]
    later = EngineId(f"{PROXY_ID}_1", is_later_call=True)
    assert parsed == [EngineId(f"{PROXY_ID}_0"), later]


@pytest.mark.parametrize("text", ["resp_68ab_2", "cmpl-resp_68ab_2-0", "job_2"])
def test_only_a_responses_number_is_that_of_a_call(text: str) -> None:
    parsed = parse_engine_id(text, is_randomized=False)
    assert parsed is not None
    assert parsed.is_later_call == (text == "resp_68ab_2")


@pytest.mark.parametrize(
    "address", ["10.0.1.2:1", "localhost:65535", "[::1]:21001", "node-3.rack_2.example.org:80"]
)
def test_proxy_id_round_trip(address: str) -> None:
    for proxy_id in (
        ProxyId(address, "10.0.1.3:22001", TRANSFER_ID),
        ProxyId("10.0.1.3:22001", address, TRANSFER_ID),
    ):
        assert parse_proxy_id(str(proxy_id)) == proxy_id


def test_the_documented_id_parses() -> None:
    documented = (
        "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_"
        "93923d63113b4b338973f24d19d4bf11-0"
    )
    engine_id = parse_engine_id(documented, is_randomized=False)
    assert engine_id is not None
    assert parse_proxy_id(engine_id.external_id) == PROXY_ID


ADDRESSES = "___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001"
# Around the addresses, what proxies in use write.
PROXIES = {
    "a counter": f"{ADDRESSES}_17",
    "16 digits": f"{ADDRESSES}_{TRANSFER_ID[:16]}",
    "a dashed UUID": f"{ADDRESSES}_93923d63-113b-4b33-8973-f24d19d4bf11",
    "upper case": f"{ADDRESSES}_{TRANSFER_ID.upper()}",
    "a line end": f"{ADDRESSES}_{TRANSFER_ID}x",
    "by hand": f"{ADDRESSES}_bug1craft001",
    "nothing": ADDRESSES,
    "another port": f"{ADDRESSES}_user:99_{TRANSFER_ID}",
    "a client's": f"client_req_abc{ADDRESSES}_{TRANSFER_ID}",
    "before": f"req17{ADDRESSES}___",
    "Ray": f"{ADDRESSES}___prefill_replica_id_r1___decode_replica_id_r2___rid_17",
    "the other order": "___decode_addr_10.0.1.3:22001___prefill_addr_10.0.1.2:21001_17",
    "sizes between": (
        f"___prefill_addr_10.0.1.2:21001_tp_8___decode_addr_10.0.1.3:22001_tp_4_{TRANSFER_ID}"
    ),
}


@pytest.mark.parametrize("text", PROXIES.values(), ids=PROXIES)
def test_the_whole_id_names_the_transfer(text: str) -> None:
    assert parse_proxy_id(text) == ProxyId("10.0.1.2:21001", "10.0.1.3:22001", text)


@pytest.mark.parametrize("before", ["17", "chatcmpl-x", "a___b"])
@pytest.mark.parametrize("tail", ["", "_tag"])
def test_what_both_legs_have_of_half_an_id_names_the_transfer(before: str, tail: str) -> None:
    """Each leg names the other instance. The old connector asked for `___` behind P's."""
    name = before + tail.strip("_")
    to_prefill = f"{before}___decode_addr_10.0.1.3:22001{tail}"
    to_decode = f"{before}___prefill_addr_10.0.1.2:21001___{tail.strip('_')}"
    assert parse_proxy_id(to_prefill) == ProxyId("", "10.0.1.3:22001", name)
    assert parse_proxy_id(to_decode) == ProxyId("10.0.1.2:21001", "", name)


@pytest.mark.parametrize("before", ["x" * 500, "a\nb", "\ud800", "é"])
def test_a_name_that_a_message_cannot_carry_is_digested(before: str) -> None:
    texts = [f"{before}{ADDRESSES}_{tail}" for tail in (1, 1, 2)]
    names = [parsed.transfer_id for text in texts if (parsed := parse_proxy_id(text))]
    assert names[0] == names[1] != names[2]
    assert all(len(name) == 32 and name.isalnum() for name in names)


@pytest.mark.parametrize(
    "text",
    [
        f"___prefill_addr_10.0.1.2___decode_addr_10.0.1.3_{TRANSFER_ID}",
        f"___prefill_addr_10.0.1.2:0___decode_addr_10.0.1.3:65536_{TRANSFER_ID}",
        f"___prefill_addr_:21001_{TRANSFER_ID}",
        f"___prefill_addr_::1:21001_{TRANSFER_ID}",
        f"___prefill_addr_0___decode_addr_1_{TRANSFER_ID}",
        f"___prefill_addr_host:10.0.1.2,handshake:6301,notify:61005_{TRANSFER_ID}",
        f"{PROXY_ID}___decode_addr_10.0.1.4:22001",
        f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3_{TRANSFER_ID}",
        f"___prefill_addr_10.0.1.2:21001___decode_addr_http://10.0.1.3:22001_{TRANSFER_ID}",
        f"___prefill_addr_10.0.1.2:21001___decode_addr_::1:22001_{TRANSFER_ID}",
        f"{ADDRESSES}.1",
        f"{ADDRESSES}:{TRANSFER_ID}",
        "___decode_addr_10.0.1.3:22001",
    ],
)
def test_what_is_almost_a_proxy_id_is_none_and_looks_like_it(text: str) -> None:
    assert parse_proxy_id(text) is None
    assert looks_like_proxy_id(text)


@pytest.mark.parametrize("text", ["", TRANSFER_ID, "prefill_addr_10.0.1.2:21001"])
def test_other_ids_do_not_look_like_a_proxys(text: str) -> None:
    assert parse_proxy_id(text) is None
    assert not looks_like_proxy_id(text)


@settings(deadline=None)
@given(
    st.text(max_size=200) | st.from_regex(r"[0-9]?_?(chat)?cmpl-[-_a-f0-9]{0,40}", fullmatch=True)
)
def test_parsers_never_raise(text: str) -> None:
    parse_proxy_id(text)
    for is_randomized in (True, False):
        parsed = parse_engine_id(text, is_randomized=is_randomized)
        assert parsed is None or parsed.external_id in text


def test_long_ids_take_linear_time() -> None:
    """A header may hold a million characters; a regex that backtracks would hang the scheduler."""
    for text in (
        "cmpl-" + "-0" * 500_000,
        "chatcmpl-" + "_1" * 500_000 + "-",
        str(PROXY_ID) * 5000,
    ):
        parse_engine_id(text, is_randomized=False)
        parse_proxy_id(text)


def test_transfer_ids_differ() -> None:
    assert len({new_transfer_id() for _ in range(100)}) == 100
    assert all(parse_proxy_id(str(ProxyId("a:1", "b:2", new_transfer_id()))) for _ in range(10))


def test_importing_it_loads_neither_torch_nor_zmq() -> None:
    code = "import sys, p2p_engine.wire.request_ids; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "zmq", "vllm"} & set(loaded.stdout.split())
