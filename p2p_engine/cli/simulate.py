"""`p2p-engine simulate`: a fleet of stand-ins, controlled by commands while it runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from p2p_engine.cli import commands
from p2p_engine.cli.autoscale import AutoscaleOptions, Autoscaler
from p2p_engine.cli.commands import InstancePlan, MemberRole
from p2p_engine.cli.fleet import Fleet, FleetInterrupted
from p2p_engine.cli.launch import LaunchOptions, start_members, stopping_on_signals
from p2p_engine.cli.members import Member, MemberLost, post_json
from p2p_engine.transfer_config import EXTRA, merge_configs

_POLL_SECONDS = 0.25
_READY_SECONDS = 60.0
# Landing memory of each stand-in: enough for some hundred prompts of usual length.
_SMALL = {EXTRA: {"kv_buffer_size": 64 << 20, "mem_pool_size_gb": 0.0625}}
_ROLES = ("prefill", "decode", "both")
_HELP = """add ROLE [COUNT]   one or more prefill, decode or both
drain NAME         no new requests; `resume NAME` ends that
stop NAME          ends its work, says goodbye and exits
kill NAME          ends at once, as by a power cut
list               all processes
quit               stop all"""


class SimulatedFleet(Fleet):
    """A fleet of stand-ins; their options take the place of vLLM's."""

    def __init__(self, *, transfer_config: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Plan a fleet; nothing is started yet. Arguments as for Fleet."""
        config = merge_configs(_SMALL, transfer_config or {})
        super().__init__(more.pop("model", "simulated"), transfer_config=config, **more)
        # The file with the proxy's admin key, once that was started.
        self.admin_key_file = self.log_dir / "admin.key"

    def start_proxy(self, *ports: Any, arguments: Sequence[str] = (), **more: Any) -> Member:
        """Start the proxy with an admin key of its own, unless `arguments` name a file with one."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--admin-key-file", type=Path)
        if given := parser.parse_known_args(arguments)[0].admin_key_file:
            self.admin_key_file = given
        else:
            self.admin_key_file.touch(0o600)
            self.admin_key_file.write_text(secrets.token_hex(16))
            arguments = (*arguments, "--admin-key-file", str(self.admin_key_file))
        return super().start_proxy(*ports, arguments=arguments, **more)

    def find(self, name: str) -> Member:
        """Return a stand-in by its name.

        Raises:
            ValueError: there is none; the message lists the names.
        """
        for member in self.instances:
            if member.name == name:
                return member
        raise ValueError(f"{name!r} is not here: {self.names}")

    @property
    def names(self) -> str:
        """The names of all stand-ins, for a message."""
        return ", ".join(member.name for member in self.instances) or "there is none"

    def order(self, verb: str, member: Member) -> str:
        """Make the proxy `remove` (drain) or `add` (resume) an instance; return its message.

        Raises:
            OSError: this fleet joined another proxy, or the proxy refused.
        """
        if self.proxy is None:
            raise OSError("this fleet has no proxy of its own")
        url, asked = f"{self.proxy.url}/instances/{verb}", {"instance": member.http_address}
        answer = post_json(url, asked, {"X-Api-Key": self.admin_key_file.read_text().strip()})
        return str(answer["message"])

    def _instance_command(self, plan: InstancePlan, overrides: Mapping[str, Any]) -> list[str]:
        config = merge_configs(commands.transfer_config(plan), overrides)
        command = [sys.executable, "-m", "p2p_engine.simulate", "--model", plan.model]
        command += ["--host", plan.host, "--port", str(plan.http_port), *plan.vllm_args]
        return [*command, "--kv-transfer-config", json.dumps(config)]


