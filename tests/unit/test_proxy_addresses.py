"""Which addresses an instance may have."""

from __future__ import annotations

import pytest

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import Heartbeat
from proxy.addresses import AllowList, parse_static
from proxy.fleet.registry import Registry


@pytest.mark.parametrize(
    ("allowed", "address", "is_permitted"),
    [
        ("", "anything:1", True),
        ("10.0.0.0/8", "10.3.2.1:80", True),
        ("10.0.0.0/8", "11.3.2.1:80", False),
        ("10.0.0.0/8", "ten:80", False),
        ("10.0.0.7", "10.0.0.7:80", True),
        ("gpu-7, 10.0.0.0/8", "GPU-7:80", True),
        ("gpu-7", "gpu-7.evil:80", False),
        ("fe80::/10", "[fe80::1]:80", True),
        ("fe80::/10", "10.0.0.1:80", False),
    ],
)
def test_only_the_listed_may_come(allowed: str, address: str, is_permitted: bool) -> None:
    assert (AllowList(allowed).refusal(address, is_dialled=False) == "") is is_permitted
    assert (AllowList(allowed).refusal(address) == "") is (is_permitted or address == "ten:80")


ODD = [
    "169.254.169.254", "[fd00:ec2::254]", "169.254.0.7", "[fe80::1]", "0.0.0.0", "[::]",
    "224.0.0.1", "[ff02::1]", "100.100.100.200", "168.63.129.16", "[::ffff:169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]", "[fe80::1%eth0]",
]  # fmt: skip


@pytest.mark.parametrize("host", ODD)
def test_addresses_that_no_instance_has_are_refused(host: str) -> None:
    for allowed in ("", "0.0.0.0/0,::/0"):
        assert AllowList(allowed).refusal(f"{host}:80")
        assert AllowList(allowed).refusal_to_dial("a.name", host.strip("[]"), 80)
    assert AllowList("a.name").refusal_to_dial("a.name", host.strip("[]"), 80)


@pytest.mark.parametrize(
    ("allowed", "host", "is_permitted"),
    [
        ("169.254.0.0/16", "169.254.0.7", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.254", "169.254.169.254", True),
        ("fe80::/10", "fe80::1%eth0", True),
        ("100.100.0.0/16", "100.100.100.200", False),
    ],
)
def test_link_local_addresses_may_be_listed(allowed: str, host: str, is_permitted: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    assert (AllowList(allowed).refusal(f"{shown}:80") == "") is is_permitted


def test_a_name_is_checked_by_the_address_that_is_dialled() -> None:
    allowed = AllowList("10.0.0.0/8, gpu-7")
    assert allowed.refusal_to_dial("any.name", "10.1.2.3", 80) == ""
    assert "not among the allowed" in allowed.refusal_to_dial("any.name", "11.1.2.3", 80)
    assert allowed.refusal_to_dial("GPU-7", "11.1.2.3", 80) == ""
    assert "metadata" in AllowList("").refusal_to_dial("2852039166", "169.254.169.254", 80)


@pytest.mark.parametrize(
    ("own", "address", "is_own"),
    [
        (("0.0.0.0", 10001), "127.0.0.1:10001", True),
        (("0.0.0.0", 10001), "127.0.0.9:10001", True),
        (("::", 10001), "[::1]:10001", True),
        (("0.0.0.0", 10001), "127.0.0.1:10002", False),
        (("0.0.0.0", 10001), "192.0.2.1:10001", False),
        (("127.0.0.1", 10001), "127.0.0.1:10001", True),
        (("192.0.2.1", 10001), "127.0.0.1:10001", False),
    ],
)
def test_the_proxy_is_no_instance_of_itself(
    own: tuple[str, int], address: str, is_own: bool
) -> None:
    assert ("own" in AllowList("", [own]).refusal(address)) is is_own


@pytest.mark.parametrize("wrong", [("11.0.0.1:1", "10.0.0.1:2"), ("10.0.0.1:1", "11.0.0.1:2")])
def test_both_addresses_of_a_heartbeat_must_be_allowed(wrong: tuple[str, str]) -> None:
    registry = Registry(allowed=AllowList("10.0.0.0/8"))
    registry.observe(Heartbeat("P", "10.0.0.1:1", "10.0.0.1:2"), 0.0)
    with pytest.raises(RemoteProtocolError, match="not among the allowed"):
        registry.observe(Heartbeat("P", *wrong), 0.0)


def test_a_static_list_names_one_or_two_addresses() -> None:
    assert parse_static("") == []
    assert parse_static("a:1, [::1]:2@b:3,") == [("a:1", ""), ("[::1]:2", "b:3")]
