"""The doctor finds what is wrong, and says what to change."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from rich.console import Console

from p2p_engine.cli import doctor, installation
from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.findings import Finding, Level, change, note, ok, show
from p2p_engine.config import GPU_TRANSPORTS, EngineConfig, queue_risk
from p2p_engine.control.fleet_key import write_key_file
from p2p_engine.errors import ConfigError
from p2p_engine.gpu import cuda
from tests.doubles.gpu import GpuDouble

GIB = 1 << 30
OURS = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_port": 21001}


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def registration_port() -> Iterator[int]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield router.bind_to_random_port("tcp://127.0.0.1")


def of_subject(findings: list[Finding], subject: str) -> Finding:
    return next(finding for finding in findings if finding.subject.startswith(subject))


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.28.1", Level.CHANGE),
        ("0.29.0", Level.OK),
        ("0.33.0+cu130", Level.OK),
        ("0.34.0", Level.CHANGE),
        (None, Level.CHANGE),
    ],
)
def test_supported_vllm(version: str | None, level: Level) -> None:
    assert installation.check_vllm(version).level is level


def test_the_key_and_its_absence(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    named = EngineConfig(key_file=str(path))
    assert doctor.check_key(named, listens_on="").level is Level.CHANGE
    write_key_file(path)
    assert doctor.check_key(named, listens_on="").level is Level.OK
    assert doctor.check_key(EngineConfig(), listens_on="127.0.0.1").level is Level.OK
    for host in ("", "10.0.0.1"):
        finding = doctor.check_key(EngineConfig(), listens_on=host)
        assert finding.level is Level.NOTE
        assert "NOT AUTHENTICATED" in finding.remedy


def test_an_old_vllm_has_the_name_taken() -> None:
    assert "its own connector" in installation.check_vllm("0.23.0").remedy


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 9), Level.CHANGE), ((3, 10), Level.OK), ((3, 13), Level.OK), ((3, 14), Level.CHANGE)],
)
def test_supported_python(version: tuple[int, int], level: Level) -> None:
    assert installation.check_python(version).level is level


def test_a_plugin_list_that_leaves_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    finding = installation.check_plugin()
    assert finding.level is Level.CHANGE
    assert "VLLM_PLUGINS" in finding.remedy or "entry points" in finding.remedy


def test_a_free_port_is_fine(free_port: int) -> None:
    assert doctor.check_port("127.0.0.1", free_port, "port").level is Level.OK


def test_a_port_in_use_must_change(listener: int) -> None:
    finding = doctor.check_port("127.0.0.1", listener, "port")
    assert finding.level is Level.CHANGE
    assert "in use" in finding.state


@pytest.mark.parametrize(
    "change",
    [{"kv_port": port} for port in ("first", "$PORT", 65536, -1, None)]
    + [{"kv_connector_extra_config": extra} for extra in (5, "{}", [1])],
)
def test_a_value_of_the_wrong_kind_is_a_finding_and_no_traceback(change: dict[str, object]) -> None:
    config = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both", **change}
    subjects = {finding.subject for finding in doctor.check_config(config, 1)}
    assert "configuration" in subjects
    assert ("kv_port" in subjects) == ("kv_port" not in change)


def test_kv_port_0_is_any_free_port() -> None:
    assert doctor.check_kv_port("127.0.0.1", 0).state == "0: any free port"


def test_an_address_of_another_machine_must_change() -> None:
    finding = doctor.check_port("192.0.2.1", 0, "port")
    assert finding.level is Level.CHANGE
    assert "address of this machine" in finding.remedy


def test_a_proxy_that_answers(registration_port: int) -> None:
    assert doctor.check_proxy("127.0.0.1", registration_port).level is Level.OK


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff"])
def test_a_proxy_port_that_takes_no_registrations_must_change(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the proxy's HTTP port, which says nothing unless asked; or a port that only begins as one
    of ZMQ's."""
    monkeypatch.setattr(doctor, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        answered = threads.submit(lambda: server.accept()[0])
        port = server.getsockname()[1]
        answered.add_done_callback(lambda peer: peer.result().sendall(said))
        finding = doctor.check_proxy("127.0.0.1", port)
        answered.result().close()
    assert finding.level is Level.CHANGE
    assert f"127.0.0.1:{port} takes no registrations" in finding.state
    assert "not its HTTP port" in finding.remedy


def test_a_proxy_that_is_not_there_yet(free_port: int) -> None:
    finding = doctor.check_proxy("127.0.0.1", free_port)
    assert finding.level is Level.NOTE
    assert "p2p-engine proxy" in finding.remedy


@pytest.mark.parametrize(
    ("pool", "role", "tp_size", "send_type", "level"),
    [
        (2, "kv_consumer", 1, "PUT_ASYNC", Level.OK),
        (5, "kv_consumer", 1, "PUT_ASYNC", Level.CHANGE),
        (2, "kv_consumer", 2, "PUT_ASYNC", Level.CHANGE),  # each rank has its own
        (5, "kv_producer", 1, "PUT_ASYNC", Level.OK),  # it neither receives nor holds
        (5, "kv_producer", 1, "GET", Level.CHANGE),  # it spills what it holds
        (5, "kv_both", 1, "PUT_ASYNC", Level.CHANGE),
    ],
)
def test_memory(pool: float, role: str, tp_size: int, send_type: str, level: Level) -> None:
    settings = EngineConfig.from_extra_config(
        {"mem_pool_size_gb": pool, "kv_buffer_size": 0, "send_type": send_type}
    )
    assert doctor.check_memory(settings, role, tp_size, 3 * GIB).level is level


def test_the_default_pool_is_said_with_what_it_is_a_part_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_engine.config.memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr("p2p_engine.cli.doctor.memory_bytes", lambda: 64 * GIB)
    settings = EngineConfig.from_extra_config({"kv_buffer_size": 0}, num_local_ranks=8)
    finding = doctor.check_memory(settings, "kv_consumer", 8, 20 * GIB)
    assert finding.level is Level.OK
    assert "pool 2.0 GiB for each of 8 ranks: together a quarter of 64.0 GiB" in finding.state


def test_locked_memory_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (GIB, GIB))
    settings = EngineConfig.from_extra_config({"mem_pool_size_gb": 2, "page_lock": True})
    finding = doctor.check_memory(settings, "kv_consumer", 1, 9 * GIB)
    assert finding.level is Level.CHANGE
    assert "ulimit -l" in finding.remedy


