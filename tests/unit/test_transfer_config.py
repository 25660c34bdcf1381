"""Our entry is found in a MultiConnector's configuration as vLLM itself would find it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2p_engine.cli import commands, doctor
from p2p_engine.cli.commands import InstancePlan, MemberRole
from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.findings import Level
from p2p_engine.cli.launch import LaunchOptions
from p2p_engine.errors import ConfigError
from p2p_engine.sizing import Room
from p2p_engine.transfer_config import CHILDREN, EXTRA, merge_configs, our_config

OURS: dict[str, Any] = {
    "kv_connector": "P2pNcclConnector",
    "kv_role": "kv_both",
    EXTRA: {"host": "127.0.0.1"},
}
BESIDE: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def multi(*entries: object, **more: object) -> dict[str, Any]:
    extra = {CHILDREN: list(entries)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", EXTRA: extra, **more}


PLACES = pytest.mark.parametrize(
    "config",
    [multi(OURS), multi(OURS, BESIDE), multi(BESIDE, OURS), multi(BESIDE, multi(BESIDE, OURS))],
    ids=["alone", "first", "last", "in another"],
)


@PLACES
def test_our_entry_is_found_wherever_it_is(config: dict[str, Any]) -> None:
    assert our_config(config) is OURS
    assert config_problems(config) == []
    findings = list(doctor.check_config(config, 1))
    assert findings[0].state == "kv_both, PUT_ASYNC, in a MultiConnector"
    assert Level.CHANGE not in {finding.level for finding in findings}


def test_the_doctor_looks_at_what_our_entry_needs() -> None:
    ours = {**OURS, "kv_role": "kv_producer", "kv_buffer_device": "cuda"}
    ours[EXTRA] = {"kv_buffer_size": 8e9, "send_type": "GET", "mem_pool_size_gb": 1e6}
    config = multi(BESIDE, ours, kv_buffer_device="cpu")
    [room] = doctor.check_device_memory(config, Room(16 << 30, 0.9))
    assert room.level is Level.CHANGE
    findings = list(doctor.check_config({**config, "kv_port": 1}, 1))
    assert findings[0].state == "kv_producer, GET, in a MultiConnector"
    assert [f.state for f in findings if f.subject == "kv_port"] != ["127.0.0.1:1 is free"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (multi(BESIDE), "0 entries of MultiConnector are P2pNcclConnector"),
        (multi(OURS, multi(OURS)), "2 entries of MultiConnector are P2pNcclConnector"),
        (multi(), "0 entries"),
        (multi(OURS, {**BESIDE, "kv_connector": "NixlConnector"}), "NixlConnector beside"),
        (multi(OURS, {**BESIDE, "kv_connector": "MoRIIOConnector"}), "MoRIIOConnector beside"),
        (multi(OURS, 5), "allowed: a list of JSON objects"),
        (multi(OURS, **{EXTRA: {}}), "connectors is None; allowed: a list"),
        (multi(OURS, **{EXTRA: 5}), f"{EXTRA} is 5; allowed: a JSON object"),
        (multi(OURS, **{EXTRA: {CHILDREN: [OURS], "host": "h"}}), "host: MultiConnector does not"),
        (multi(OURS, kv_rank=1), "kv_rank: remove it; vLLM refuses this key"),
        (multi(OURS, kv_role="both"), "kv_role is 'both'"),
        (multi(OURS, {"kv_connector": "OffloadingConnector"}), "connectors[1]: kv_role is None"),
        (multi(OURS, {"kv_role": "kv_both"}), "connectors[1]: kv_connector is None"),
        (multi({**OURS, "kv_port": -1}), "connectors[0]: kv_port is -1"),
        (multi({**OURS, EXTRA: {"proxi_ip": "h"}}), "connectors[0]: kv_connector_extra_config"),
        (multi({**OURS, EXTRA: []}), f"connectors[0]: {EXTRA} is []"),
        (multi({**OURS, "kv_ip": "h"}), "connectors[0]: kv_ip: remove it; vLLM refuses"),
        (multi({**OURS, "engine_id": "e"}), "connectors[0]: engine_id: not read from an entry"),
        (multi({**OURS, "kv_load_failure_policy": "recompute"}), "set it beside"),
        (multi(multi(OURS, 5)), "connectors[0]: connectors is"),
    ],
)
def test_what_vllm_or_we_would_refuse_is_a_finding(config: dict[str, Any], problem: str) -> None:
    (found,) = config_problems(config)
    assert problem in found
    assert next(iter(doctor.check_config(config, 1))).level is Level.CHANGE
    list(doctor.check_device_memory(config, Room(16 << 30, 0.9)))
    if "kv_role is None" not in found:  # launch gives one
        with pytest.raises(ConfigError):
            LaunchOptions("m", transfer_config=config)


@PLACES
def test_launch_gives_our_entry_what_an_instance_needs(config: dict[str, Any]) -> None:
    LaunchOptions("m", transfer_config=config)
    plan = InstancePlan("d", MemberRole.DECODE, "m", "127.0.0.1", 20001, 21001, "127.0.0.2:30001")
    given = json.loads(commands.vllm_command(plan, config)[-1])
    assert config_problems(given) == []
    ours = our_config(given)
    assert (ours["kv_port"], ours[EXTRA]["http_port"], ours[EXTRA]["proxy_port"]) == (
        21001,
        20001,
        30001,
    )
    assert given.keys() == config.keys()
    assert given[EXTRA].keys() == {CHILDREN}


def test_an_entry_without_a_role_has_its_instances() -> None:
    ours, beside = ({k: v for k, v in entry.items() if k != "kv_role"} for entry in (OURS, BESIDE))
    config = {"kv_connector": "MultiConnector", EXTRA: {CHILDREN: [beside, ours]}}
    LaunchOptions("m", transfer_config=config)
    plan = InstancePlan("d", MemberRole.DECODE, "m", "127.0.0.1", 20001, 21001)
    given = json.loads(commands.vllm_command(plan, config)[-1])
    assert {given["kv_role"], *(entry["kv_role"] for entry in given[EXTRA][CHILDREN])} == {
        "kv_consumer"
    }


def test_more_settings_go_where_they_are_read() -> None:
    more = {"kv_load_failure_policy": "recompute", "kv_port": 5, EXTRA: {"send_type": "GET"}}
    expected = multi(
        BESIDE,
        {**OURS, "kv_port": 5, EXTRA: {"host": "127.0.0.1", "send_type": "GET"}},
        kv_load_failure_policy="recompute",
    )
    assert merge_configs(multi(BESIDE, OURS), more) == expected
    assert merge_configs(more, multi(BESIDE, OURS)) == expected
    assert merge_configs(multi(OURS), multi(BESIDE, OURS)) == multi(BESIDE, OURS)


@pytest.mark.parametrize("extra", [5, "{}", [1]])
def test_launch_refuses_settings_that_are_no_object(extra: object) -> None:
    with pytest.raises(ConfigError, match="allowed: a JSON object"):
        LaunchOptions("m", transfer_config={EXTRA: extra})


def test_launch_has_no_shell_for_variables() -> None:
    with pytest.raises(ConfigError, match="http_port"):
        LaunchOptions("m", transfer_config={EXTRA: {"http_port": "$PORT"}})
