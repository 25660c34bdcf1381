"""Our connector under the name of vLLM's NixlConnector: what vLLM does by that name, whose peers
refuse each other, and what NIXL's settings mean."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS
from vllm.v1.request import RequestStatus

from p2p_engine.cli import doctor
from p2p_engine.cli.commands import InstancePlan, MemberRole, vllm_command
from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.findings import Level
from p2p_engine.cli.launch import LaunchOptions
from p2p_engine.cli.old_settings import NIXL_SETTINGS
from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.connector import NixlConnector, P2pNcclConnector, register
from p2p_engine.connector.intent import InvalidParams, ThisInstance, read_intent
from p2p_engine.connector.stats import P2pConnectorStats
from p2p_engine.connector.support import (
    check_supported,
    directory_port,
    name_unread_settings,
    our_settings,
    read_config,
)
from p2p_engine.errors import ConfigError
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.transfer_config import (
    CHILDREN,
    EXTRA,
    HOST_VARIABLE,
    MODULE_PATH,
    MULTI,
    NIXL_NAME,
    NIXL_ONLY,
    PORT_VARIABLE,
    extra_of,
    is_ours,
    our_config,
    read_nixls,
)
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.nixl_handshake import REFUSAL
from tests.doubles.start_config import configs
from tests.support import eventually

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ROOT = Path(__file__).parents[2]
NAMED: dict[str, Any] = {"kv_connector": NIXL_NAME, "kv_connector_module_path": MODULE_PATH}
ALIAS: dict[str, Any] = {**NAMED, "kv_role": "kv_both", EXTRA: {"host": "127.0.0.1"}}
BESIDE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
DECODE = ThisInstance("kv_consumer", "10.0.0.2:14579", SendMode.PUT_ASYNC, has_random_ids=True)
PREFILL = ThisInstance("kv_producer", "10.0.0.1:14579", SendMode.PUT_ASYNC, has_random_ids=True)
REQUEST_ID = "cmpl-a-0-1a2b3c4d"


def multi(*entries: object) -> dict[str, Any]:
    return {"kv_connector": MULTI, "kv_role": "kv_both", EXTRA: {CHILDREN: list(entries)}}


# What vLLM does by the name


def places_of_the_name() -> Iterator[str]:
    """The functions of the installed vLLM that have the name, but for NIXL's own connector."""
    root = Path(vllm.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        if f'"{NIXL_NAME}"' in text and "/v1/nixl/" not in str(path):
            yield from names_in(ast.parse(text), path.stem)


def names_in(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        is_owner = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if isinstance(child, ast.Constant) and child.value == NIXL_NAME:
            yield owner
        yield from names_in(child, child.name if is_owner else owner)  # type: ignore[attr-defined]


def test_the_page_has_each_place_where_vllm_asks_for_the_name() -> None:
    at_the_top = {"enable_permute_local_kv", "kv_lease_duration"}  # the latter is read as ours
    keys = {name for name in NIXL_SETTINGS if not name.startswith("VLLM_")}
    assert keys - at_the_top == NIXL_ONLY.keys()
    page = (ROOT / "docs" / "nixl_name.md").read_text("utf-8")
    found = set(places_of_the_name())
    assert {"factory", "__post_init__", "check_and_update_config"} <= found
    assert {name for name in found if name not in page} == set()


def test_vllm_loads_our_class_under_the_name_and_its_own_without_a_module_path() -> None:
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**NAMED, kv_role="kv_both"))
    assert found is NixlConnector is P2pNcclConnector
    assert NIXL_NAME in KVConnectorFactory._registry
    assert KVConnectorFactory.get_connector_class_by_name(NIXL_NAME) is not P2pNcclConnector


def test_statistics_of_a_multi_connector_go_by_the_classs_name() -> None:
    """A class of NIXL's name would be looked for among vLLM's own, and get NIXL's statistics."""
    register()
    assert NixlConnector.__name__ == "P2pNcclConnector"
    data = P2pConnectorStats.of({}, {}, 0).data
    stats = MultiConnector.build_kv_connector_stats({NixlConnector.__name__: data})
    assert stats is not None
    assert isinstance(stats.data["P2pNcclConnector"], P2pConnectorStats)


@pytest.mark.parametrize("config", [ALIAS, multi(BESIDE, ALIAS)], ids=["alone", "in another"])
def test_context_parallelism_is_refused_by_vllm_or_by_us(config: dict[str, Any]) -> None:
    """vLLM lets more through under NIXL's name, by which it fits interleaved blocks; we do not."""
    transfer = KVTransferConfig(**config)
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    with pytest.raises(Exception, match="decode_context_parallel_size=2 must be 1 or equal"):
        VllmConfig(parallel_config=parallel, kv_transfer_config=transfer)
    with pytest.raises(ConfigError, match="decode_context_parallel_size=4 is not supported"):
        check_supported(configs(decode_context_parallel_size=4)[0])


