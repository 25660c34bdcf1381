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
    assert AllowList(allowed).permits(address) is is_permitted


@pytest.mark.parametrize("wrong", [("11.0.0.1:1", "10.0.0.1:2"), ("10.0.0.1:1", "11.0.0.1:2")])
def test_both_addresses_of_a_heartbeat_must_be_allowed(wrong: tuple[str, str]) -> None:
    registry = Registry(allowed=AllowList("10.0.0.0/8"))
    registry.observe(Heartbeat("P", "10.0.0.1:1", "10.0.0.1:2"), 0.0)
    with pytest.raises(RemoteProtocolError, match="not among the allowed"):
        registry.observe(Heartbeat("P", *wrong), 0.0)


def test_a_static_list_names_one_or_two_addresses() -> None:
    assert parse_static("") == []
    assert parse_static("a:1, [::1]:2@b:3,") == [("a:1", ""), ("[::1]:2", "b:3")]
