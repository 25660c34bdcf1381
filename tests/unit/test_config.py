"""EngineConfig: every key as string and as number, and every wrong one refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_engine.config import EXTRA_KEYS, EngineConfig, SendMode
from p2p_engine.errors import ConfigError, P2pError

PROXY = {"proxy_ip": "10.0.0.1", "proxy_port": "30001", "http_port": "8000"}

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("host", "10.1.2.3", "10.1.2.3"),
    ("kv_port_range", "20000-20100", (20000, 20100)),
    ("kv_port_range", " 20000 - 20100 ", (20000, 20100)),
    ("kv_port_range", [20000, "20100"], (20000, 20100)),
    ("kv_port_range", (1, 1), (1, 1)),
    ("send_type", "PUT", SendMode.PUT),
    ("send_type", "PUT_ASYNC", SendMode.PUT_ASYNC),
    ("send_type", "GET", SendMode.GET),
    ("kv_buffer_size", "1e9", 10**9),
    ("kv_buffer_size", 8e9, 8 * 10**9),
    ("kv_buffer_size", 0, 0),
    ("mem_pool_size_gb", "32", 32.0),
    ("mem_pool_size_gb", 0.5, 0.5),
    ("chunk_bytes", "4e6", 4 * 10**6),
    ("transports", "shm,tcp", ("shm", "tcp")),
    ("transports", "shm,nixl,tcp", ("shm", "nixl", "tcp")),
    ("transports", " tcp , shm ", ("tcp", "shm")),
    ("transports", ["tcp"], ("tcp",)),
    ("nccl_num_channels", "16", 16),
    ("nccl_num_channels", 8, 8),
    ("nccl_max_groups", "64", 64),
    ("nccl_register", "true", True),
    ("nccl_library", "/opt/libnccl.so.2", "/opt/libnccl.so.2"),
    ("page_lock", "true", True),
    ("page_lock", 0, False),
    ("layerwise", "true", True),
    ("checksum", "true", True),
    ("page_lock", True, True),
    ("http_host", "vllm-0.pods", "vllm-0.pods"),
    ("http_host", "", ""),
    ("host", "[fd00::1]", "[fd00::1]"),
    ("key_file", "/etc/fleet.key", "/etc/fleet.key"),
    ("accept_differences", "hf.vision_config, dtype,", ("dtype", "hf.vision_config")),
    ("accept_differences", ["dtype", "dtype"], ("dtype",)),
    ("reset_keeps_weights", "true", True),
    ("connect_timeout_seconds", "5", 5.0),
    ("transfer_timeout_seconds", 60, 60.0),
    ("lease_seconds", "0.5", 0.5),
    ("max_renewal_seconds", "600", 600.0),
    ("stash_seconds", "600", 600.0),
    ("peer_timeout_seconds", 10, 10.0),
    ("retry_seconds", "1", 1.0),
    ("proxy_port", None, 0),
    ("kv_buffer_size", None, 10**9),
]

REFUSED: list[tuple[str, Any]] = [
    ("host", 5),
    ("host", "0.0.0.0"),
    ("host", "::"),
    ("host", "[::]"),
    ("host", "*"),
    ("host", "224.0.0.1"),
    ("http_host", "0.0.0.0"),
    ("kv_port_range", "20000"),
    ("kv_port_range", 20000),
    ("kv_port_range", "20100-20000"),
    ("kv_port_range", "0-5"),
    ("kv_port_range", "1-65536"),
    ("kv_port_range", "-5--1"),
    ("kv_port_range", {}),
    ("nccl_num_channels", 3),
    ("nccl_max_groups", 0),
    ("send_type", "put"),
    ("send_type", ["PUT"]),
    ("kv_buffer_size", -1),
    ("kv_buffer_size", 0.5),
    ("kv_buffer_size", "nan"),
    ("kv_buffer_size", "inf"),
    ("kv_buffer_size", "8 GB"),
    ("kv_buffer_size", 10**400),
    ("kv_buffer_size", True),
    ("kv_buffer_size", [1]),
    ("mem_pool_size_gb", -0.1),
    ("chunk_bytes", 0),
    ("mem_pool_size_gb", "many"),
    ("transports", ""),
    ("transports", "rdma"),
    ("transports", "shm,shm"),
    ("transports", "nixl,shm"),
    ("transports", []),
    ("transports", 5),
    ("transports", [["shm"]]),
    ("nccl_num_channels", 0),
    ("nccl_num_channels", 65),
    ("nccl_num_channels", 1.5),
    ("page_lock", "yes please"),
    ("checksum", 2),
    ("layerwise", "auto"),
    ("proxy_port", 65536),
    ("proxy_port", "x"),
    ("http_port", -1),
    ("transfer_timeout_seconds", 0),
    ("lease_seconds", 1e9),
    ("max_renewal_seconds", 0),
    ("stash_seconds", -1),
    ("retry_seconds", "soon"),
]


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_strings_and_numbers_both_work(key: str, value: Any, expected: Any) -> None:
    assert getattr(EngineConfig.from_extra_config({key: value}), key) == expected


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_impossible_value_is_named_with_what_is_allowed(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_extra_config({**PROXY, key: value})
    text = str(refusal.value)
    assert text.startswith(f"{key}={value!r}")
    assert "allowed: " in text


def test_every_key_is_covered() -> None:
    covered = {key for key, *_ in ACCEPTED} | set(PROXY)
    assert covered == EXTRA_KEYS


def test_settings_of_the_old_connector_are_all_accepted() -> None:
    config = EngineConfig.from_extra_config(
        {
            **PROXY,
            "send_type": "PUT_ASYNC",
            "nccl_num_channels": "16",
            "mem_pool_size_gb": "20",
            "kv_buffer_size": "1e1",
        }
    )
    assert (config.proxy_port, config.http_port, config.kv_buffer_size) == (30001, 8000, 10)
    assert config.pool_bytes == 20 << 30


def test_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'send_typ'='GET'.*send_type"):
        EngineConfig.from_extra_config({"send_typ": "GET"})


@pytest.mark.parametrize("key", ["port", "device"])
def test_what_vllm_decides_is_not_a_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        EngineConfig.from_extra_config({key: 1})


@pytest.mark.parametrize("missing", list(PROXY))
def test_proxy_needs_all_of_its_settings(missing: str) -> None:
    given = {key: value for key, value in PROXY.items() if key != missing}
    with pytest.raises(ConfigError, match=missing):
        EngineConfig.from_extra_config(given)


def test_overrides_win() -> None:
    assert EngineConfig.from_extra_config({"host": "a"}, host="b", port=5).host == "b"


def test_the_transports_are_those_of_the_device() -> None:
    assert EngineConfig().transports == ("shm", "tcp")
    assert EngineConfig(device="cuda:3").transports == ("cuda_ipc", "nccl")
    assert EngineConfig(device="cuda:3").device_index == 3
    assert EngineConfig(device="cuda").device_index == 0
    for device, transport in (("cpu", "nccl"), ("cuda", "tcp")):
        with pytest.raises(ConfigError, match=f"{transport}.*device='{device}'"):
            EngineConfig(device=device, transports=(transport,)).check_device()
    with pytest.raises(ConfigError, match="device='xpu'"):
        EngineConfig(device="xpu")


def test_settings_move_to_the_device_of_the_cache() -> None:
    plain = EngineConfig().on_device("cuda:1")
    assert (plain.device, plain.transports) == ("cuda:1", ("cuda_ipc", "nccl"))
    assert plain.pool_bytes <= 4 << 30
    chosen = EngineConfig(mem_pool_size_gb=9).on_device("cuda:1")
    assert chosen.pool_bytes == 9 << 30


def test_the_default_pool_is_shared_out_among_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_engine.config.memory_bytes", lambda: 64 << 30)
    assert EngineConfig().pool_bytes == 16 << 30
    assert EngineConfig(num_local_ranks=8).pool_bytes == 2 << 30
    assert EngineConfig(num_local_ranks=8, mem_pool_size_gb=5).pool_bytes == 5 << 30
    assert EngineConfig().on_device("cuda").pool_bytes == 4 << 30  # page-locked at start
    assert EngineConfig(num_local_ranks=8).on_device("cuda").pool_bytes == 2 << 30
    assert EngineConfig(mem_pool_size_gb=0).pool_bytes == 0


def test_an_engine_checks_its_device() -> None:
    with pytest.raises(ConfigError, match="does not move memory"):
        EngineConfig(transports=("tcp",)).on_device("cuda:1").check_device()


def test_error_is_both_ours_and_a_value_error() -> None:
    assert issubclass(ConfigError, P2pError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    "given", ["10.0.0.1,10.0.0.2", "10.0.0.1, 10.0.0.2", ["10.0.0.1", "10.0.0.2"]]
)
def test_several_proxies_are_a_list_or_a_text(given: Any) -> None:
    config = EngineConfig(**{**PROXY, "proxy_ip": given})
    assert config.proxy_hosts == ["10.0.0.1", "10.0.0.2"]
    assert EngineConfig().proxy_hosts == []


@pytest.mark.parametrize("wrong", [3, ["a", 3], {"a": "b"}])
def test_what_is_no_host_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="a host, or several"):
        EngineConfig(**{**PROXY, "proxy_ip": wrong})