def test_a_good_configuration(registration_port: int, free_port: int) -> None:
    proxy = {"proxy_ip": "127.0.0.1", "proxy_port": registration_port}
    extra = {"host": "127.0.0.1", "http_port": free_port, **proxy}
    config = {
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer",
        "kv_port": free_port,
        "kv_connector_extra_config": extra,
    }
    findings = list(doctor.check_config(config, 1))
    assert {finding.level for finding in findings} == {Level.OK}
    assert of_subject(findings, "configuration").state == "kv_producer, PUT_ASYNC"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_proxy_ip_that_is_each_instance_itself_is_named(
    host: str, registration_port: int, free_port: int
) -> None:
    """As in vLLM's own examples: it leads to a proxy on the same host only."""
    proxy = {"proxy_ip": host, "proxy_port": registration_port, "http_port": free_port}
    config = {
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"host": "127.0.0.1", **proxy},
    }
    finding = of_subject(list(doctor.check_config(config, 1)), "proxy_ip")
    assert finding.level is Level.NOTE
    assert f"{host} leads each instance to its own host" in finding.state


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("vllm.distributed.kv_transfer.kv_connector.v1.p2p.p2p_nccl_connector", Level.CHANGE),
        ("somebody.connector", Level.NOTE),
        ("p2p_engine.connector", Level.OK),
    ],
)
def test_a_module_that_wins_over_ours_is_named(path: str, level: Level) -> None:
    ours = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}
    extra = {"host": "127.0.0.1"}
    config = {**ours, "kv_connector_module_path": path, "kv_connector_extra_config": extra}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [config]},
    }
    for given in (config, multi):
        findings = [
            finding
            for finding in doctor.check_config(given, 1)
            if finding.subject in ("configuration", "kv_connector_module_path")
        ]
        assert level in {finding.level for finding in findings}
        assert any(path in finding.state for finding in findings) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_role": "kv_prefill"}, "kv_role is 'kv_prefill'; allowed: kv_producer"),
        ({"kv_connector": "PyNcclConnector"}, "ours is 'P2pNcclConnector'"),
        ({"kv_speed": 3}, "kv_speed: vLLM refuses this key"),
        ({"kv_connector_extra_config": {"send_type": "PUSH"}}, "send_type='PUSH'"),
        (
            {"kv_connector_extra_config": {"proxy_ip": "h", "proxy_port": 1}},
            "http_port is required",
        ),
        ({"kv_connector_extra_config": {"proxi_ip": "h"}}, "unknown key 'proxi_ip'"),
        ({"kv_connector_extra_config": "{}"}, "is '{}'; allowed: a JSON object"),
        ({"kv_port": 65536}, "kv_port is 65536; allowed: 0 to 65535"),
        ({"kv_port": -1}, "kv_port is -1"),
        ({"kv_port": 1.5}, "kv_port is 1.5"),
        ({"kv_port": None}, "kv_port is None"),
        ({"kv_port": "first"}, "kv_port is 'first'"),
    ],
)
def test_each_problem_of_a_configuration_is_said(change: dict[str, object], problem: str) -> None:
    (found,) = config_problems({**OURS, **change})
    assert problem in found


