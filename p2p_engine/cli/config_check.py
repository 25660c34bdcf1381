"""Finds the errors in a --kv-transfer-config; each message names the allowed values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from p2p_engine.cli.old_settings import REMOVED_KEYS
from p2p_engine.config import EXTRA_KEYS, EngineConfig
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import (
    CHILDREN,
    CLASHING,
    CONNECTOR,
    EXTRA,
    MAX_PORT,
    MODULE_KEY,
    MODULE_PATH,
    MULTI,
    NIXL_NAME,
    WHOLE_KEYS,
    TransferConfig,
    children,
    extra_of,
    is_multi,
    is_ours,
    our_config,
    read_nixls,
    single_connectors,
)

# All fields of vLLM's KVTransferConfig, which refuses any other key.
TOP_LEVEL_KEYS = frozenset(
    {
        "enable_permute_local_kv",
        "engine_id",
        "kv_buffer_device",
        "kv_connector",
        EXTRA,
        MODULE_KEY,
        "kv_load_failure_policy",
        "kv_port",
        "kv_role",
    }
)
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


def config_problems(config: TransferConfig) -> list[str]:
    """Return everything that vLLM or the connector would refuse, or would silently ignore."""
    if is_multi(config):
        problems = [*_of_any(config), *_of_multi(config)]
    else:
        problems = [*_of_ours(config), *_of_any(config)]
    if not is_multi(config):
        return problems
    try:
        our_config(config)
    except ConfigError as error:
        return problems or [str(error)]
    return [*problems, *_of_siblings(config)]


def port_problem(config: TransferConfig) -> str | None:
    """Return the error in kv_port, or None."""
    port = config.get("kv_port", 0)
    if (re.fullmatch(r"[0-9]{1,5}", str(port)) and int(port) <= MAX_PORT) or is_variable(port):
        return None
    return f"kv_port is {port!r}; allowed: 0 to {MAX_PORT}, 0 for any free port"


def is_variable(value: object) -> bool:
    """Tell whether the shell will substitute a variable in this value."""
    return isinstance(value, str) and "$" in value


def _of_any(config: TransferConfig) -> Iterator[str]:
    allowed = ", ".join(sorted(TOP_LEVEL_KEYS))
    for key in sorted(config.keys() - TOP_LEVEL_KEYS):
        instead = REMOVED_KEYS.get(key, f"vLLM refuses this key; allowed: {allowed}")
        yield f"{key}: {instead}"
    if config.get("kv_role") not in KV_ROLES:
        yield f"kv_role is {config.get('kv_role')!r}; allowed: {', '.join(KV_ROLES)}"


def _of_ours(config: TransferConfig) -> Iterator[str]:
    if not is_ours(config):
        path = f", and {NIXL_NAME!r} with {MODULE_KEY} {MODULE_PATH!r}"
        more = path if config.get("kv_connector") == NIXL_NAME else ""
        yield f"kv_connector is {config.get('kv_connector')!r}; ours is {CONNECTOR!r}{more}"
    elif (path := str(config.get(MODULE_KEY))).startswith("vllm."):
        yield (
            f"{MODULE_KEY} is {path!r}: vLLM looks for {CONNECTOR} there, where it is no longer, "
            "and not in this package; remove the key"
        )
    yield from filter(None, [port_problem(config)])
    try:
        extra = extra_of(read_nixls(config, {}))
    except ConfigError as error:
        yield str(error)
        return
    try:
        EngineConfig.from_extra_config(_without_variables(extra))
    except ConfigError as error:
        yield f"{EXTRA}: {error}"


def _of_multi(config: TransferConfig) -> Iterator[str]:
    try:
        entries = children(config)
    except ConfigError as error:
        yield str(error)
        return
    for key in sorted(EXTRA_KEYS & extra_of(config).keys()):
        yield f"{key}: {MULTI} does not read it; set it in the {EXTRA} of our entry"
    for number, entry in enumerate(entries):
        for problem in _of_entry(entry):
            yield f"{CHILDREN}[{number}]: {problem}"


def _of_entry(entry: TransferConfig) -> Iterator[str]:
    yield from _of_any(entry)
    for key in sorted(WHOLE_KEYS & entry.keys()):
        yield f"{key}: not read from an entry; set it beside the {EXTRA} of {MULTI}"
    if is_multi(entry):
        yield from _of_multi(entry)
    elif is_ours(entry):
        yield from _of_ours(entry)
    elif not isinstance(entry.get("kv_connector"), str):
        yield f"kv_connector is {entry.get('kv_connector')!r}; allowed: a connector's name"


def _of_siblings(config: TransferConfig) -> Iterator[str]:
    """Report connectors known by name; classes of other modules are checked when they are
    created."""
    for entry in single_connectors(config):
        name = entry.get("kv_connector")
        if isinstance(name, str) and name in CLASHING and not is_ours(entry):
            yield f"{name} beside {CONNECTOR} is refused: both answer requests with the same keys"


def _without_variables(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that can be checked: shell variables count as valid, None as absent."""
    right = {"http_port": 1, "proxy_ip": "proxy", "proxy_port": 1}
    return {key: right.get(key) if is_variable(value) else value for key, value in extra.items()}
