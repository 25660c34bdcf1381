"""EngineConfig: every setting of one engine, parsed once, from strings or numbers."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_engine.errors import ConfigError
from p2p_engine.memory.host import memory_bytes
from p2p_engine.wire.addresses import is_any_address

HOST_TRANSPORTS = ("shm", "nixl", "tcp")
GPU_TRANSPORTS = ("cuda_ipc", "nccl")
TRANSPORT_NAMES = HOST_TRANSPORTS + GPU_TRANSPORTS
GIB = 1 << 30
CHUNK_BYTES = 16 << 20
GPU_CHUNK_BYTES = 96 << 20  # four are 8 ms of a NIC of 400 Gb/s, and most of the default buffer / 8
QUEUES = 32  # with so many hardware queues, no order of kernels was found that deadlocks
MAX_DEFAULT_PINNED_BYTES = 4 * GIB  # of each GPU's engine: what is used of it is page-locked

DEFAULT_UCX_TLS = "ib"  # all of RDMA, and nothing else
# What these have on its way ends with the agent of either side. Shared memory is not among them: a
# process that has mapped another one's memory, or knows its number, writes there for ever.
_FENCED = {
    "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5",
    "dc", "dc_x", "dc_mlx5", "srd", "tcp", "self", "cuda_copy", "gdr_copy",
}  # fmt: skip


class SendMode(str, enum.Enum):
    """How KV leaves a prefill instance."""

    PUT = "PUT"  # pushed; the step waits until the KV has left
    PUT_ASYNC = "PUT_ASYNC"  # pushed while the next steps run
    GET = "GET"  # held under a lease until the decode instance pulls it


def queue_risk(config: EngineConfig, kv_role: str, environment: Mapping[str, str]) -> str:
    """Return what an instance on a GPU risks with its number of hardware queues, and what to set;
    "" if nothing."""
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    has_enough = queues.isdecimal() and int(queues) >= QUEUES
    if kv_role != "kv_both" or "nccl" not in config.transports or has_enough:
        return ""
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS is {queues or 'not set (8)'}: kernels of an instance that "
        "sends and receives over nccl (kv_both) may wait for each other through streams that share "
        "a hardware queue, until connect_timeout_seconds ends their transfers; set it to "
        f"{QUEUES} in the environment of vLLM"
    )


def ucx_transports(environment: Mapping[str, str]) -> str:
    """Return UCX_TLS as it is set, or what takes its place.

    Raises:
        ConfigError: it names a transport whose writes nothing can end.
    """
    chosen = environment.get("UCX_TLS", "") or DEFAULT_UCX_TLS
    unknown = {name.strip() for name in chosen.split(",")} - _FENCED
    if unknown:
        raise ConfigError(
            f"UCX_TLS={chosen!r}: {sorted(unknown)[0]!r} is not possible with the transport nixl, "
            "because nothing would prove that a lost sender cannot write any more; allowed: "
            f"{', '.join(sorted(_FENCED))}"
        )
    return chosen


def default_pool_bytes(num_local_ranks: int) -> int:
    """Return each rank's share of a quarter of the memory that this container or machine has."""
    return memory_bytes() // (4 * num_local_ranks)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; sizes are bytes unless the name says otherwise, times are seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    kv_port_range: tuple[int, int] | None = None
    send_type: SendMode = SendMode.PUT_ASYNC
    kv_buffer_size: int = 10**9
    mem_pool_size_gb: float | None = None  # None: from the available memory
    num_local_ranks: int = 1  # engines that share that memory
    chunk_bytes: int = CHUNK_BYTES
    layerwise: bool = False  # what is pushed leaves layer by layer, while the prompt is computed
    transports: tuple[str, ...] = ()  # best first; empty: by the device
    device: str = "cpu"
    nccl_num_channels: int = 2
    nccl_max_groups: int = 16
    nccl_register: bool = False
    nccl_library: str = ""
    page_lock: bool = False
    checksum: bool = False
    proxy_ip: str = ""
    proxy_port: int = 0
    http_port: int = 0
    http_host: str = ""
    key_file: str = ""
    reset_keeps_weights: bool = False  # a reset of vLLM's caches does not mean new weights
    accept_differences: tuple[str, ...] = ()  # fields of the identity that peers need not share
    connect_timeout_seconds: float = 5.0
    transfer_timeout_seconds: float = 60.0
    lease_seconds: float = 60.0
    max_renewal_seconds: float = 3600.0
    stash_seconds: float = 0.0  # how long a finished request's KV waits for its session's next turn
    peer_timeout_seconds: float = 10.0
    retry_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Parse every field, from a string or a number.

        Raises:
            ConfigError: names the key, the value and the allowed values.
        """
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(name, getattr(self, name)))
        if not self.transports:
            chosen = ("shm", "tcp") if self.device == "cpu" else GPU_TRANSPORTS
            object.__setattr__(self, "transports", chosen)
        if bool(self.proxy_ip) != bool(self.proxy_port):
            raise ConfigError(
                f"proxy_ip={self.proxy_ip!r} and proxy_port={self.proxy_port!r}: "
                "set both to register with a proxy, or neither"
            )
        if self.proxy_ip and not self.http_port:
            raise ConfigError(
                "http_port is required with proxy_ip and proxy_port: "
                "the port that this instance's HTTP server listens on (vLLM's --port)"
            )

    def check_device(self) -> None:
        """Check that each transport can move the memory of this device.

        Raises:
            ConfigError: one cannot.
        """
        usable = HOST_TRANSPORTS if self.device == "cpu" else GPU_TRANSPORTS
        for name in self.transports:
            if name not in usable:
                raise ConfigError(
                    f"transports: {name!r} does not move memory of device={self.device!r}; "
                    f"allowed: {', '.join(usable)}"
                )

    def on_device(self, device: str) -> EngineConfig:
        """Return a copy for an engine of this device. What was not chosen follows it: transports
        and, on a GPU, larger chunks."""
        transports = () if self.transports == ("shm", "tcp") else self.transports
        chunk_bytes = self.chunk_bytes
        if device != "cpu" and chunk_bytes == CHUNK_BYTES:
            chunk_bytes = GPU_CHUNK_BYTES
        return dataclasses.replace(
            self, device=device, transports=transports, chunk_bytes=chunk_bytes
        )

    @property
    def device_index(self) -> int:
        """Return the number of the GPU, with device="cuda" or "cuda:N"."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def proxy_hosts(self) -> list[str]:
        """Return the hosts of the proxies to register with, all at `proxy_port`."""
        return self.proxy_ip.split(",") if self.proxy_ip else []

    @functools.cached_property
    def pool_bytes(self) -> int:
        """Return the budget of the tensor memory pool in bytes. If it was not chosen, it is limited
        to what each of a host's GPUs can page-lock."""
        if self.mem_pool_size_gb is not None:
            return int(self.mem_pool_size_gb * GIB)
        most = default_pool_bytes(self.num_local_ranks)
        return most if self.device == "cpu" else min(most, MAX_DEFAULT_PINNED_BYTES)

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any], **overrides: Any) -> EngineConfig:
        """Parse vLLM's `kv_connector_extra_config`; `overrides` are values that the caller knows
        better.

        Raises:
            ConfigError: a key is unknown, or a value is impossible.
        """
        unknown = sorted(set(extra) - EXTRA_KEYS)
        if unknown:
            allowed = ", ".join(sorted(EXTRA_KEYS))
            raise ConfigError(
                f"unknown key {unknown[0]!r}={extra[unknown[0]]!r} in kv_connector_extra_config; "
                f"allowed: {allowed}"
            )
        given = {key: value for key, value in extra.items() if value is not None}
        return cls(**{**given, **overrides})