def test_a_remedy_is_true_and_said_once() -> None:
    config = {
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer",
        "enable_async_transfers": True,
        "kv_rank": 0,
        "kv_connector_extra_config": {"send_type": "put_async"},
    }
    findings = [item for item in doctor.check_config(config, 1) if item.level is Level.CHANGE]
    with Console(width=400, force_terminal=False, record=True) as console:
        assert show(findings, console) == 1
    text = console.export_text()
    assert "allowed: PUT, PUT_ASYNC, GET" in text
    assert "kv_rank: remove it; vLLM refuses this key" in text
    assert "enable_async_transfers: remove it; vLLM refuses this key" in text
    assert text.count("Change configuration:") == 1


def test_transports_work_here() -> None:
    findings = list(doctor.check_transports())
    assert of_subject(findings, "shm").level is Level.OK
    assert of_subject(findings, "tcp").level is not Level.CHANGE  # the kernel's limits may be low


def test_low_limits_of_socket_buffers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    far_more = 1 << 30  # than any kernel's limit
    monkeypatch.setattr("p2p_engine.memory.host.SOCKET_BUFFER_BYTES", far_more)
    finding = doctor.check_tcp()
    assert finding.level is Level.NOTE
    limits = f"net.core.rmem_max={4 << 20} net.core.wmem_max={4 << 20}"
    assert finding.remedy.endswith(f"sysctl -w {limits}")


@pytest.mark.parametrize("fails", [False, True])
def test_what_compiles_the_pack_kernel_is_tried(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    double = GpuDouble()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with double.fault(compiler_fails=fails):
        finding = of_subject(list(doctor.check_transports()), "pack kernel")
    assert finding.level is (Level.NOTE if fails else Level.OK)
    if fails:
        assert "nvidia-cuda-nvrtc-cu12" in finding.remedy
    else:
        assert finding.state == "NVRTC 13.0 compiles it"


def no_bindings(name: str) -> None:
    raise ConfigError(f"pip install what has {name}")


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_variable_that_names_gpus_makes_none(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = GpuDouble()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert of_subject(list(doctor.check_transports()), transport) == ok(transport, "1 GPUs")
    with double.fault(driver_fails=100):  # no device
        finding = of_subject(list(doctor.check_transports()), transport)
    assert (finding.level, "(100)" in finding.state) == (Level.NOTE, True)
    monkeypatch.setattr(cuda, "load_bindings", no_bindings)
    finding = of_subject(list(doctor.check_transports()), transport)
    assert (finding.level, "pip install" in finding.state) == (Level.NOTE, True)


def test_without_a_gpu_there_is_no_word_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert all(finding.subject != "pack kernel" for finding in doctor.check_transports())


def test_shm_where_memory_files_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = doctor.check_shm()
    assert finding.level is Level.CHANGE
    assert "tcp" in finding.remedy


@pytest.mark.parametrize(
    ("heads", "tp_size", "level"),
    [(4, 2, Level.OK), (2, 4, Level.OK), (4, 3, Level.CHANGE)],
)
def test_kv_heads_over_ranks(tmp_path: Path, heads: int, tp_size: int, level: Level) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": heads}))
    assert doctor.check_model(str(tmp_path), tp_size).level is level


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ([], Level.CHANGE),
        ({"num_key_value_heads": "8"}, Level.NOTE),
        ({"num_key_value_heads": 0}, Level.NOTE),
        ({"text_config": {"num_key_value_heads": 8}}, Level.CHANGE),
        ({"text_config": {"num_key_value_heads": 6}, "num_attention_heads": 8}, Level.OK),
    ],
)
def test_heads_are_found_or_not_known(tmp_path: Path, config: object, level: Level) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert doctor.check_model(str(tmp_path), 3).level is level


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert doctor.check_model(str(tmp_path), 1).level is Level.CHANGE


