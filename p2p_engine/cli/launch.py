"""`p2p-engine launch`: starts a fleet, shows how to use it, and stops it cleanly."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from p2p_engine.cli.commands import MemberRole, data_parallel_size
from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.display import StartDisplay
from p2p_engine.cli.fleet import Fleet, FleetInterrupted
from p2p_engine.cli.members import MemberLost
from p2p_engine.config import EngineConfig
from p2p_engine.control.fleet_key import read_key_file, warn_if_exposed
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import (
    CONNECTOR,
    EXTRA,
    extra_of,
    merge_configs,
    our_config,
    with_role,
)
from p2p_engine.wire.addresses import split_address

# vLLM options that the launcher sets for each instance, and how to set them instead.
_OURS = {
    "--host": "--host before the --",
    "--kv-transfer-config": "--kv-transfer-config before the --",
    "--model": "--model before the --",
    "--port": "nothing: each instance gets a free port",
    "--tensor-parallel-size": "--tp before the --",
    "-tp": "--tp before the --",
}
# vLLM options that make one instance several commands, or give it several servers.
_SEVERAL_COMMANDS = (
    *("--data-parallel-address", "-dpa", "--data-parallel-external-lb"),
    *("--data-parallel-hybrid-lb", "--data-parallel-multi-port-external-lb"),
    *("--data-parallel-rank", "-dpn", "--data-parallel-size-local", "-dpl"),
    *("--data-parallel-start-rank", "-dpe", "-dph", "-dpm", "-dpr"),
    *("--headless", "--nnodes", "-n"),
)
_ANY_ADDRESS = ("0.0.0.0", "")


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch, validated."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    tp_size: int = 1
    send_type: str = "PUT_ASYNC"
    host: str = "127.0.0.1"
    port: int = 10001
    registration_port: int = 30001
    join: str = ""
    key_file: str = ""
    log_dir: Path | None = None
    timeout_seconds: float = 1800.0
    transfer_config: Mapping[str, Any] = field(default_factory=dict)
    kv_events: bool = False
    vllm_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    proxy_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate the options, because vLLM would report errors only minutes later, and make the
        folder of the logs.

        Raises:
            ConfigError: names the option and the alternative.
        """
        if self.num_prefill + self.num_decode + self.num_both < 1:
            raise ConfigError("nothing to launch: --prefill, --decode and --both are all 0")
        if self.join and self.proxy_args:
            raise ConfigError("--proxy-args: the proxy that --join names has its own")
        if self.join:
            try:
                split_address(self.join)
            except ValueError as error:
                raise ConfigError(f"--join: {error}") from error
        if self.log_dir is not None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--log-dir {self.log_dir}: {error.strerror}") from error
        if self.host in _ANY_ADDRESS or ":" in self.host:
            raise ConfigError(f"--host {self.host}: give the one IPv4 address that peers dial")
        if self.kv_events and not _is_ipv4(self.host):
            raise ConfigError(f"--kv-events: --host {self.host} is no IPv4 address")
        for argument in (*self.vllm_args, *self.prefill_args, *self.decode_args):
            name = argument.partition("=")[0].replace("_", "-")
            if name in _SEVERAL_COMMANDS:
                raise ConfigError(
                    f"{name} among the vLLM arguments: an instance of the launcher is one command "
                    "with one server; start these with vllm serve, see docs/configuration.md"
                )
            if name in _OURS:
                raise ConfigError(f"{name} among the vLLM arguments: use {_OURS[name]}")
            if name == "--kv-events-config" and self.kv_events:
                raise ConfigError(f"{name} among the vLLM arguments: --kv-events sets it")
        data_parallel_size((*self.vllm_args, *self.prefill_args, *self.decode_args))
        read_key_file(self.key_file)
        self._check_transfer_config()

    def _check_transfer_config(self) -> None:
        """Check the configuration of the instances; port and role are placeholders."""
        extra = {"http_port": 1, "send_type": self.send_type}
        config = merge_configs({"kv_connector": CONNECTOR, EXTRA: extra}, self.transfer_config)
        for problem in config_problems(with_role(config, "kv_both")):
            raise ConfigError(problem)
        # Check it again as it is: no shell substitutes variables here.
        EngineConfig.from_extra_config(extra_of(our_config(config)))

    def roles(self) -> list[tuple[MemberRole, tuple[str, ...]]]:
        """Return each instance to start, with the vLLM arguments of its role."""
        return [
            *[(MemberRole.PREFILL, self.prefill_args)] * self.num_prefill,
            *[(MemberRole.DECODE, self.decode_args)] * self.num_decode,
            *[(MemberRole.BOTH, (*self.prefill_args, *self.decode_args))] * self.num_both,
        ]

    @property
    def served_model(self) -> str:
        """The model name for requests."""
        arguments = [part for word in self.vllm_args for part in word.split("=", 1)]
        names = dict(itertools.pairwise(arguments))
        return names.get("--served-model-name", self.model)


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def run_launch(options: LaunchOptions, console: Console) -> int:
    """Launch, then block until a signal or the loss of a member; return the exit code."""
    fleet = Fleet(
        options.model,
        tp_size=options.tp_size,
        send_type=options.send_type,
        host=options.host,
        vllm_args=options.vllm_args,
        transfer_config=options.transfer_config,
        kv_events=options.kv_events,
        log_dir=options.log_dir,
        planned_instances=len(options.roles()),
    )
    with stopping_on_signals(fleet), fleet:
        try:
            start_members(fleet, options, console)
            _explain(fleet, options, console)
            fleet.watch()
        except FleetInterrupted:
            pass
        except (MemberLost, TimeoutError, OSError) as error:
            console.print(f"[bold red]{type(error).__name__}:[/] ", end="")
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            return 1
        finally:
            console.print("stopping all; press Ctrl-C again to kill them", highlight=False)
    console.print("stopped", highlight=False)
    return 0