def test_vllm_refuses_to_return_routed_experts_under_the_name() -> None:
    own = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}
    for config, named in ((ALIAS, NIXL_NAME), (own, "")):
        made: Any = Mock(kv_transfer_config=KVTransferConfig(**config))
        made.parallel_config = SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        )
        made.model_config.runner_type, made.speculative_config = "generate", None
        if not named:
            VllmConfig._verify_aux_output_compatibility(made)
            continue
        with pytest.raises(ValueError, match=f"incompatible with {named}"):
            VllmConfig._verify_aux_output_compatibility(made)


def test_on_cpus_vllm_lays_states_out_as_nixl_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers compare the layout, so an instance with states and our own name is refused by name."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "")
    del os.environ["VLLM_SSM_CONV_STATE_LAYOUT"]  # and monkeypatch takes away what vLLM sets
    VllmConfig(kv_transfer_config=KVTransferConfig(**ALIAS))
    assert os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"


def test_rays_workers_do_not_get_the_variable_of_the_host() -> None:
    assert HOST_VARIABLE in WORKER_SPECIFIC_ENV_VARS
    assert PORT_VARIABLE not in WORKER_SPECIFIC_ENV_VARS


@pytest.mark.parametrize("name", [NIXL_NAME, "P2pNcclConnector"])
def test_a_model_that_vllm_lets_nixl_alone_transfer_is_refused_under_the_name(name: str) -> None:
    vllm_config, transfer = configs()
    vllm_config.model_config.architectures = ["Step5ForCausalLM"]
    transfer.kv_connector = name
    if name == NIXL_NAME:
        with pytest.raises(ConfigError, match="Step5ForCausalLM under the name NixlConnector"):
            check_supported(vllm_config)
    else:
        check_supported(vllm_config)  # vLLM has refused it


# Peers that are NIXL's


def answer_of_nixl() -> dict[str, Any]:
    """What a real NixlConnector's prefill side answers, by vLLM's own code."""
    half: Any = Mock(
        engine_id="5e0d6f2a-98f6-4a52-b3ad-1f4a0f2f7f0e", side_channel_host="10.0.0.1",
        side_channel_port=5600, transfer_tp_size=1, _TRANSFER_MODE="pull", _kv_lease_duration=30,
        _reqs_need_send={}, get_exchange_clipped_blocks=lambda blocks: blocks,
        is_bidirectional_kv_xfer_enabled=False,
    )  # fmt: skip
    half.vllm_config.parallel_config = SimpleNamespace(
        decode_context_parallel_size=1, pipeline_parallel_size=1
    )
    request: Any = SimpleNamespace(
        request_id=REQUEST_ID, kv_transfer_params={"do_remote_decode": True},
        status=RequestStatus.FINISHED_LENGTH_CAPPED, num_computed_tokens=64,
    )  # fmt: skip
    answer = NixlPullConnectorScheduler.request_finished(half, request, ([1, 2],))[1]
    return dict(json.loads(json.dumps(answer)))


@pytest.mark.parametrize(
    "more",
    [{}, {"transfer_id": "xfer-1"}, {"remote_engine_id": "prefill-0:8000"}],
    ids=["pull", "llm-d's push", "an id like an address"],
)
def test_decode_refuses_what_a_real_nixl_prefill_answered(more: dict[str, str]) -> None:
    with pytest.raises(InvalidParams, match=r"remote_engine_id '.*vLLM's NixlConnector"):
        read_intent(REQUEST_ID, {**answer_of_nixl(), **more}, DECODE)


def test_prefill_asks_no_real_nixl_decode_for_an_earlier_turn() -> None:
    turned = {**answer_of_nixl(), "do_remote_decode": True, "do_remote_prefill": False}
    intent = read_intent(REQUEST_ID, turned, PREFILL)
    assert intent is not None
    assert (intent.peer, intent.earlier) == (None, None)


@pytest.mark.usefixtures("no_leaks")
def test_a_real_nixl_decode_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """By vLLM's own code; it does not wait until its five seconds are over."""
    worker: Any = SimpleNamespace(
        _is_csa_linear=False, use_host_buffer=True, compat_hash="theirs", enforce_compat_hash=True,
        transfer_topo=SimpleNamespace(handshake_target_ranks=lambda *sizes: [0]),
    )  # fmt: skip
    ranks = [RankAddress(0, "127.0.0.1:1", 1)]
    with Directory(EngineConfig(), ranks, kv_port=0, role="P") as directory:
        host, port = split_address(directory.address)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=re.escape(f"Remote: {REFUSAL}")):
                NixlBaseConnectorWorker._nixl_handshake(worker, host, port, 1, "engine")
        assert directory.healthy
        eventually(lambda: "127.0.0.1 asked for NIXL's handshake" in caplog.text)


# Our configuration