def _refuse(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not possible; allowed: {allowed}")


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)


def _number(name: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(name, value, allowed)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _refuse(name, value, allowed) from None
    if not math.isfinite(number):
        raise _refuse(name, value, allowed)
    return number


def _between(
    low: float, high: float, convert: Callable[[float], Any], allowed: str
) -> Callable[[str, Any], Any]:
    def parse(name: str, value: Any) -> Any:
        number = _number(name, value, allowed)
        if not low <= number <= high or (convert is int and number != int(number)):
            raise _refuse(name, value, allowed)
        return convert(number)

    return parse


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "a string")
    return value


def _own_host(name: str, value: Any) -> str:
    """Parse a host that peers can dial. `0.0.0.0` would be themselves for each of them."""
    if is_any_address(_text(name, value)):
        raise _refuse(name, value, "one address of this machine, which its peers can dial")
    return str(value)


def _hosts(name: str, value: Any) -> str:
    """Parse one host or several, as a list or separated by commas; returns the latter form."""
    listed = value.split(",") if isinstance(value, str) else value
    if not _is_sequence(listed) or not all(isinstance(host, str) for host in listed):
        raise _refuse(name, value, "a host, or several")
    return ",".join(filter(None, (host.strip() for host in listed)))


def _flag(name: str, value: Any) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    word = str(value).lower()
    if word not in words:
        raise _refuse(name, value, "true or false")
    return words[word]