def test_what_must_change_is_printed_and_is_the_exit_code() -> None:
    with Console(width=80, force_terminal=False, record=True) as console:
        assert show([ok("a", "fine"), note("b", "odd", "know it")], console) == 0
        assert show([ok("a", "fine"), change("c", "[bad]", "mend it")], console) == 1
    text = console.export_text()
    assert "Know b: know it" in text
    assert "change  c  [bad]" in text
    assert "Change c: mend it" in text


def test_the_long_look_at_vllm_is_announced_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=False)
    announced: list[str] = []

    def look() -> list[Finding]:
        announced.append(output.getvalue())
        return []

    monkeypatch.setattr(doctor, "check_installation", look)
    doctor.run_doctor(None, "", 1, console)
    assert "importing vLLM" in announced[0]


@pytest.mark.parametrize(
    ("limit", "level"), [(1024, Level.NOTE), (1 << 16, Level.OK), (-1, Level.OK)]
)
def test_few_descriptors_are_named(limit: int, level: Level) -> None:
    found = doctor.check_descriptors(limit)
    assert found.level is level
    assert ("256 peers" in found.state) == (limit == 1024)


def test_all_that_is_wrong_with_a_multi_connector_is_said_at_once() -> None:
    """A connector that cannot be beside ours, too: each look at an installation takes its time."""
    entries = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "P2pNcclConnector"},
    ]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": entries},
    }
    first, second = config_problems(config)
    assert "connectors[1]: kv_role is None" in first
    assert "NixlConnector beside P2pNcclConnector is refused" in second
    assert config_problems({**config, "kv_connector_extra_config": {"connectors": [{}, 3]}})
    unknown = {"connectors": [{"kv_connector": ["x"]}, entries[1]]}
    assert len(config_problems({**config, "kv_connector_extra_config": unknown})) == 3


@pytest.mark.parametrize(
    ("role", "queues", "transports", "is_risky"),
    [
        ("kv_both", None, "nccl", True),
        ("kv_both", "8", "cuda_ipc,nccl", True),
        ("kv_both", "32", "nccl", False),
        ("kv_both", None, "cuda_ipc", False),
        ("kv_producer", None, "nccl", False),
        ("kv_consumer", "8", "nccl", False),
    ],
)
def test_few_hardware_queues_are_a_risk_of_both_roles_over_nccl(
    role: str, queues: str | None, transports: str, is_risky: bool
) -> None:
    environment = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    config = EngineConfig.from_extra_config({"transports": transports}, device="cuda:0")
    risk = queue_risk(config, role, environment)
    assert bool(risk) is is_risky
    assert not risk or ("kv_both" in risk and "set it to 32" in risk)


def test_the_doctor_tells_of_few_hardware_queues() -> None:
    config = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}
    (finding,) = doctor.check_queues(config, {})
    assert finding.level is Level.NOTE
    assert not list(doctor.check_queues(config, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}))
    assert not list(doctor.check_queues({**config, "kv_buffer_device": "cpu"}, {}))


def test_the_doctor_tells_of_a_variable_with_which_no_instance_starts() -> None:
    config = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer"}
    environment = {"NCCL_MAX_CTAS": "8"}
    (finding,) = doctor.check_queues(config, environment)
    assert finding.level is Level.CHANGE
    assert "NCCL_MAX_CTAS=8" in finding.state
    extra = {"kv_connector_extra_config": {"transports": "cuda_ipc"}}
    assert not list(doctor.check_queues({**config, **extra}, environment))
