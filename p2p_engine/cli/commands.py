"""The command lines and environments of a fleet's processes."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import CONNECTOR, EXTRA, merge_configs, with_role

# By default vLLM kills its engine at once, and the connector cannot say goodbye to its peers. This
# is less than the fleet's grace period, after which everything is killed.
_SHUTDOWN_SECONDS = 12


class MemberRole(str, enum.Enum):
    """The role of an instance; a single one serves alone, without a connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    SINGLE = "single"


_KV_ROLES = {
    MemberRole.PREFILL: "kv_producer",
    MemberRole.DECODE: "kv_consumer",
    MemberRole.BOTH: "kv_both",
}


@dataclass(frozen=True)
class InstancePlan:
    """The settings of one vLLM instance."""

    name: str
    role: MemberRole
    model: str
    host: str
    http_port: int
    kv_port: int = 0
    registration_address: str = ""
    tp_size: int = 1
    send_type: str = "PUT_ASYNC"
    key_file: str = ""
    vllm_args: tuple[str, ...] = ()
    dp_size: int = 1  # data-parallel ranks
    # The first ports of its KV events and of their replay; 0: it publishes none.
    events_port: int = 0
    replay_port: int = 0

    @property
    def http_address(self) -> str:
        """The address of its HTTP server."""
        return f"{self.host}:{self.http_port}"

    @property
    def kv_address(self) -> str:
        """The address of its directory, by which its peers know it."""
        return f"{self.host}:{self.kv_port}"

    @property
    def rank_ports(self) -> list[int]:
        """The ports of all its data-parallel ranks: of their directories and KV events."""
        firsts = [port for port in (self.kv_port, self.events_port, self.replay_port) if port]
        return [port for first in firsts for port in range(first, first + self.dp_size)]


def option_value(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options, as `--name value` or `--name=value`; None:
    absent."""
    found = None
    for number, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(arguments[number + 1 :]), None)
    return found


def data_parallel_size(arguments: Sequence[str]) -> int:
    """Return the number of data-parallel ranks that these vLLM options set.

    Raises:
        ConfigError: the value is not a number of ranks.
    """
    value = option_value(arguments, "--data-parallel-size", "-dp") or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--data-parallel-size {value} among the vLLM arguments: not a number")
    return int(value)


def transfer_config(plan: InstancePlan) -> dict[str, Any]:
    """Return an instance's --kv-transfer-config."""
    extra = {"host": plan.host, "http_port": plan.http_port, "send_type": plan.send_type}
    if plan.registration_address:
        proxy_ip, _, proxy_port = plan.registration_address.rpartition(":")
        extra |= {"proxy_ip": proxy_ip, "proxy_port": int(proxy_port)}
    if plan.key_file:
        extra["key_file"] = plan.key_file
    return {
        "kv_connector": CONNECTOR,
        "kv_role": _KV_ROLES[plan.role],
        "kv_port": plan.kv_port,
        EXTRA: extra,
    }


def events_config(plan: InstancePlan) -> dict[str, Any]:
    """Return an instance's --kv-events-config, whose host is an IPv4 address. vLLM adds the number
    of a data-parallel rank to both ports."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM dials an endpoint that has neither "*" nor "::"; libzmq binds this one on the host.
        "endpoint": f"tcp://[::ffff:{plan.host}]:{plan.events_port}",
        "replay_endpoint": f"tcp://{plan.host}:{plan.replay_port}",
    }


def vllm_command(plan: InstancePlan, overrides: Mapping[str, Any]) -> list[str]:
    """Return the command of a vLLM instance; it runs the module, as the CPU wheel's script is
    broken."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", plan.model, "--host", plan.host, "--port", str(plan.http_port)]
    command += ["--tensor-parallel-size", str(plan.tp_size)]
    command += ["--shutdown-timeout", str(_SHUTDOWN_SECONDS), *plan.vllm_args]
    if plan.role is not MemberRole.SINGLE:
        config = merge_configs(transfer_config(plan), overrides)
        config = with_role(config, _KV_ROLES[plan.role])
        command += ["--kv-transfer-config", json.dumps(config)]
    if plan.events_port:
        command += ["--kv-events-config", json.dumps(events_config(plan))]
    return command


def proxy_command(
    host: str, port: int, registration_port: int, arguments: Sequence[str] = ()
) -> list[str]:
    """Return the command of the proxy."""
    command = [sys.executable, "-m", "proxy", "--host", host, "--port", str(port)]
    command += ["--registration-host", host, "--registration-port", str(registration_port)]
    return [*command, *arguments]


def vllm_environment(plan: InstancePlan) -> dict[str, str]:
    """Return an instance's other variables: its address, and offline mode if the model is a
    folder."""
    offline = {"HF_HUB_OFFLINE": "1"} if Path(plan.model).is_dir() else {}
    return {"VLLM_HOST_IP": plan.host, **offline}
