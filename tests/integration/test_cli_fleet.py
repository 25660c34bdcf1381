"""The fleet with cheap doubles of vLLM: starts, waits, loses, kills and stops."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_engine.cli.fleet import FleetInterrupted
from p2p_engine.cli.members import MemberLost, fetch_text
from tests.doubles.fleet import FleetDouble, grandchild_of
from tests.processes import is_alive
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def fleet(tmp_path: Path, no_leaks: None) -> Iterator[FleetDouble]:
    with FleetDouble("no-model", log_dir=tmp_path / "logs", grace_seconds=0.3) as fleet:
        yield fleet


def test_a_fleet_serves_and_ends(fleet: FleetDouble) -> None:
    proxy = fleet.start_proxy()
    instances = [fleet.start("prefill"), fleet.start("decode"), fleet.start("decode")]
    fleet.wait_ready(timeout=30)
    assert [member.name for member in instances] == ["prefill-1", "decode-1", "decode-2"]
    assert {member.stage for member in fleet.members} == {"ready"}
    assert len({member.http_address for member in fleet.members}) == 4
    assert fetch_text(f"{proxy.url}/health") is not None
    pids = [member.process.pid for member in fleet.members]
    fleet.close()
    assert not any(is_alive(pid) for pid in pids)
    fleet.close()


def test_an_instance_that_dies_at_start_is_named_with_the_end_of_its_log(
    fleet: FleetDouble,
) -> None:
    fleet.start("prefill", vllm_args=["never-serve"])
    fleet.start("decode", vllm_args=["die-at-start"])
    with pytest.raises(MemberLost, match=r"(?s)decode-1 ended with exit code 3.*no such model"):
        fleet.wait_ready(timeout=30)


def test_an_instance_that_dies_later_is_noticed(fleet: FleetDouble) -> None:
    member = fleet.start("prefill")
    fleet.wait_ready(timeout=30)
    with pytest.raises(OSError, match=r"closed connection|reset"):
        urllib.request.urlopen(f"{member.url}/die", timeout=10).close()
    with pytest.raises(MemberLost, match="prefill-1 ended with exit code 4 while ready"):
        fleet.watch()


def test_a_late_instance_is_a_timeout_that_names_its_stage(fleet: FleetDouble) -> None:
    member = fleet.start("decode", vllm_args=["never-serve"])
    eventually(lambda: "Loading weights" in member.process.log_path.read_text())
    with pytest.raises(TimeoutError, match=r"decode-1 \(allocating the KV cache"):
        fleet.wait_ready(timeout=0.3)


def test_waiting_is_interrupted(fleet: FleetDouble) -> None:
    fleet.start("decode", vllm_args=["never-serve"])
    fleet.interrupted = True
    with pytest.raises(FleetInterrupted):
        fleet.wait_ready(timeout=30)
    fleet.watch()


def test_an_instance_joins_and_leaves_while_others_serve(fleet: FleetDouble) -> None:
    first = fleet.start("decode")
    fleet.wait_ready(timeout=30)
    second = fleet.start("decode")
    fleet.wait_ready(second, timeout=30)
    fleet.stop(first)
    fleet.check()
    assert fetch_text(f"{first.url}/health") is None
    assert fetch_text(f"{second.url}/health") is not None
    third = fleet.start("decode")
    assert third.name == "decode-3"  # its log is its own
    assert third.slot == first.slot  # its cores are free again


def test_a_successor_has_the_addresses_of_who_is_gone(fleet: FleetDouble) -> None:
    first = fleet.start("decode")
    fleet.wait_ready(timeout=30)
    with pytest.raises(OSError, match="planned twice"):
        fleet.start("decode", successor_of=first)
    fleet.kill(first)
    second = fleet.start("decode", successor_of=first)
    fleet.wait_ready(timeout=30)
    assert first.plan is not None
    assert second.plan is not None
    assert second.name != first.name
    assert second.plan.http_address == first.plan.http_address
    assert second.plan.kv_address == first.plan.kv_address


def test_a_killed_instance_takes_its_children_along(fleet: FleetDouble) -> None:
    member = fleet.start("prefill", vllm_args=["grandchild"])
    fleet.wait_ready(timeout=30)
    grandchild = grandchild_of(member.process.log_path)
    fleet.kill(member)
    assert grandchild is not None
    assert not is_alive(grandchild)
    assert not is_alive(member.process.pid)
    fleet.check()


def test_ready_means_known_to_the_proxy(fleet: FleetDouble) -> None:
    fleet.registers = False
    fleet.start_proxy()
    member = fleet.start("prefill")
    with pytest.raises(TimeoutError, match=r"prefill-1 \(registering with the proxy\)"):
        fleet.wait_ready(member, timeout=5)


def test_each_look_is_reported(fleet: FleetDouble) -> None:
    member = fleet.start("prefill")
    stages: list[str] = []
    fleet.wait_ready(timeout=30, on_look=lambda members: stages.extend(m.stage for m in members))
    assert stages[-1] == "ready"
    assert member.elapsed_seconds > 0


def test_a_port_that_is_in_use_is_refused(fleet: FleetDouble) -> None:
    proxy = fleet.start_proxy()
    port = int(proxy.http_address.rpartition(":")[2])
    eventually(lambda: fetch_text(f"{proxy.url}/health") is not None)
    with (
        FleetDouble("no-model", log_dir=fleet.log_dir / "other") as other,
        pytest.raises(OSError, match=f"port {port} on 127.0.0.1"),
    ):
        other.start_proxy(port)
