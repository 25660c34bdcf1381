"""The commands take their options, and refuse impossible ones before anything is started."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from p2p_engine.cli import simulate
from p2p_engine.cli.app import app
from p2p_engine.cli.bench import benchmark_names, run_bench
from p2p_engine.errors import ConfigError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


class Recorder:
    """Stands in for what a command does: keeps its first argument, returns an exit code."""

    def __init__(self, code: int) -> None:
        self.seen: list[Any] = []
        self._code = code

    def __call__(self, seen: Any, console: object = None) -> int:
        self.seen.append(seen)
        return self._code


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    assert run("keygen", str(path)).exit_code == 0
    before = path.read_text()
    result = run("keygen", str(path))
    assert (result.exit_code, path.read_text()) == (2, before)
    assert "never overwritten" in result.output


@pytest.mark.parametrize(
    "command", ["launch", "simulate", "bench", "doctor", "demo", "keygen", "size"]
)
def test_each_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "60", "TERM": "dumb"})
    assert result.exit_code == 0
    assert f"Usage: p2p-engine {command}" in result.stdout
    assert "…" not in result.stdout, "a name is cut"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("launch", "--prefill", "1"), "--model"),
        (("launch", "--model", "m", "--send-type", "PUSH"), "PUT, PUT_ASYNC, GET"),
        (("launch", "--model", "m", "--prefill", "0", "--decode", "0"), "nothing to launch"),
        (("launch", "--model", "m", "--key-file", "/no/such.key"), "cannot be read"),
        (("launch", "--model", "m", "--", "--port", "1"), "each instance gets a free port"),
        (("launch", "--model", "m", "--kv-transfer-config", "{"), "not JSON"),
        (("launch", "--model", "m", "--kv-transfer-config", "[]"), "not a JSON object"),
        (("launch", "--model", "m", "--port", "70000"), "--port"),
        (("launch", "--model", "m", "--port", "-1"), "--port"),
        (("simulate", "--registration-port", "70000"), "--registration-port"),
        (("launch", "--model", "m", "--join", "foo"), "--join: 'foo' is not host:port"),
        (("simulate", "--join", "127.0.0.1:99999"), "is not host:port"),
        (("launch", "--model", "m", "--prefill-args", "'a"), "--prefill-args 'a: No closing"),
        (("simulate", "--proxy-args", "'a"), "--proxy-args 'a: No closing"),
        (("launch", "--model", "m", "--log-dir", "/etc/passwd"), "--log-dir /etc/passwd: File"),
        (("simulate", "--autoscale", "both=1:2:3"), "'both=1:2:3': not ROLE=MIN:MAX:TARGET"),
        (("simulate", "--autoscale", "decode=3:2:1"), "1 <= MIN <= MAX <= 99"),
        (("simulate", "--autoscale", "decode=0:2:1"), "1 <= MIN <= MAX <= 99"),
        (("simulate", "--autoscale", "prefill=1:2:0"), "TARGET above 0"),
        (("simulate", "--autoscale", "prefill=1:2:1,"), "''"),
        (("simulate", "--autoscale", "prefill=1:2:1", "--both", "1"), "neither with --both"),
        (("simulate", "--autoscale", "prefill=1:2:1", "--join", "127.0.0.1:1"), "nor with --join"),
        (("simulate", "--autoscale-interval", "nan"), "--autoscale-interval"),
        (("simulate", "--log-dir", "/proc/nope"), "--log-dir /proc/nope: No such file"),
        (("demo", "--modes", "PUSH"), "all, or some of PUT,PUT_ASYNC,GET"),
        (("demo", "--requests", "0"), "--requests"),
        (("doctor", "--migrate"), "--migrate needs files"),
        (("doctor", "old.sh"), "only --migrate takes some"),
        (("doctor", "--migrate", "/no/such.sh"), "No such file"),
        (("doctor", "--migrate", "/proc"), "Is a directory"),
        (("doctor", "--migrate", "/dev/zero"), "more than 1048576 bytes"),
        (("doctor", "--gpu-memory", "-1"), "--gpu-memory"),
        (("doctor", "--gpu-memory", "nan"), "--gpu-memory"),
        (("doctor", "--gpu-memory", "inf"), "--gpu-memory"),
        (("doctor", "--gpu-memory-utilization", "nan"), "utilization"),
        (("doctor", "--gpu-memory-utilization", "1.01"), "--gpu-memory-utilization"),
        (("doctor", "--gpu-memory-utilization", "0"), "--gpu-memory-utilization"),
        (("doctor", "--kv-cache-memory-bytes", "-1"), "--kv-cache-memory-bytes"),
        (("bench", "nothing"), "benchmark 'nothing'"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_command_that_a_simulated_fleet_does_not_know_is_named() -> None:
    output = io.StringIO()
    simulate._obey(Mock(), Console(file=output), ["status", "decode-1"])
    assert output.getvalue().startswith("unknown: status decode-1\nadd ROLE")


def test_launch_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = Recorder(7)
    monkeypatch.setattr("p2p_engine.cli.launch.run_launch", launched)
    arguments = ["--prefill", "3", "--decode", "2", "--tp", "2", "--send-type", "GET"]
    arguments += ["--log-dir", str(tmp_path), "--decode-args", "--seed 1 --x 'a b'"]
    arguments += ["--kv-transfer-config", json.dumps({"kv_load_failure_policy": "recompute"})]
    result = run("launch", "--model", "m", *arguments, "--", "--dtype", "float32")
    (options,) = launched.seen
    assert result.exit_code == 7
    assert (options.num_prefill, options.num_decode, options.tp_size) == (3, 2, 2)
    assert options.send_type == "GET"
    assert options.log_dir == tmp_path
    assert options.decode_args == ("--seed", "1", "--x", "a b")
    assert options.transfer_config == {"kv_load_failure_policy": "recompute"}
    assert options.vllm_args == ("--dtype", "float32")


@pytest.mark.parametrize(
    ("modes", "chosen"),
    [("all", ["PUT", "PUT_ASYNC", "GET"]), ("GET,PUT", ["GET", "PUT"])],
)
def test_demo_modes(monkeypatch: pytest.MonkeyPatch, modes: str, chosen: list[str]) -> None:
    shown = Recorder(0)
    monkeypatch.setattr("p2p_engine.cli.demo.run_demo", shown)
    assert run("demo", "--modes", modes).exit_code == 0
    assert list(shown.seen[0].modes) == chosen


def test_who_drains_must_name_proxies_that_exist(tmp_path: Path) -> None:
    key = tmp_path / "admin.key"
    key.write_text("key")
    rest = ("--instance", "127.0.0.1:8000", "--admin-key-file")
    for name in ("127.0.0.1", "no.such.name.invalid:10001"):
        refused = run("drain", "--proxy", name, *rest, str(key))
        assert refused.exit_code == 2
        assert "proxy is" in refused.output
    assert run("drain", "--proxy", "127.0.0.1:1", *rest, str(tmp_path / "none")).exit_code == 2


def test_the_proxy_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Recorder(0)
    monkeypatch.setattr("proxy.main.main", started)
    assert run("proxy", "--port", "1", "--help").exit_code == 0
    assert started.seen == [["--port", "1", "--help"]]


def test_a_benchmark_gets_its_own_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # another checkout's benchmarks may be there
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_x.py").write_text("import sys; print(sys.argv[1:]); exit(3)")
    assert benchmark_names(tmp_path) == ["x"]
    assert run_bench("x", ["--help"], tmp_path) == 3
    assert capfd.readouterr().out == "['--help']\n"
    with pytest.raises(ConfigError, match="one of x"):
        run_bench("y", [], tmp_path)
    with pytest.raises(ConfigError, match="from a checkout"):
        run_bench("x", [], tmp_path / "elsewhere")
