"""The environment of a process on a GPU: variables of CUDA's and NCCL's with which the transport
nccl would block, outgrow its plan, or lose KV unseen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from p2p_engine.errors import ConfigError

MAX_KERNELS = 3  # per direction; their streams and the slabs' are fewer than 8 hardware queues
CONFIGURATION_FILES = ("~/.nccl.conf", "/etc/nccl.conf")


# Each raises the channels of a group above those that it is configured with (2.27 to 2.30). With
# NCCL_MIN_CTAS or NCCL_NCHANNELS_PER_NET_PEER, a group never has more than that.
RAISING_VARIABLES = (
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_MAX_CTAS",
)
# Each breaks what a kernel of ours relies on.
FLAG_VARIABLES = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": (
        "with it, kernels of the transport nccl and of the model wait for each other, and may "
        "deadlock"
    ),
    "NCCL_P2P_USE_CUDA_MEMCPY": (
        "with it, the bytes of the transport nccl go another way than the flags that say they are "
        "there, and nobody notices if they do not arrive"
    ),
}
# The buffers of each channel, as memory.py plans them: NCCL's defaults.
BUFFER_VARIABLES = {
    "NCCL_BUFFSIZE": 4 << 20,
    "NCCL_LL_BUFFSIZE": 512 << 10,
    "NCCL_LL128_BUFFSIZE": 4_915_200,
}


def check_environment(
    environment: Mapping[str, str],
    num_channels: int,
    *,
    registers: bool = False,
    is_mps: bool = False,
) -> None:
    """Refuse settings under which two kernels that wait for their peers block each other, or under
    which a group of `num_channels` has more of them. With `registers`, also those under which the
    end of a group would wait for its peer. `is_mps`: the process is a client of MPS.

    Raises:
        ConfigError: names the variable.
    """
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "2" if is_mps else "8")
    if not connections.isdecimal() or int(connections) < 2 * MAX_KERNELS + 2:
        raise ConfigError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: the transport nccl needs "
            f"{2 * MAX_KERNELS + 2} or more (CUDA's default is 8; for MPS's clients 2 are assumed)"
            ", else its kernels may deadlock"
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ConfigError("CUDA_LAUNCH_BLOCKING is set: with it the transport nccl deadlocks")
    if registers and environment.get("NCCL_LEGACY_CUDA_REGISTER", "0") not in ("", "0"):
        raise ConfigError(
            "nccl_register with NCCL_LEGACY_CUDA_REGISTER: a process of the same host could then "
            "keep a failed group from ending; set only one of them"
        )
    _check_overrides(_read_overrides(environment), num_channels)


def _check_overrides(overrides: Mapping[str, tuple[str, str]], num_channels: int) -> None:
    """Refuse variables that replace what a group of ours is configured with."""
    for name in (*FLAG_VARIABLES, "NCCL_COMM_BLOCKING", *RAISING_VARIABLES, *BUFFER_VARIABLES):
        value, where = overrides.get(name, ("", ""))
        if problem := _problem_of(name, value, num_channels):
            raise ConfigError(f"{name}={value}{where}: {problem}")


def _problem_of(name: str, value: str, num_channels: int) -> str:
    """Return what is wrong with a variable and how to mend it; empty if nothing is."""
    number = _number_of(value)
    if name in FLAG_VARIABLES and value not in ("", "0"):
        return FLAG_VARIABLES[name]
    if name == "NCCL_COMM_BLOCKING" and number == 1:
        return "with it, two instances that make groups to each other wait for ever"
    if name in BUFFER_VARIABLES and number > BUFFER_VARIABLES[name]:
        return (
            "a group of the transport nccl would take more memory than is planned; "
            f"unset it, or set at most {BUFFER_VARIABLES[name]}"
        )
    if name not in RAISING_VARIABLES or number <= num_channels:
        return ""
    remedy = "unset it"
    if name == "NCCL_MAX_CTAS":
        remedy = (
            "vLLM itself sets 8 for EPLB over NCCL with deep_gemm_mega_moe, but keeps a number "
            f"that is set: set {num_channels} before vLLM starts, or transports without nccl"
        )
    return (
        f"a group of the transport nccl would have more than nccl_num_channels={num_channels}, for "
        f"which memory and multiprocessors are planned; {remedy}, or set nccl_num_channels to at "
        f"least {value}"
    )


def _number_of(value: str) -> int:
    """Return a variable's number as NCCL reads it (strtoll); 0 if it begins with none."""
    found = re.match(r"\s*\+?(?:(0x[0-9a-f]+)|(0[0-7]*)|([0-9]+))", value, re.IGNORECASE)
    if found is None:
        return 0
    hexadecimal, octal, decimal = found.groups()
    return int(hexadecimal or octal or decimal, 16 if hexadecimal else 8 if octal else 10)


def _read_overrides(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return NCCL's variables, and where each is set: what the environment has, then what NCCL adds
    to it from its files, the user's first."""
    named = environment.get("NCCL_CONF_FILE", "")
    found: dict[str, tuple[str, str]] = {}
    for name in (CONFIGURATION_FILES[1], named or CONFIGURATION_FILES[0]):
        found |= {key: (value, f" in {name}") for key, value in _read_file(name).items()}
    return found | {key: (value, "") for key, value in environment.items()}


def _read_file(name: str) -> dict[str, str]:
    """Return the variables that NCCL takes from a file of its own; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        lines = Path(name).expanduser().read_text(errors="replace").splitlines()
        pairs = [line.partition("=") for line in lines if not line.startswith("#")]
        return {key: value for key, _, value in reversed(pairs)}  # the first one counts
    return {}