def start_members(fleet: Fleet, options: LaunchOptions, console: Console) -> None:
    """Start the proxy (or join one) and all instances at once; wait until they serve."""
    fleet.key_file = options.key_file and os.path.abspath(options.key_file)
    warn_if_exposed(options.host, read_key_file(options.key_file))
    console.print(f"logs in {fleet.log_dir}", highlight=False, soft_wrap=True)
    if options.join:
        fleet.registration_address = options.join
    else:
        fleet.start_proxy(
            options.port, registration_port=options.registration_port, arguments=options.proxy_args
        )
    for role, vllm_args in options.roles():
        fleet.start(role, vllm_args=vllm_args)
    with StartDisplay(console) as display:
        fleet.wait_ready(timeout=options.timeout_seconds, on_look=display.show)


@contextlib.contextmanager
def stopping_on_signals(fleet: Fleet) -> Iterator[None]:
    """Make SIGINT and SIGTERM stop the fleet, and a second signal kill it."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if fleet.interrupted:
            fleet.hurry()
        fleet.interrupted = True

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(fleet: Fleet, options: LaunchOptions, console: Console) -> None:
    table = Table("instance", "HTTP", "KV", "log")
    for member in fleet.members:
        kv_address = member.plan.kv_address if member.plan else fleet.registration_address
        table.add_row(member.name, member.http_address, kv_address, member.process.log_path.name)
    console.print(table)
    if fleet.proxy is not None:
        body = json.dumps({"model": options.served_model, "prompt": "Hello", "max_tokens": 16})
        curl = ["curl", f"{fleet.proxy.url}/v1/completions", "-d", body]
        curl += ["-H", "Content-Type: application/json"]
        for meaning, command in (
            ("ask", curl),
            ("one more decode instance, now", _join_command(fleet, options)),
        ):
            line = f"{meaning}:  {shlex.join(command)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops all", highlight=False)


def _join_command(fleet: Fleet, options: LaunchOptions) -> list[str]:
    command = ["p2p-engine", "launch", "--model", options.model, "--prefill", "0", "--decode", "1"]
    command += ["--tp", str(options.tp_size), "--join", fleet.registration_address]
    command += ["--send-type", options.send_type]
    command += ["--key-file", fleet.key_file] if fleet.key_file else []
    if options.transfer_config:
        command += ["--kv-transfer-config", json.dumps(options.transfer_config)]
    command += ["--kv-events"] if options.kv_events else []
    arguments = [*options.vllm_args, *options.decode_args]
    return [*command, "--", *arguments] if arguments else command
