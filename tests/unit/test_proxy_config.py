"""Settings, the command line that makes them, and what starting the proxy needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.errors import ConfigError
from proxy import ProxyConfig, create_app
from proxy.app import MAX_ADMIN_BYTES
from proxy.main import HELP, main


def test_the_defaults_are_the_ports_that_people_know() -> None:
    config = ProxyConfig()
    assert (config.port, config.registration_port) == (10001, 30001)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", -1),
        ("registration_port", 65536),
        ("max_instances", 0),
        ("missed_beats", 0),
        ("gap_timeout_seconds", 0.0),
        ("prefill_timeout_seconds", float("inf")),
        ("connect_timeout_seconds", float("nan")),
        ("max_body_bytes", -1),
        ("dispatch", "at random"),
        ("prefill_policy", "the nicest"),
        ("decode_policy", ""),
        ("bypass_tokens", -1),
        ("trace_share", 1.5),
        ("peers", "10.0.0.1"),
    ],
)
def test_an_impossible_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*{value!r}.*; allowed: "):
        create_app(ProxyConfig(**{key: value}))


@pytest.mark.parametrize("listed", ["10.0.0.1", "10.0.0.1:80@", "h:80,h:81@h"])
def test_a_static_instance_needs_whole_addresses(listed: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        ProxyConfig(prefill=listed)


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_key_file_without_a_key_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match="admin_key_file"):
        create_app(ProxyConfig(admin_key_file=str(path)))


def test_quart_is_kept_from_cutting_streams_and_bodies() -> None:
    app = create_app(ProxyConfig(client_timeout_seconds=77.0))
    assert app.config["RESPONSE_TIMEOUT"] is None
    assert app.config["BODY_TIMEOUT"] == 77.0
    assert app.config["MAX_CONTENT_LENGTH"] == MAX_ADMIN_BYTES


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(HELP) == {field.name for field in fields(ProxyConfig)}
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: p2p-engine proxy ")
    for field in fields(ProxyConfig):
        assert "--" + field.name.replace("_", "-") in shown


def test_a_wrong_option_ends_the_command_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--gap-timeout-seconds", "-3"])
    assert caught.value.code == 2
    assert "gap_timeout_seconds is -3.0; allowed: a number above 0" in capsys.readouterr().err


def test_the_proxy_loads_neither_torch_nor_the_engine() -> None:
    heavy = [
        "torch",
        "numpy",
        "vllm",
        "mempool",
        "p2p_engine.engine",
        "p2p_engine.control.plane",
    ]
    code = f"import proxy, proxy.main, sys; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