def _send_type(name: str, value: Any) -> SendMode:
    try:
        return SendMode(value)
    except ValueError:
        raise _refuse(name, value, ", ".join(mode.value for mode in SendMode)) from None


def _transports(name: str, value: Any) -> tuple[str, ...]:
    if value == ():
        return ()
    listed = value.split(",") if isinstance(value, str) else value
    names = tuple(str(item).strip() for item in listed) if _is_sequence(listed) else ()
    if not names or not set(names) <= set(TRANSPORT_NAMES) or len(set(names)) != len(names):
        raise _refuse(name, value, f"one or more of {', '.join(TRANSPORT_NAMES)}, best first")
    if {"shm", "nixl"} <= set(names) and names.index("nixl") < names.index("shm"):
        raise _refuse(name, value, "shm before nixl, because it is the better one on one host")
    return names


def _names(name: str, value: Any) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value
    if not _is_sequence(listed) or not all(isinstance(item, str) for item in listed):
        raise _refuse(name, value, "names, as a list or separated by commas")
    return tuple(sorted({item.strip() for item in listed} - {""}))


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        raise _refuse(name, value, "cpu, cuda or cuda:N")
    return value


def _power_of_two(name: str, value: Any) -> int:
    number = int(_between(1, 64, int, "1, 2, 4, 8, 16, 32 or 64")(name, value))
    if number & (number - 1):
        raise _refuse(name, value, "1, 2, 4, 8, 16, 32 or 64")
    return number


def _port_range(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    allowed = "FIRST-LAST with 1 <= FIRST <= LAST <= 65535"
    listed = value.split("-") if isinstance(value, str) else value
    parts = [str(part).strip() for part in listed] if _is_sequence(listed) else []
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise _refuse(name, value, allowed)
    first, last = int(parts[0]), int(parts[1])
    if not 1 <= first <= last <= 65535:
        raise _refuse(name, value, allowed)
    return first, last


def _pool_size(name: str, value: Any) -> float | None:
    """Parse a size in GiB; None: not chosen."""
    size = _between(0, 1 << 20, float, "0 to 2**20 GiB")
    return None if value is None else float(size(name, value))


_port = _between(0, 65535, int, "0 to 65535")
_seconds = _between(0.01, 86400, float, "0.01 to 86400 seconds")

_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "host": _own_host,
    "port": _port,
    "kv_port_range": _port_range,
    "send_type": _send_type,
    "kv_buffer_size": _between(0, 1 << 50, int, "0 to 2**50 bytes, also as '1e9'"),
    "mem_pool_size_gb": _pool_size,
    "num_local_ranks": _between(1, 1 << 16, int, "1 to 65536"),
    "layerwise": _flag,
    "chunk_bytes": _between(1, 1 << 50, int, "1 to 2**50 bytes, also as '16e6'"),
    "transports": _transports,
    "device": _device,
    "nccl_num_channels": _power_of_two,
    "nccl_max_groups": _between(1, 1 << 16, int, "1 to 65536"),
    "nccl_register": _flag,
    "nccl_library": _text,
    "page_lock": _flag,
    "checksum": _flag,
    "proxy_ip": _hosts,
    "proxy_port": lambda name, value: _port(name, value or 0),
    "http_port": lambda name, value: _port(name, value or 0),
    "http_host": _own_host,
    "key_file": _text,
    "reset_keeps_weights": _flag,
    "accept_differences": _names,
    "connect_timeout_seconds": _seconds,
    "transfer_timeout_seconds": _seconds,
    "lease_seconds": _seconds,
    "max_renewal_seconds": _seconds,
    "stash_seconds": _between(0, 86400, float, "0 to 86400 seconds; 0: nothing is stashed"),
    "peer_timeout_seconds": _seconds,
    "retry_seconds": _seconds,
}
# The settings open to users. The device, ports and ranks of an engine come from vLLM.
EXTRA_KEYS = frozenset(_PARSERS) - {"device", "num_local_ranks", "port"}