@pytest.mark.parametrize("config", [ALIAS, multi(ALIAS), multi(BESIDE, multi(ALIAS))])
def test_a_configuration_under_the_name_is_ours(config: dict[str, Any]) -> None:
    assert our_config(config) == {**ALIAS, EXTRA: {"host": "127.0.0.1", "send_type": "GET"}}
    assert config_problems(config) == []
    assert Level.CHANGE not in {finding.level for finding in doctor.check_config(config, 1)}
    LaunchOptions("m", transfer_config=config)
    plan = InstancePlan("d", MemberRole.DECODE, "m", "127.0.0.1", 20001, 21001, "127.0.0.2:30001")
    given = our_config(json.loads(vllm_command(plan, config)[-1]))
    assert is_ours(given)
    assert (given["kv_port"], given[EXTRA]["http_port"]) == (21001, 20001)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**BESIDE, "kv_connector": NIXL_NAME}, f"with kv_connector_module_path '{MODULE_PATH}'"),
        ({**ALIAS, "kv_connector_module_path": "vllm.nixl"}, "kv_connector_module_path"),
        (multi(ALIAS, ALIAS), "2 entries of MultiConnector"),
        (multi(ALIAS, {**BESIDE, "kv_connector": NIXL_NAME}), "NixlConnector beside"),
        ({**ALIAS, EXTRA: {"host": "h", "num_thread": 4}}, "unknown key 'num_thread'"),
    ],
)
def test_what_is_not_ours_or_not_known_is_a_finding(config: dict[str, Any], problem: str) -> None:
    (found,) = config_problems(config)
    assert problem in found


# NIXL's settings


def test_nixls_settings_are_ours_where_they_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "10.0.0.7")
    monkeypatch.setenv(PORT_VARIABLE, "5600")
    extra = {"kv_lease_duration": 45, "backends": ["UCX"], "num_threads": 4}
    given = KVTransferConfig(**NAMED, kv_role="kv_both", kv_connector_extra_config=extra)
    read = our_settings(given)
    config = read_config(read)
    assert (config.host, config.lease_seconds) == ("10.0.0.7", 45)
    assert directory_port(read, ParallelConfig()) == 5600
    assert read.engine_id == given.engine_id
    own = KVTransferConfig(kv_connector="P2pNcclConnector", kv_role="kv_both")
    assert our_settings(own) is own


def test_each_data_parallel_rank_has_nixls_port_plus_its_number() -> None:
    read = read_nixls(ALIAS, {PORT_VARIABLE: "5600"})
    parallel: Any = SimpleNamespace(data_parallel_index=3)
    assert directory_port(KVTransferConfig(**read), parallel) == 5603


def test_our_own_settings_win() -> None:
    own = {"host": "10.0.0.1", "lease_seconds": 20}
    config = {**ALIAS, "kv_port": 21001, EXTRA: {**own, "kv_lease_duration": 45}}
    environment = {HOST_VARIABLE: "10.0.0.7", PORT_VARIABLE: "5600"}
    assert read_nixls(config, environment) == {**config, EXTRA: {**own, "send_type": "GET"}}


def test_who_decides_by_the_name_pulls_unless_our_setting_says_otherwise() -> None:
    assert extra_of(read_nixls(NAMED, {})) == {"send_type": "GET"}
    pushes = {**NAMED, EXTRA: {"send_type": "PUT"}}
    assert extra_of(read_nixls(pushes, {})) == {"send_type": "PUT"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_host_that_nobody_can_dial_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv(HOST_VARIABLE, host)
    (finding,) = doctor.check_config({**NAMED, "kv_role": "kv_both"}, 1)
    assert finding.level is Level.CHANGE
    assert f"{HOST_VARIABLE}={host!r} is not possible" in finding.state


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_a_port_that_cannot_be_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    with pytest.raises(ConfigError, match=f"{PORT_VARIABLE}='{port}' is not possible"):
        read_nixls(ALIAS, {PORT_VARIABLE: port})
    monkeypatch.setenv(PORT_VARIABLE, port)
    (finding,) = doctor.check_config(ALIAS, 1)
    assert finding.level is Level.CHANGE
    assert f"{PORT_VARIABLE}='{port}' is not possible" in finding.state


def test_settings_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = {**ALIAS, EXTRA: {"backends": ["UCX"], "engine_ttl": 5, "host": "127.0.0.1"}}
    with caplog.at_level(logging.WARNING):
        name_unread_settings(KVTransferConfig(**config))
        name_unread_settings(KVTransferConfig(**ALIAS))
    (record,) = caplog.records
    assert record.message.endswith("without effect: backends (see transports), engine_ttl")
    findings = doctor.check_config(multi(config), 1)
    assert "backends (see transports), engine_ttl: without effect" in {f.state for f in findings}


def test_every_setting_of_nixls_is_known() -> None:
    folder = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    text = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    assert set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', text)) == {
        *NIXL_ONLY.keys() - {"enable_cross_layers_blocks"},  # which NIXL does not read, either
        "kv_lease_duration",
    }
    page = (ROOT / "docs" / "nixl_name.md").read_text("utf-8")
    assert {name for name in NIXL_ONLY if f"`{name}`" not in page} == set()
