"""A proxy and vLLM instances on this machine, for commands, tests and benchmarks."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from p2p_engine.cli import commands
from p2p_engine.cli.commands import InstancePlan, MemberRole
from p2p_engine.cli.devices import find_devices
from p2p_engine.cli.members import Member, MemberLost, fetch_text
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.processes import ChildProcess, stop_all
from p2p_engine.errors import P2pError
from p2p_engine.transfer_config import merge_configs

FleetT = TypeVar("FleetT", bound="Fleet")

_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 3.0  # between two of an instance
_REGISTERING = "registering with the proxy"
_REGISTRATION = re.compile(r'"registration_address":"([^"]+)"')
_KILL_SECONDS = 10.0


class FleetInterrupted(P2pError):
    """The fleet was asked to stop while a call waited for it."""


class Fleet:
    """Starts, watches and stops the processes. Not thread-safe; a context manager.

    `vllm_args`, `transfer_config` (merged into each instance's --kv-transfer-config) and `env`
    apply to all instances; `start` adds to them. With `kv_events` each publishes its KV events.
    Cores or GPUs are divided among `planned_instances`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tp_size: int = 1,
        send_type: str = "PUT_ASYNC",
        host: str = "127.0.0.1",
        vllm_args: Sequence[str] = (),
        transfer_config: Mapping[str, Any] | None = None,
        kv_events: bool = False,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        planned_instances: int = 2,
        grace_seconds: float = 20.0,
    ) -> None:
        """Plan a fleet; nothing is started yet."""
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="p2p-engine-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.proxy: Member | None = None
        self.members: list[Member] = []
        self.registration_address = ""  # the proxy with which new instances register
        self.key_file = ""  # for every process that is started from now on
        self.interrupted = False  # set by signal handlers; waiting calls see it within a poll
        self._model = str(model)
        self._tp_size = tp_size
        self._send_type = send_type
        self._host = host
        self._vllm_args = tuple(vllm_args)
        self._transfer_config = dict(transfer_config or {})
        self._kv_events = kv_events
        self._env = dict(env or {})
        num_ranks = tp_size * commands.data_parallel_size(self._vllm_args)
        self._devices = find_devices(num_ranks, planned_instances, {**os.environ, **self._env})
        self._grace_seconds = grace_seconds
        self._ports = PortPlan(host)
        self._names: set[str] = set()

    @property
    def instances(self) -> list[Member]:
        """The vLLM instances that were started and not stopped."""
        return [member for member in self.members if member is not self.proxy]

    def start_proxy(
        self, port: int = 0, *, registration_port: int = 0, arguments: Sequence[str] = ()
    ) -> Member:
        """Start the proxy on these ports, 0 for any; instances started later register with it.

        Raises:
            OSError: a port is in use, or the process could not be started.
        """
        port = self._ports.take(port)
        registration_port = self._ports.take(registration_port)
        self.registration_address = f"{self._host}:{registration_port}"
        keys = ("--key-file", self.key_file) if self.key_file else ()
        command = self._proxy_command(port, registration_port, (*keys, *arguments))
        process = self._spawn("proxy", command, self._env)
        self.proxy = Member("proxy", f"{self._host}:{port}", process)
        self.members.append(self.proxy)
        return self.proxy

    def start(
        self,
        role: MemberRole | str,
        *,
        name: str | None = None,
        vllm_args: Sequence[str] = (),
        transfer_config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        successor_of: Member | None = None,
    ) -> Member:
        """Start one more instance; does not wait for it (`wait_ready` does).

        `successor_of` is a member that was stopped or killed; the new one gets its addresses.

        Raises:
            OSError: a port is in use, or the process could not be started.
        """
        predecessor = successor_of.plan if successor_of is not None else None
        plan = self._plan(MemberRole(role), name, vllm_args, predecessor)
        overrides = merge_configs(self._transfer_config, transfer_config or {})
        slot = self._free_slot()
        given = {**self._devices.environment(slot), **self._env, **(env or {})}
        settings = {**commands.vllm_environment(plan), **given}
        process = self._spawn(plan.name, self._instance_command(plan, overrides), settings)
        member = Member(plan.name, plan.http_address, process, plan=plan, slot=slot)
        self.members.append(member)
        return member

    def wait_ready(
        self,
        *members: Member,
        timeout: float = 600.0,
        on_look: Callable[[Collection[Member]], object] | None = None,
    ) -> None:
        """Block until these members (or all) serve; `on_look` is called after each poll.

        Raises:
            MemberLost: a member of the fleet has ended.
            FleetInterrupted: `interrupted` was set.
            TimeoutError: after `timeout` seconds; names the members that are not ready.
        """
        watched = members or tuple(self.members)
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            for member in watched:
                if not member.is_ready:
                    member.look(unregistered=self._what_is_missing)
            if on_look is not None:
                on_look(watched)
            late = [f"{member.name} ({member.stage})" for member in watched if not member.is_ready]
            if not late:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {timeout:g} s: {', '.join(late)}")
            time.sleep(_POLL_SECONDS)

    def watch(self) -> None:
        """Block until the fleet is interrupted.

        Raises:
            MemberLost: a member has ended by itself.
        """
        while not self.interrupted:
            self.check(ignore_interrupt=True)
            time.sleep(_POLL_SECONDS)

    def check(self, *, ignore_interrupt: bool = False) -> None:
        """Check the fleet once, without waiting.

        Raises:
            MemberLost: a member has ended by itself.
            FleetInterrupted: `interrupted` was set.
        """
        for member in self.members:
            if not member.process.running:
                raise MemberLost(member)
        if self.interrupted and not ignore_interrupt:
            raise FleetInterrupted("the fleet was asked to stop")

    def stop(self, member: Member) -> None:
        """End one member cleanly; kill it after the grace period."""
        member.process.stop()
        self._forget(member)

    def kill(self, member: Member) -> None:
        """Kill a member and all its processes with SIGKILL, like a crash of its machine."""
        member.process.kill()
        member.process.wait(_KILL_SECONDS)
        self._forget(member)

    def hurry(self) -> None:
        """Kill all members; does not block, and is safe in a signal handler."""
        for member in self.members:
            member.process.kill()

    def close(self) -> None:
        """End all members, the proxy last; bounded and idempotent."""
        stop_all([member.process for member in self.instances])
        stop_all([member.process for member in self.members])
        self.members.clear()
        self._ports.close()

    def __enter__(self: FleetT) -> FleetT:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all."""
        self.close()

    def _plan(
        self,
        role: MemberRole,
        name: str | None,
        vllm_args: Sequence[str],
        predecessor: InstancePlan | None,
    ) -> InstancePlan:
        arguments = (*self._vllm_args, *vllm_args)
        dp_size = commands.data_parallel_size(arguments)
        before = predecessor or InstancePlan("", role, "", "", 0)
        return InstancePlan(
            name=name or self._new_name(role),
            role=role,
            model=self._model,
            host=self._host,
            http_port=self._ports.take(before.http_port),
            kv_port=self._ports.take_range(dp_size, before.kv_port),
            **self._events_ports(dp_size, before),
            registration_address=self.registration_address,
            tp_size=self._tp_size,
            send_type=self._send_type,
            key_file=self.key_file,
            vllm_args=arguments,
            dp_size=dp_size,
        )

    def _events_ports(self, dp_size: int, before: InstancePlan) -> dict[str, int]:
        if not self._kv_events:
            return {}
        return {
            "events_port": self._ports.take_range(dp_size, before.events_port),
            "replay_port": self._ports.take_range(dp_size, before.replay_port),
        }

    def _new_name(self, role: MemberRole) -> str:
        """Return a name that no process of this fleet has had, so that each keeps its own log."""
        names = (f"{role.value}-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self._names)

    def _free_slot(self) -> int:
        used = {member.slot for member in self.members}
        return next(slot for slot in itertools.count() if slot not in used)

    def _spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> ChildProcess:
        self._names.add(name)
        return ChildProcess(
            name,
            command,
            log_path=self.log_dir / f"{name}.log",
            env={**os.environ, **env},
            grace_seconds=self._grace_seconds,
        )

    def _forget(self, member: Member) -> None:
        self.members.remove(member)
        self._ports.release(int(member.http_address.rpartition(":")[2]))
        for port in member.plan.rank_ports if member.plan else ():
            self._ports.release(port)

    def _what_is_missing(self, member: Member) -> str:
        """Say what is missing until a member that answers is registered; "" if nothing is."""
        if member.plan is None or member.plan.role is MemberRole.SINGLE:
            return ""
        if member.refusal:
            return f"not registered: {member.refusal}{self._likely_cause()}"
        if self.proxy is None:  # of another fleet: the instance alone can tell, at its heartbeats
            is_sure = time.monotonic() - (member.answers_since or 0.0) > _HEARTBEAT_SECONDS
            return "" if is_sure or not self.registration_address else _REGISTERING
        status = json.loads(fetch_text(f"{self.proxy.url}/status") or '{"instances": []}')
        mine = [i for i in status["instances"] if i["http_address"] == member.http_address]
        is_complete = len(mine) >= member.plan.dp_size
        is_ready = is_complete and all(item["state"] == "ready" for item in mine)
        return "" if is_ready else _REGISTERING

    def _likely_cause(self) -> str:
        """Say what answers HTTP where instances should register."""
        status = fetch_text(f"http://{self.registration_address}/status")
        if status is None:
            return ""
        known = _REGISTRATION.search(status)
        rather = f", here {known[1]}" if known else ""
        return f"; that port answers HTTP: name the proxy's registration port (30001{rather})"

    # The processes' commands; tests replace them by cheap ones.
    _instance_command = staticmethod(commands.vllm_command)

    def _proxy_command(
        self, port: int, registration_port: int, arguments: Sequence[str]
    ) -> list[str]:
        return commands.proxy_command(self._host, port, registration_port, arguments)
