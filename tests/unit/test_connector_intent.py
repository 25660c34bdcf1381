"""Who takes part, and under what name: the flags, the proxy's id, and what clients make of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_engine.config import SendMode
from p2p_engine.connector.intent import (
    Direction,
    Earlier,
    Intent,
    InvalidParams,
    Stashes,
    ThisInstance,
    read_intent,
)
from p2p_engine.connector.untransferred import Reason
from p2p_engine.wire.messages import TransferKey
from p2p_engine.wire.request_ids import ProxyId

P, D = "10.0.1.2:21001", "10.0.1.3:22001"
TRANSFER_ID = "93923d63113b4b338973f24d19d4bf11"
BY_ID = f"cmpl-{ProxyId(P, D, TRANSFER_ID)}-2-1a2b3c4d"
PLAIN = "cmpl-mine-0-1a2b3c4d"
KEY = TransferKey(TRANSFER_ID, prompt_index=2)


def instance(
    role: str = "kv_both",
    address: str = P,
    send_type: SendMode = SendMode.PUT_ASYNC,
    *,
    is_registered: bool = False,
) -> ThisInstance:
    return ThisInstance(role, address, send_type, has_random_ids=True, is_registered=is_registered)


def prefill_params(**more: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, **more}


def decode_params(**more: Any) -> dict[str, Any]:
    return {"do_remote_decode": False, "do_remote_prefill": True, **more}


def at(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"remote_host": host, "remote_port": int(port)}


def at_rank(port: int, rank: Any, **more: Any) -> dict[str, Any]:
    ports = {"remote_handshake_port": port, "remote_dp_rank": rank}
    return decode_params(transfer_id="x", remote_host="h", **ports, **more)


@pytest.mark.parametrize(
    ("role", "address", "expected"),
    [
        ("kv_producer", P, Intent(Direction.SEND, KEY, D, SendMode.PUT_ASYNC)),
        ("kv_consumer", D, Intent(Direction.LOAD, KEY, P, SendMode.PUT_ASYNC)),
        ("kv_both", P, Intent(Direction.SEND, KEY, D, SendMode.PUT_ASYNC)),
        ("kv_both", D, Intent(Direction.LOAD, KEY, P, SendMode.PUT_ASYNC)),
        ("kv_producer", "10.9.9.9:1", Intent(Direction.SEND, KEY, D, SendMode.PUT_ASYNC)),
    ],
)
@pytest.mark.parametrize(
    "params", [None, {}, {"user": "x"}, prefill_params(do_remote_decode=False)]
)
def test_without_flags_the_proxys_id_and_the_role_decide(
    role: str, address: str, expected: Intent, params: dict[str, Any] | None
) -> None:
    assert read_intent(BY_ID, params, instance(role, address)) == expected


ADDRESSES = f"___prefill_addr_{P}___decode_addr_{D}"
# What a proxy tells P and what it tells D.
LEGS = {
    "our own": (str(ProxyId(P, D, TRANSFER_ID)),) * 2,
    "a counter": (f"{ADDRESSES}_17",) * 2,
    "upper case": (f"{ADDRESSES}_{TRANSFER_ID.upper()}",) * 2,
    "a client's before": (f"mine-0{ADDRESSES}_{TRANSFER_ID}",) * 2,
    "nothing behind": (ADDRESSES,) * 2,
    "Ray's replicas": (f"{ADDRESSES}___prefill_replica_id_a___rid_{TRANSFER_ID}",) * 2,
    "halves": (f"x-1___decode_addr_{D}", f"x-1___prefill_addr_{P}___"),
}
# What vLLM makes of an id, for each prompt and each choice, before its random digits.
FORMS = ["cmpl-{}-0", "cmpl-{}-1", "1_cmpl-{}-0", "chatcmpl-{}", "chatcmpl-{}_1", "2_chatcmpl-{}",
         "generate-tokens-{}", "{}_0"]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("roles", [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")])
@pytest.mark.parametrize("legs", LEGS.values(), ids=LEGS)
def test_both_legs_of_any_proxys_ids_name_one_transfer(
    legs: tuple[str, str], roles: tuple[str, str], form: str
) -> None:
    sent = read_intent(f"{form.format(legs[0])}-1a2b3c4d", None, instance(roles[0], P))
    loaded = read_intent(f"{form.format(legs[1])}-5e6f7a8b", None, instance(roles[1], D))
    assert sent is not None
    assert sent == Intent(Direction.SEND, sent.key, D, SendMode.PUT_ASYNC)
    assert loaded == Intent(Direction.LOAD, sent.key, P, SendMode.PUT_ASYNC)


@pytest.mark.parametrize("api", ["cmpl-", "chatcmpl-"])
def test_no_two_requests_have_one_name(api: str) -> None:
    forms = [form for form in FORMS if form.removeprefix("1_").removeprefix("2_").startswith(api)]
    names = [form.format(leg) for leg, _ in LEGS.values() for form in forms]
    intents = [read_intent(f"{name}-1a2b3c4d", None, instance("kv_producer")) for name in names]
    assert len({intent.key for intent in intents if intent}) == len(LEGS) * 3


def test_who_waits_for_a_push_need_not_know_who_sends() -> None:
    one = f"cmpl-request-1___decode_addr_{D}___-0"
    for prefill, decode in (("kv_producer", "kv_consumer"), ("kv_both", "kv_both")):
        sent = read_intent(f"{one}-1a2b3c4d", None, instance(prefill, P))
        loaded = read_intent(f"{one}-5e6f7a8b", None, instance(decode, D))
        key = TransferKey("request-1")
        assert sent == Intent(Direction.SEND, key, D, SendMode.PUT_ASYNC)
        assert loaded == Intent(Direction.LOAD, key, None, SendMode.PUT_ASYNC)


@pytest.mark.parametrize(
    ("external_id", "role", "address", "reason"),
    [
        (f"{ADDRESSES}_1", "kv_both", "10.0.1.4:1", Reason.NO_ADDRESS),
        (f"___prefill_addr_{P}___decode_addr_{P}_1", "kv_both", P, Reason.NO_ADDRESS),
        (f"x___prefill_addr_{P}___", "kv_producer", P, Reason.NO_ADDRESS),
        (f"x___prefill_addr_{P}___", "kv_both", P, Reason.NO_ADDRESS),
        ("___prefill_addr_10.0.1.2___decode_addr_10.0.1.3_1", "kv_both", P, Reason.UNUSABLE_ID),
        (f"{ADDRESSES}___decode_addr_10.9.9.9:1", "kv_producer", P, Reason.UNUSABLE_ID),
        (f"___decode_addr_{D}", "kv_producer", P, Reason.UNUSABLE_ID),
    ],
)
def test_an_id_that_looks_like_a_proxys_and_is_of_no_use_is_named(
    external_id: str, role: str, address: str, reason: Reason
) -> None:
    with pytest.raises(InvalidParams, match="id") as caught:
        read_intent(f"cmpl-{external_id}-0-1a2b3c4d", None, instance(role, address))
    assert caught.value.reason is reason
    assert len(str(caught.value)) < 300


def test_decode_fetches_only_from_who_is_named() -> None:
    half = f"cmpl-x___decode_addr_{D}___-0-1a2b3c4d"
    with pytest.raises(InvalidParams, match="other instance") as caught:
        read_intent(half, None, instance("kv_consumer", D, SendMode.GET))
    assert caught.value.reason is Reason.NO_ADDRESS


def test_an_instance_is_never_its_own_peer() -> None:
    with pytest.raises(InvalidParams, match="our own"):
        read_intent(PLAIN, decode_params(transfer_id="x", **at(P)), instance())


@pytest.mark.parametrize(
    "request_id",
    [
        f"cmpl-{ProxyId(P, D, TRANSFER_ID)}-{'0' * 16}-beam-0-1a2b3c4d",
        f"embd-{ProxyId(P, D, TRANSFER_ID)}-1a2b3c4d",
        BY_ID.removesuffix("-1a2b3c4d"),
    ],
)
def test_requests_of_other_kinds_are_named(request_id: str) -> None:
    with pytest.raises(InvalidParams, match="cannot be read") as caught:
        read_intent(request_id, None, instance("kv_consumer"))
    assert caught.value.reason is Reason.UNUSABLE_ID


@pytest.mark.parametrize("request_id", [PLAIN, "0-1a2b3c4d"])
def test_other_requests_are_computed_locally(request_id: str) -> None:
    assert read_intent(request_id, None, instance("kv_consumer")) is None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_flags_decide_whatever_the_role(role: str) -> None:
    key = TransferKey("name")
    sent = read_intent(PLAIN, prefill_params(transfer_id="name", **at(D)), instance(role))
    assert sent == Intent(Direction.SEND, key, D, SendMode.PUT_ASYNC)
    loaded = read_intent(PLAIN, decode_params(transfer_id="name", **at(D)), instance(role))
    assert loaded == Intent(Direction.LOAD, key, D, SendMode.PUT_ASYNC, stashes=Stashes.AND_SAYS_SO)


def test_flags_without_names_take_them_from_the_proxys_id() -> None:
    """vllm-router sends the id of the old scheme and NixlConnector's parameters together."""
    nothing = {"remote_host": None, "remote_port": None, "remote_engine_id": None}
    prefill = instance("kv_producer", is_registered=True)
    sent = read_intent(BY_ID, prefill_params(**nothing), prefill)
    assert sent == Intent(Direction.SEND, KEY, D, SendMode.PUT_ASYNC)
    decode = instance("kv_consumer", D, is_registered=True)
    loaded = read_intent(BY_ID, decode_params(), decode)
    assert loaded == Intent(Direction.LOAD, KEY, P, SendMode.PUT_ASYNC, stashes=Stashes.AND_SAYS_SO)


