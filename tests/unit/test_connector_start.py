"""Before the first request: registration, settings, and what is refused by name."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from p2p_engine.config import SendMode
from p2p_engine.connector import P2pNcclConnector, compat, register
from p2p_engine.connector.support import (
    check_supported,
    directory_port,
    identifies_media,
    num_local_ranks,
    read_config,
)
from p2p_engine.errors import ConfigError
from tests.doubles.start_config import configs

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_registration_is_idempotent_and_by_the_class_name() -> None:
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name(P2pNcclConnector.__name__)
    assert found is P2pNcclConnector
    assert supports_hma(P2pNcclConnector)
    assert not P2pNcclConnector.__abstractmethods__


def test_registration_loads_neither_the_engine_nor_torch() -> None:
    code = "import sys, p2p_engine.connector; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "vllm", "p2p_engine.engine"} & set(loaded.stdout.split())


def test_both_ways_of_naming_the_connector_find_it() -> None:
    for module_path in ("p2p_engine.connector", None):
        config = SimpleNamespace(
            kv_connector="P2pNcclConnector", kv_connector_module_path=module_path
        )
        register()
        found = KVConnectorFactory.get_connector_class(config)  # type: ignore[arg-type]
        assert found is P2pNcclConnector


@pytest.mark.parametrize(
    ("version", "outcome"),
    [("0.29.0", True), ("0.32.0+cpu", True), ("0.33.1rc1", True), ("0.34.0", False),
     ("1.0", False), ("dev", False), ("0.28.9", None), ("0.9.2", None)],
)  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, outcome: bool | None) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    if outcome is None:
        with pytest.raises(
            ConfigError, match=f"{version} is not supported; supported: 0.29 to 0.33"
        ):
            compat.check_version()
    else:
        assert compat.check_version() is outcome


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep"),
        ({"enable_fault_tolerance": True}, "enable_fault_tolerance"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts.*kv_producer"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_supported(configs(**changes)[0])


@pytest.mark.parametrize(
    "changes", [{}, {"enable_return_routed_experts": True, "kv_role": "kv_producer"}]
)
def test_what_is_supported_is_accepted(changes: dict[str, Any]) -> None:
    check_supported(configs(**changes)[0])


@pytest.mark.parametrize(
    ("tells", "backend", "named"),
    [(False, "cumem", "needs vLLM 0.33"), (True, "criu", "sleep_mode_backend=criu"),
     (True, "cumem", "")],
)  # fmt: skip
def test_sleep_mode_needs_a_vllm_that_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, tells: bool, backend: str, named: str
) -> None:
    monkeypatch.setattr(compat, "TELLS_OF_SLEEP", tells)
    vllm_config, _ = configs(enable_sleep_mode=True, sleep_mode_backend=backend)
    with pytest.raises(ConfigError, match=named) if named else contextlib.nullcontext():
        check_supported(vllm_config)


def test_records_of_experts_are_refused_where_older_releases_have_the_option() -> None:
    vllm_config, _ = configs()
    del vllm_config.aux_output_config
    vllm_config.model_config.enable_return_routed_experts = True
    with pytest.raises(ConfigError, match="enable_return_routed_experts"):
        check_supported(vllm_config)


@pytest.mark.parametrize(
    ("kv_port", "rank", "port"),
    [(21001, 0, 21001), (21001, 3, 21004), (0, 0, 0), (0, 3, 0), (65535, 0, 65535)],
)
def test_each_data_parallel_rank_has_a_port(kv_port: int, rank: int, port: int) -> None:
    """0 is any free one, for each."""
    vllm_config, transfer = configs(data_parallel_index=rank)
    transfer.kv_port = kv_port
    assert directory_port(transfer, vllm_config.parallel_config) == port


@pytest.mark.parametrize(("kv_port", "rank"), [(65535, 1), (65536, 0), (-1, 0), (-1, 2)])
def test_a_port_that_cannot_be_is_refused(kv_port: int, rank: int) -> None:
    vllm_config, transfer = configs(data_parallel_index=rank)
    transfer.kv_port = kv_port
    with pytest.raises(ConfigError, match=f"kv_port={kv_port} for data-parallel rank {rank}"):
        directory_port(transfer, vllm_config.parallel_config)


OLD_EXTRA = {
    "proxy_ip": "10.0.1.1", "proxy_port": "30001", "http_port": "20001", "send_type": "PUT",
    "nccl_num_channels": "16", "mem_pool_size_gb": "0.5",
}  # fmt: skip


def test_the_old_connectors_settings_are_accepted_as_they_were_written() -> None:
    transfer: Any = SimpleNamespace(kv_buffer_size="1e1", kv_connector_extra_config=OLD_EXTRA)
    config = read_config(transfer)
    assert (config.proxy_ip, config.proxy_port, config.http_port) == ("10.0.1.1", 30001, 20001)
    assert config.send_type is SendMode.PUT
    assert (config.kv_buffer_size, config.pool_bytes) == (10, 1 << 29)


def test_the_extra_settings_win_and_0_32_has_no_other() -> None:
    extra = {"kv_buffer_size": "8e9", "host": "10.0.0.7"}
    for transfer in (
        SimpleNamespace(kv_buffer_size=1e9, kv_connector_extra_config=extra),
        SimpleNamespace(kv_connector_extra_config=extra),
    ):
        config = read_config(transfer)  # type: ignore[arg-type]
        assert (config.kv_buffer_size, config.host) == (8 * 10**9, "10.0.0.7")
    with pytest.raises(ConfigError, match="unknown key 'kv_bufer_size'"):
        read_config(SimpleNamespace(kv_connector_extra_config={"kv_bufer_size": 1}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="key_file"):  # before the model is loaded
        read_config(SimpleNamespace(kv_connector_extra_config={"key_file": "/no/such"}))  # type: ignore[arg-type]


def test_the_host_is_vllms_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.9")
    assert read_config(SimpleNamespace(kv_connector_extra_config={})).host == "127.0.0.9"  # type: ignore[arg-type]


NO_ROUTE = "host is required.*0.0.0.0.*kv_connector_extra_config"


def lost(monkeypatch: pytest.MonkeyPatch, seen: dict[str, str], **extra: Any) -> str:
    """The host of an instance on a machine without a default route, which proxies see as told."""
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")  # as vLLM's get_ip says there

    def route_from(host: str) -> str:
        if host not in seen:
            raise OSError(f"no route to {host}")
        return seen[host]

    monkeypatch.setattr("p2p_engine.connector.support.route_from", route_from)
    proxy = {"proxy_port": 30001, "http_port": 8000} if "proxy_ip" in extra else {}
    transfer: Any = SimpleNamespace(kv_connector_extra_config={**proxy, **extra})
    return read_config(transfer).host


def test_without_a_default_route_the_host_is_the_one_that_the_proxy_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {"10.0.0.1": "10.0.0.7", "10.0.0.2": "10.0.0.7"}
    assert lost(monkeypatch, seen, proxy_ip="10.0.0.1") == "10.0.0.7"
    assert lost(monkeypatch, seen, proxy_ip="10.0.0.1,10.0.0.2") == "10.0.0.7"
    assert lost(monkeypatch, {}, host="10.0.0.9") == "10.0.0.9"


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"a": "127.0.0.1", "b": "127.0.0.1"},  # a proxy here says nothing of peers elsewhere
        {"a": "10.0.0.7", "b": "10.1.0.7"},
        {"a": "10.0.0.7"},
    ],
)
def test_a_host_that_cannot_be_known_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, seen: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=NO_ROUTE):
        lost(monkeypatch, seen, proxy_ip="a,b")
    with pytest.raises(ConfigError, match=NO_ROUTE):
        lost(monkeypatch, seen)


@pytest.mark.parametrize(
    ("changes", "num_ranks"),
    [
        ({}, 1),
        ({"world_size": 4}, 4),
        ({"world_size": 16, "nnodes_within_dp": 2}, 8),
        ({"world_size": 2, "data_parallel_size": 16, "data_parallel_size_local": 4}, 8),
        ({"elastic_ep_max_dp_size": 4}, 4),  # what vLLM leaves with a dense model
    ],
)
def test_the_ranks_of_this_host_are_counted(changes: dict[str, Any], num_ranks: int) -> None:
    assert num_local_ranks(configs(**changes)[0].parallel_config) == num_ranks


def test_a_step_without_metadata_is_nothing() -> None:
    """As in vLLM's warm-up runs, before any scheduler has spoken."""
    connector = object.__new__(P2pNcclConnector)
    connector._worker = Mock()
    connector._connector_metadata = None
    connector.start_load_kv(Mock())
    connector.wait_for_layer_load("layers.0")
    connector.save_kv_layer("layers.0", Mock(), None)
    connector._worker.start_loads.assert_not_called()