def run_simulate(options: LaunchOptions, autoscale: AutoscaleOptions, console: Console) -> int:
    """Start the fleet, then run commands from standard input until a signal or `quit`, and scale
    it meanwhile if that is asked for.

    Returns the exit code.
    """
    fleet = SimulatedFleet(
        model=options.model,
        send_type=options.send_type,
        host=options.host,
        vllm_args=options.vllm_args,
        log_dir=options.log_dir,
    )
    with stopping_on_signals(fleet), fleet:
        try:
            start_members(fleet, options, console)
            _list(fleet, console)
            if fleet.proxy is not None:
                _say(console, f"status page: {fleet.proxy.url}/  admin key: {fleet.admin_key_file}")
            _say(console, "type `help` for commands; Ctrl-C stops all")
            drain, say = partial(fleet.order, "remove"), partial(_say, console)
            _obey_until_stopped(fleet, console, Autoscaler(fleet, drain, autoscale, say))
        except FleetInterrupted:
            pass
        except (MemberLost, TimeoutError, OSError) as error:
            _say(console, getattr(error, "strerror", None) or str(error))
            return 1
    _say(console, "stopped")
    return 0


def _obey_until_stopped(fleet: SimulatedFleet, console: Console, autoscaler: Autoscaler) -> None:
    lines = _Lines(sys.stdin.fileno())
    while not fleet.interrupted:
        acts: list[Callable[[], None]] = [
            partial(_obey, fleet, console, line.split()) for line in lines.wait(_POLL_SECONDS)
        ]
        for act in (*acts, autoscaler.step):
            try:
                act()
            except (ValueError, OSError, TimeoutError) as error:
                _say(console, getattr(error, "strerror", None) or str(error))
        try:
            fleet.check(ignore_interrupt=True)
        except MemberLost as lost:
            if lost.member is fleet.proxy:
                raise
            _say(console, str(lost))
            fleet.stop(lost.member)


def _obey(fleet: SimulatedFleet, console: Console, words: list[str]) -> None:
    named: dict[str, Callable[[Member], object]] = {
        "drain": lambda member: _say(console, fleet.order("remove", member)),
        "resume": lambda member: _say(console, fleet.order("add", member)),
        "stop": fleet.stop,
        "kill": fleet.kill,
    }
    match words:
        case []:
            return
        case ["add", *what]:
            started = [fleet.start(role) for role in _roles(what)]
            fleet.wait_ready(*started, timeout=_READY_SECONDS)
            _list(fleet, console)
        case [verb, name] if verb in named:
            named[verb](fleet.find(name))
            _say(console, f"done: {verb} {name}")
        case [verb, *_] if verb in named:
            raise ValueError(f"{verb} which? one of {fleet.names}")
        case ["list"]:
            _list(fleet, console)
        case ["quit"]:
            fleet.interrupted = True
        case ["help"]:
            _say(console, _HELP)
        case _:
            _say(console, f"unknown: {' '.join(words)}\n{_HELP}")


def _roles(words: list[str]) -> list[MemberRole]:
    """Return the role of each stand-in that is to be added, given as ROLE [COUNT].

    Raises:
        ValueError: it is not of that form.
    """
    role, count = (*words, "1")[:2] if words else ("", "1")
    if role not in _ROLES or len(words) > 2 or not re.fullmatch("[1-9][0-9]?", count):
        allowed = f"ROLE is {', '.join(_ROLES)}, and COUNT 1 to 99"
        raise ValueError(f"add {' '.join(words)}: not add ROLE [COUNT]; {allowed}")
    return [MemberRole(role)] * int(count)


def _list(fleet: SimulatedFleet, console: Console) -> None:
    table = Table("instance", "HTTP", "KV", "process")
    for member in fleet.members:
        kv_address = member.plan.kv_address if member.plan else fleet.registration_address
        table.add_row(member.name, member.http_address, kv_address, str(member.process.pid))
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Lines:
    """Reads complete lines from a descriptor without a thread; nothing more after its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int = descriptor
        self._partial = b""
        self._has_ended = False

    def wait(self, timeout: float) -> list[str]:
        """Wait for input, at most `timeout` seconds; return the lines that are complete."""
        descriptors = [] if self._has_ended else [self._descriptor]
        if not select.select(descriptors, [], [], timeout)[0]:
            return []
        added = os.read(self._descriptor, 4096)
        self._has_ended = not added
        *lines, self._partial = (self._partial + added).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