def test_beside_flags_an_id_of_a_client_is_a_name_and_nothing_else() -> None:
    """llm-d and production-stack pass on what a client says."""
    name = BY_ID.removeprefix("cmpl-").removesuffix("-2-1a2b3c4d")
    held = read_intent(BY_ID, prefill_params(), instance("kv_producer"))
    assert held == Intent(Direction.SEND, TransferKey(name, prompt_index=2), None, SendMode.GET)
    with pytest.raises(InvalidParams, match="transfer_id"):
        read_intent(BY_ID, decode_params(), instance("kv_consumer", D))


def test_a_producer_that_was_told_no_address_holds_its_blocks() -> None:
    held = read_intent(PLAIN, prefill_params(), instance("kv_producer"))
    assert held == Intent(Direction.SEND, TransferKey("mine"), None, SendMode.GET)


def test_what_a_producer_answered_is_fetched() -> None:
    """NixlConnector's responses name no transfer, only the request."""
    params = decode_params(remote_request_id="prefill-1", remote_block_ids=[0, 1], **at(D))
    fetched = read_intent("id-1", params, instance("kv_consumer"))
    assert fetched == Intent(
        Direction.LOAD, TransferKey("prefill-1"), D, SendMode.GET, stashes=Stashes.AND_SAYS_SO
    )