def test_whole_graphs_may_be_replayed_because_no_hook_of_a_layer_is_needed() -> None:
    connector = object.__new__(P2pNcclConnector)
    connector._worker = worker = Mock()
    worker.layers.is_open = False
    connector.wait_for_layer_load("layers.0")
    connector.save_kv_layer("layers.0", Mock(), None)
    assert worker.mock_calls == []
    worker.layers.is_open = True
    connector.save_kv_layer("layers.0", Mock(), None)
    worker.layers.layer_done.assert_called_once_with("layers.0")
    assert not P2pNcclConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        (SimpleNamespace(num_prefill_lookahead_tokens=3), 3),
        (SimpleNamespace(speculative_config=None), 0),
        (SimpleNamespace(speculative_config=Mock(num_speculative_tokens=3)), 3),
    ],
)
def test_how_far_a_draft_reads_ahead_is_known_of_every_release(
    config: SimpleNamespace, num_tokens: int
) -> None:
    assert compat.num_lookahead_tokens(config) == num_tokens


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        (SimpleNamespace(num_speculative_tokens=4), 4),
        (SimpleNamespace(speculative_config=None), 0),
        (SimpleNamespace(speculative_config=Mock(num_speculative_tokens=3)), 3),
        (SimpleNamespace(speculative_config=Mock(num_speculative_tokens=None)), 0),
    ],
)
def test_how_many_tokens_are_verified_is_known_of_every_release(
    config: SimpleNamespace, num_tokens: int
) -> None:
    assert compat.num_speculative_tokens(config) == num_tokens


@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("cache_gb", [0, 4])
def test_media_have_identifiers_unless_vllm_counts_them(
    cache_gb: float, caches_prefixes: bool
) -> None:
    """What vLLM's own renderer names an image that has no name: None if it will hash it."""
    from vllm.renderers.base import BaseRenderer

    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
    )
    renderer = SimpleNamespace(
        config=config, model_config=config.model_config, _validate_mm_uuids=Mock()
    )
    images = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    process: Any = BaseRenderer._process_mm_uuids
    named = process(renderer, {}, images, {}, "renderer0-mm-7")
    assert bool(named) is not identifies_media(config)  # type: ignore[arg-type]
