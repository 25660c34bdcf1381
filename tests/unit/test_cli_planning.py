"""What a fleet plans before it starts anything: ports, devices, commands, stages, options."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from p2p_engine.cli import commands, devices
from p2p_engine.cli.commands import InstancePlan, MemberRole, data_parallel_size
from p2p_engine.cli.devices import Devices
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.launch import LaunchOptions
from p2p_engine.cli.ports import PortPlan, is_port_free
from p2p_engine.cli.stages import STARTING, StageReader
from p2p_engine.errors import ConfigError

HOST = "127.0.0.1"


def plan(role: MemberRole = MemberRole.PREFILL, **changes: Any) -> InstancePlan:
    settings: dict[str, Any] = {
        "name": "prefill-1",
        "role": role,
        "model": "some/model",
        "host": HOST,
        "http_port": 20001,
        "kv_port": 21001,
        "registration_address": "127.0.0.2:30001",
    }
    return InstancePlan(**{**settings, **changes})


def test_ports_are_different_and_free() -> None:
    with PortPlan(HOST) as ports:
        taken = [ports.take() for _ in range(64)]
        assert len(set(taken)) == 64
        assert all(is_port_free(HOST, port) for port in taken)


def test_a_claimed_port_is_ours_until_a_server_listens_there() -> None:
    with PortPlan(HOST) as ports:
        port = ports.take()
        with socket.create_server((HOST, port)):  # as our child does
            assert not is_port_free(HOST, port)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))  # as one who does not know of the plan


def test_a_port_is_planned_once() -> None:
    with PortPlan(HOST) as ports:
        port = ports.take()
        with pytest.raises(OSError, match="planned twice"):
            ports.take(port)
        ports.release(port)
        assert ports.take(port) == port


def test_a_row_of_ports_is_taken_whole_or_not_at_all() -> None:
    with PortPlan(HOST) as ports:
        first = ports.take_range(4)
        for port in range(first, first + 4):
            with pytest.raises(OSError, match="planned twice"):
                ports.take(port)
        ports.release(first)
        with pytest.raises(OSError, match="planned twice"):
            ports.take_range(2, first)  # the second one is ours already
        assert ports.take(first) == first
        with pytest.raises(OSError, match="port 65536"):
            ports.take_range(2, 65535)


def test_each_data_parallel_rank_of_an_instance_has_a_port() -> None:
    made = plan(kv_port=21001, dp_size=2, events_port=22001, replay_port=23001)
    assert made.rank_ports == [21001, 21002, 22001, 22002, 23001, 23002]
    assert plan(kv_port=21001, dp_size=3).rank_ports == [21001, 21002, 21003]


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((), 1),
        (("--data-parallel-size", "4"), 4),
        (("--data_parallel_size=4", "--max-model-len", "9"), 4),
        (("-dp", "2", "-dp=3"), 3),
    ],
)
def test_the_data_parallel_size_is_found_among_vllms_options(
    arguments: tuple[str, ...], size: int
) -> None:
    assert data_parallel_size(arguments) == size


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_a_data_parallel_size_that_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size"):
        data_parallel_size(("--data-parallel-size", value))


def test_kv_events_are_published_on_the_host_alone() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, PortPlan(HOST) as ports:
        made = plan(events_port=ports.take(), replay_port=1)
        publisher.bind(commands.events_config(made)["endpoint"])
        assert publisher.getsockopt_string(zmq.LAST_ENDPOINT) == f"tcp://{HOST}:{made.events_port}"
    assert "--kv-events-config" in commands.vllm_command(made, {})
    assert "--kv-events-config" not in commands.vllm_command(plan(), {})


def test_instances_publish_at_ports_of_their_own(tmp_path: Path) -> None:
    with Fleet("tiny", kv_events=True, log_dir=tmp_path) as fleet:
        one, other = (fleet._plan(MemberRole.PREFILL, None, ("-dp", "2"), None) for _ in range(2))
        assert len({*one.rank_ports, *other.rank_ports}) == 12
        for port in one.rank_ports:
            fleet._ports.release(port)
        fleet._ports.release(one.http_port)
        assert fleet._plan(MemberRole.PREFILL, None, ("-dp", "2"), one).rank_ports == one.rank_ports


def test_a_port_that_somebody_listens_on_is_not_taken() -> None:
    with socket.create_server((HOST, 0)) as server, PortPlan(HOST) as ports:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on {HOST}"):
            ports.take(port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        is_port_free("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("cores", "tp_size", "planned", "bindings"),
    [
        (2, 1, 2, ["nobind", "nobind", "nobind"]),
        (8, 1, 2, ["0,1,2,3", "4,5,6,7"]),
        (8, 2, 2, ["0,1|2,3", "4,5|6,7"]),
        (9, 2, 2, ["0,1|2,3", "4,5|6,7"]),
        (2, 2, 2, ["nobind", "nobind"]),
        (1, 1, 4, ["nobind", "nobind", "nobind", "nobind"]),
    ],
)
def test_cores_are_shared_out(cores: int, tp_size: int, planned: int, bindings: list[str]) -> None:
    cpu = Devices("cpu", tuple(map(str, range(cores))), tp_size, planned, kv_space_gib=3)
    for slot, binding in enumerate(bindings):
        environment = cpu.environment(slot)
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == binding
        assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_gpus_are_shared_out() -> None:
    gpu = Devices("gpu", ("4", "5", "6"), 2, 2)
    assert [gpu.environment(slot) for slot in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,4"},
    ]


def test_visible_gpus_are_those_that_the_environment_shows() -> None:
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ("2", "3")
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_the_kv_space_that_a_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_cpu_vllm", lambda: True)
    assert devices.find_devices(1, 2, {"VLLM_CPU_KVCACHE_SPACE": "7"}).kv_space_gib == 7
    assert 1 <= devices.find_devices(1, 2, {}).kv_space_gib <= 4


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [
        (MemberRole.PREFILL, "kv_producer"),
        (MemberRole.DECODE, "kv_consumer"),
        (MemberRole.BOTH, "kv_both"),
    ],
)
def test_the_transfer_config_of_each_role(role: MemberRole, kv_role: str) -> None:
    assert commands.transfer_config(plan(role)) == {
        "kv_connector": "P2pNcclConnector",
        "kv_role": kv_role,
        "kv_port": 21001,
        "kv_connector_extra_config": {
            "host": HOST,
            "http_port": 20001,
            "send_type": "PUT_ASYNC",
            "proxy_ip": "127.0.0.2",
            "proxy_port": 30001,
        },
    }


def test_the_key_of_the_fleet_is_everybodys() -> None:
    config = commands.transfer_config(plan(MemberRole.PREFILL, key_file="/etc/fleet.key"))
    assert config["kv_connector_extra_config"]["key_file"] == "/etc/fleet.key"


def test_a_fleet_with_a_key_gives_it_to_its_proxy_and_its_instances(tmp_path: Path) -> None:
    commands_given: dict[str, Sequence[str]] = {}

    class NotStarted(Fleet):
        """Keeps the commands instead of running them."""

        def _spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Any:
            commands_given[name] = command
            return SimpleNamespace(log_path=tmp_path / name)

    fleet = NotStarted("some/model", log_dir=tmp_path)
    fleet.key_file = "/etc/fleet.key"
    fleet.start_proxy()
    fleet.start(MemberRole.DECODE)
    fleet.members.clear()
    fleet.close()
    proxy = commands_given["proxy"]
    assert proxy[proxy.index("--key-file") + 1] == "/etc/fleet.key"
    assert '"key_file": "/etc/fleet.key"' in commands_given["decode-1"][-1]


def test_overrides_win_on_both_levels() -> None:
    command = commands.vllm_command(
        plan(vllm_args=("--dtype", "float32")),
        {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"send_type": "GET"}},
    )
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["send_type"] == "GET"
    assert config["kv_connector_extra_config"]["http_port"] == 20001
    assert "--dtype float32" in " ".join(command)
    assert "vllm" not in command  # its script does not start on a CPU


def test_a_single_instance_has_no_connector() -> None:
    assert "--kv-transfer-config" not in commands.vllm_command(plan(MemberRole.SINGLE), {})


def test_a_model_on_this_disk_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" not in commands.vllm_environment(plan())
    environment = commands.vllm_environment(plan(model=str(tmp_path)))
    assert environment == {"VLLM_HOST_IP": HOST, "HF_HUB_OFFLINE": "1"}


def test_stages_are_read_as_the_log_grows(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    reader = StageReader(log_path)
    assert reader.update() == STARTING
    log_path.write_text("INFO Starting to load mod")
    assert reader.update() == STARTING
    with log_path.open("a") as log:
        log.write("el x\n")
    assert reader.update() == "loading weights"
    with log_path.open("a") as log:
        log.write("GPU KV cache size: 1 tokens\nINFO Loading weights took 1 s\n")
    assert reader.update() == "warming up"  # never backwards


def test_a_log_says_which_proxy_refuses_the_instance(tmp_path: Path) -> None:
    log_path = tmp_path / "decode.log"
    reader = StageReader(log_path)
    log_path.write_text("ERROR [directory.py:1] not registered: proxy h:1: it asks for a key\n")
    reader.update()
    assert reader.refusal == "proxy h:1: it asks for a key"
    with log_path.open("a") as log:
        log.write("WARNING [directory.py:1] no longer refused: proxy h:1\n")
    reader.update()
    assert not reader.refusal


def test_each_instance_has_the_arguments_of_its_role() -> None:
    options = LaunchOptions(
        "m", num_prefill=2, num_decode=1, prefill_args=("--a",), decode_args=("--b",)
    )
    assert options.roles() == [
        (MemberRole.PREFILL, ("--a",)),
        (MemberRole.PREFILL, ("--a",)),
        (MemberRole.DECODE, ("--b",)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prefill": 0, "num_decode": 0}, "nothing to launch"),
        ({"kv_events": True, "host": "localhost"}, "no IPv4 address"),
        ({"kv_events": True, "vllm_args": ("--kv-events-config", "{}")}, "--kv-events sets it"),
        ({"vllm_args": ("--headless",)}, "--headless among .* one command"),
        ({"decode_args": ("--data_parallel_rank=1",)}, "--data-parallel-rank among"),
        ({"vllm_args": ("--data-parallel-multi-port-external-lb",)}, "vllm serve"),
        ({"vllm_args": ("-dp", "none")}, "--data-parallel-size none"),
        ({"host": "0.0.0.0"}, "the one IPv4 address"),
        ({"host": "::1"}, "the one IPv4 address"),
        ({"vllm_args": ("--port", "1")}, "each instance gets a free port"),
        ({"vllm_args": ("--kv-transfer-config={}",)}, "before the --"),
        ({"decode_args": ("-tp", "2")}, "use --tp"),
        ({"join": "h:1", "proxy_args": ("--peers", "h:2")}, "the proxy that --join names"),
        ({"send_type": "PUSH"}, "PUT, PUT_ASYNC, GET"),
        ({"transfer_config": {"kv_connector_extra_config": {"x": 1}}}, "unknown key 'x'"),
    ],
)
def test_impossible_options_are_refused_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(**{"model": "m", **change})


@pytest.mark.parametrize("words", [("--served-model-name", "x"), ("--served-model-name=x",)])
def test_the_name_to_ask_for(words: tuple[str, ...]) -> None:
    assert LaunchOptions("m", vllm_args=words).served_model == "x"
    assert LaunchOptions("m").served_model == "m"