@pytest.mark.parametrize(
    ("given", "expected"), [("GET", "GET"), ("PUT", "PUT"), (None, "PUT_ASYNC")]
)
def test_a_request_may_choose_its_send_type(given: str | None, expected: str) -> None:
    for params in (prefill_params, decode_params):
        made = params(transfer_id="x", send_type=given, **at(D))
        intent = read_intent(PLAIN, made, instance())
        assert intent is not None
        assert intent.send_type is SendMode(expected)


@pytest.mark.parametrize(
    ("ports", "port"),
    [
        ({"remote_port": 8000, "remote_handshake_port": 22001}, 22001),
        ({"remote_port": 8000, "remote_handshake_port": 22001, "remote_dp_rank": 3}, 22004),
        ({"remote_handshake_port": 22001, "remote_dp_rank": "3", "send_type": "PUT"}, 22004),
        # What one of us has answered, with what llm-d adds to it.
        ({**at(D), "remote_handshake_port": 22001, "remote_dp_rank": 3, "send_type": "PUT"}, 22001),
        ({**at(D), "remote_dp_rank": 3}, 22001),
        ({"remote_handshake_port": 1, "remote_dp_rank": 1, "remote_hosts": ["10.0.1.3"]}, 2),
    ],
)
def test_the_port_is_that_of_the_ranks_directory(ports: dict[str, Any], port: int) -> None:
    intent = read_intent(
        PLAIN, decode_params(transfer_id="x", **{"remote_host": "10.0.1.3", **ports}), instance()
    )
    assert intent is not None
    assert intent.peer == f"10.0.1.3:{port}"


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1"])
def test_ipv6_hosts_stand_in_brackets(host: str) -> None:
    params = decode_params(transfer_id="x", remote_host=host, remote_port="22001")
    intent = read_intent(PLAIN, params, instance())
    assert intent is not None
    assert intent.peer == "[::1]:22001"


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "both"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill"),
        (decode_params(), "transfer_id"),
        (decode_params(transfer_id="x", send_type="GET"), "remote_host"),
        (decode_params(transfer_id="", **at(D)), "transfer_id"),
        (decode_params(transfer_id=7, **at(D)), "transfer_id"),
        (decode_params(transfer_id="x" * 257, **at(D)), "257"),
        (decode_params(transfer_id="a\nb", **at(D)), "transfer_id"),
        (decode_params(transfer_id="x", remote_host="h"), "remote_port"),
        (decode_params(transfer_id="x", remote_port=80), "remote_host"),
        (decode_params(transfer_id="x", remote_host="h", remote_port=0), "remote_port"),
        (decode_params(transfer_id="x", remote_host="h", remote_port=10**400), "remote_port"),
        (decode_params(transfer_id="x", remote_host="h", remote_port=True), "remote_port"),
        (decode_params(transfer_id="x", remote_host="h", remote_port=[80]), "remote_port"),
        (decode_params(transfer_id="x", remote_host="a b", remote_port=80), "remote_host"),
        (decode_params(transfer_id="x", remote_host="", remote_port=80), "remote_host"),
        (decode_params(transfer_id="x", remote_host={}, remote_port=80), "remote_host"),
        (
            decode_params(transfer_id="x", remote_host="h", remote_handshake_port=0),
            "remote_handshake",
        ),
        (at_rank(65000, 536), "no port for remote_dp_rank 536"),
        (at_rank(22001, -1), "remote_dp_rank"),
        (at_rank(22001, 1.5), "remote_dp_rank"),
        (at_rank(22001, 1, remote_hosts=["10.0.1.3", "10.0.1.4"]), "remote_hosts"),
        (decode_params(transfer_id="x", remote_bootstrap_addr="http://h:8998"), "nobody would"),
        (decode_params(transfer_id="x", transfer_mode="push"), "remote_host"),
        (decode_params(transfer_id="x", send_type="POST", **at(D)), "send_type"),
        (decode_params(transfer_id="x", send_type={}, **at(D)), "send_type"),
        (decode_params(transfer_id="x", is_only_choice=1, **at(D)), "is_only_choice"),
        (decode_params(transfer_id="x", is_unsalted="no", **at(D)), "is_unsalted"),
        (decode_params(remote_request_id=["x"], **at(D)), "remote_request_id"),
        (decode_params(transfer_id="x", remote_held_tokens=-1, **at(D)), "remote_held_tokens"),
        *(
            (decode_params(transfer_id="x", remote_num_tokens=wrong, **at(D)), "remote_num_tokens")
            for wrong in (-1, 1 << 33, True, 3.5, "40", [40])
        ),
        (prefill_params(remote_has_tokens=1e9, **at(D)), "remote_has_tokens"),
        (prefill_params(remote_has_tokens=1 << 33, **at(D)), "remote_has_tokens"),
        (prefill_params(remote_has_tokens=True, **at(D)), "remote_has_tokens"),
        ("a text", "str"),
        ([1], "list"),
    ],
)
def test_malformed_parameters_are_named(params: Any, what: str) -> None:
    with pytest.raises(InvalidParams, match=what) as caught:
        read_intent(f"1_{PLAIN}", params, instance())
    assert len(str(caught.value)) < 200


NAMES = ["do_remote_prefill", "do_remote_decode", "transfer_id", "remote_host", "remote_port",
         "remote_handshake_port", "remote_dp_rank", "remote_hosts", "remote_bootstrap_addr",
         "remote_block_ids", "transfer_mode", "remote_request_id", "send_type", "is_only_choice",
         "is_unsalted", "stash", "stashed_as", "stashed_host", "stashed_port",
         "remote_has_tokens", "remote_held_tokens", "remote_num_tokens"]  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def test_how_much_prefill_gives_is_said_of_the_first_prompt() -> None:
    params = decode_params(transfer_id="x", remote_num_tokens=70, **at(D))
    for prompt, number in ((PLAIN, 70), (PLAIN.replace("-0-", "-1-"), 0)):
        intent = read_intent(prompt, params, instance())
        assert intent is not None
        assert intent.num_tokens == number


def test_what_is_held_is_that_of_the_first_prompt_and_pushed() -> None:
    for prompt, number in ((PLAIN, 70), (PLAIN.replace("-0-", "-1-"), 0)):
        sent = read_intent(prompt, prefill_params(remote_has_tokens=70, **at(D)), instance())
        loaded = decode_params(transfer_id="x", remote_held_tokens=70, **at(D))
        told = read_intent(prompt, loaded, instance())
        assert sent is not None
        assert told is not None
        assert (sent.held_tokens, told.held_tokens) == (number, number)
    for more in ({}, {"send_type": "GET", **at(D)}):
        held = read_intent(PLAIN, prefill_params(remote_has_tokens=70, **more), instance())
        assert held is not None
        assert held.held_tokens == 0


STASHED = {"stashed_as": "t", "stashed_host": "d", "stashed_port": 7}
OF_NIXL = {"remote_block_ids": [[1]], "remote_request_id": "t", "remote_host": "d",
           "remote_port": 7}  # fmt: skip
STASH_KEY = TransferKey("t/stash", prompt_index=0)


@pytest.mark.parametrize("params", [STASHED, OF_NIXL], ids=["our proxy", "NixlConnector's"])
def test_an_earlier_turn_is_recalled_from_who_has_it(params: dict[str, Any]) -> None:
    intent = read_intent(PLAIN, prefill_params(**params), instance())
    assert intent is not None
    assert intent.earlier == Earlier(STASH_KEY, "d:7")
    if params is OF_NIXL:
        assert (intent.peer, intent.send_type) == (None, SendMode.GET)


@pytest.mark.parametrize(
    "params",
    [{}, {**STASHED, "stashed_as": 3}, {**STASHED, "stashed_host": None},
     {**STASHED, "stashed_port": 0}, {**STASHED, "stashed_as": "x" * 300},
     {"stashed_as": "t", "stashed_host": "10.0.1.2", "stashed_port": 21001},
     {**OF_NIXL, "remote_request_id": None}],
    ids=str,
)  # fmt: skip
def test_what_is_malformed_or_our_own_is_not_recalled(params: dict[str, Any]) -> None:
    intent = read_intent(PLAIN, prefill_params(transfer_id="now", **params), instance())
    assert intent is not None
    assert (intent.direction, intent.earlier) == (Direction.SEND, None)


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, Stashes.AND_SAYS_SO), ({"stash": True}, Stashes.QUIETLY), ({"stash": False}, Stashes.NO)],
)
def test_the_router_says_whether_decode_stashes(params: dict[str, Any], expected: Stashes) -> None:
    intent = read_intent(PLAIN, decode_params(transfer_id="t", **at(D), **params), instance())
    assert intent is not None
    assert intent.stashes is expected


@settings(deadline=None)
@given(
    st.text() | st.sampled_from([BY_ID, PLAIN, f"1_{PLAIN}"]),
    ANYTHING | st.dictionaries(st.sampled_from(NAMES), ANYTHING),
    st.sampled_from(["kv_producer", "kv_consumer", "kv_both"]),
)
def test_nothing_else_is_ever_raised(request_id: str, params: Any, role: str) -> None:
    """It runs in vLLM's scheduler, where any exception ends the engine."""
    try:
        intent = read_intent(request_id, params, instance(role))
    except InvalidParams:
        return
    assert intent is None or intent.peer != P
