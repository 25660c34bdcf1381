"""vLLM's --kv-transfer-config as JSON, and the part of it that is ours. Needs no code of vLLM.

The whole is ours, or it is a MultiConnector's, and we are one of the entries in its list
`connectors`, which may be MultiConnectors in turn. vLLM passes each connector its own entry only.
An entry inherits nothing from the whole but the engine's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from p2p_engine.errors import ConfigError

TransferConfig = Mapping[str, Any]

CONNECTOR = "P2pNcclConnector"
NIXL_NAME = "NixlConnector"  # vLLM's own connector; with MODULE_PATH, ours under its name
MODULE_KEY, MODULE_PATH = "kv_connector_module_path", "p2p_engine.connector"  # has both names
MULTI = "MultiConnector"
EXTRA = "kv_connector_extra_config"
CHILDREN = "connectors"
DEFAULT_KV_PORT, MAX_PORT = 14579, 65535  # the former is vLLM's
# vLLM reads the policy from the whole only, and fails if an entry names the engine.
WHOLE_KEYS = frozenset({"engine_id", "kv_load_failure_policy"})
# NIXL's settings under its name. These mean what ours mean: the host, kv_port and the lease.
HOST_VARIABLE, PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LEASE = "kv_lease_duration"
_EVERYWHERE = ("0.0.0.0", "::", "[::]", "*")  # where a server listens, and nobody dials
# These mean nothing to us; each with the setting of ours that is nearest.
NIXL_ONLY = {
    "backends": "transports",
    "bidirectional_kv_xfer": "stash_seconds",
    "decoder_kv_blocks_ttl": "stash_seconds",
    "enable_cross_layers_blocks": "",
    "enforce_handshake_compat": "accept_differences",
    "engine_ttl": "",
    "kv_recompute_threshold": "",
    "num_threads": "",
    "push_registration_timeout": "transfer_timeout_seconds",
}
# When a request finishes, these connectors return keys that ours returns too (remote_host and
# others), so MultiConnector raises in the scheduler. All other connectors of vLLM 0.29 to 0.33
# return keys of their own, or none. The names are configured names and class names; subclasses
# count.
CLASHING = frozenset(
    {
        *("MoRIIOConnector", "NixlBaseConnector", "NixlConnector", "NixlPullConnector"),
        *("NixlPushConnector", CONNECTOR),
    }
)


def is_multi(config: TransferConfig) -> bool:
    """Whether this is a MultiConnector's configuration."""
    return config.get("kv_connector") == MULTI


def is_ours(config: TransferConfig) -> bool:
    """Whether vLLM loads our class by this configuration or entry."""
    name = config.get("kv_connector")
    is_alias = name == NIXL_NAME and config.get(MODULE_KEY) == MODULE_PATH
    return name == CONNECTOR or is_alias


def extra_of(config: TransferConfig) -> Mapping[str, Any]:
    """Return the connector's own settings.

    Raises:
        ConfigError: they are not a JSON object.
    """
    extra = config.get(EXTRA)
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{EXTRA} is {extra!r}; allowed: a JSON object")
    return extra


def children(config: TransferConfig) -> list[TransferConfig]:
    """Return the entries of a MultiConnector, in order; [] for any other connector.

    Raises:
        ConfigError: they are not a list of JSON objects.
    """
    if not is_multi(config):
        return []
    found = extra_of(config).get(CHILDREN)
    if not isinstance(found, list) or not all(isinstance(child, Mapping) for child in found):
        raise ConfigError(f"{CHILDREN} is {found!r}; allowed: a list of JSON objects")
    return found


def single_connectors(config: TransferConfig) -> Iterator[TransferConfig]:
    """Yield the settings of each connector: those of all entries, or the whole.

    Raises:
        ConfigError: as `children`.
    """
    if not is_multi(config):
        yield config
    for child in children(config):
        yield from single_connectors(child)


def our_config(
    config: TransferConfig, environment: Mapping[str, str] = MappingProxyType({})
) -> TransferConfig:
    """Return the configuration that vLLM passes to us: our entry in a MultiConnector, or the whole.
    Under NIXL's name, its settings are read as ours (`read_nixls`).

    Raises:
        ConfigError: no entry of a MultiConnector is ours, or several are; or as `read_nixls`.
    """
    return read_nixls(_our_entry(config), environment)


def read_nixls(config: TransferConfig, environment: Mapping[str, str]) -> TransferConfig:
    """Return a configuration or entry with NIXL's settings as ours, if it has NIXL's name; else
    itself. Our own settings win. `environment` has NIXL's variables.

    Raises:
        ConfigError: the settings are not a JSON object, or a variable is no address or port.
    """
    if config.get("kv_connector") != NIXL_NAME:
        return config
    extra = {key: value for key, value in extra_of(config).items() if key not in NIXL_ONLY}
    if (lease := extra.pop(_LEASE, None)) is not None:
        extra.setdefault("lease_seconds", lease)
    extra.setdefault("send_type", "GET")  # every router that decides by the name pulls
    if (host := environment.get(HOST_VARIABLE)) and not extra.get("host"):
        if host in _EVERYWHERE:
            raise ConfigError(f"{HOST_VARIABLE}={host!r} is not possible; peers cannot dial it")
        extra["host"] = host
    port = environment.get(PORT_VARIABLE)
    if not port or str(config.get("kv_port", DEFAULT_KV_PORT)) != str(DEFAULT_KV_PORT):
        return {**config, EXTRA: extra}
    if not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ConfigError(f"{PORT_VARIABLE}={port!r} is not possible; allowed: 1 to {MAX_PORT}")
    return {**config, "kv_port": int(port), EXTRA: extra}


def unread_settings(config: TransferConfig) -> list[str]:
    """Return NIXL's settings of a configuration under its name that mean nothing to us, each with
    the nearest of ours.

    Raises:
        ConfigError: as `our_config`.
    """
    ours = _our_entry(config)
    if ours.get("kv_connector") != NIXL_NAME:
        return []
    given = sorted(extra_of(ours).keys() & NIXL_ONLY.keys())
    return [f"{key} (see {NIXL_ONLY[key]})" if NIXL_ONLY[key] else key for key in given]


def _our_entry(config: TransferConfig) -> TransferConfig:
    if not is_multi(config):
        return config
    entries = single_connectors(config)
    ours = [entry for entry in entries if is_ours(entry)]
    if len(ours) != 1:
        raise ConfigError(f"{len(ours)} entries of {MULTI} are {CONNECTOR}; allowed: one")
    return ours[0]


def merge_configs(config: TransferConfig, overrides: TransferConfig) -> dict[str, Any]:
    """Join two configurations; `overrides` win, key by key on both levels.

    If only one of them is a MultiConnector's, the other is about our entry in it.

    Raises:
        ConfigError: our entry is missing, or a value that must be a JSON object is not.
    """
    if is_multi(overrides) and not is_multi(config):
        whole, entry = _split(config)
        return {**whole, **_change_ours(overrides, lambda ours: _merge(entry, ours))}
    if is_multi(config) and not is_multi(overrides):
        whole, entry = _split(overrides)
        return {**_change_ours(config, lambda ours: _merge(ours, entry)), **whole}
    return _merge(config, overrides)


def with_role(config: TransferConfig, kv_role: str) -> dict[str, Any]:
    """Give this role to the whole and to each entry without one: entries do not inherit it."""
    filled = {"kv_role": kv_role, **config}
    if is_multi(config):
        entries = [with_role(child, kv_role) for child in children(config)]
        filled[EXTRA] = {**extra_of(config), CHILDREN: entries}
    return filled


def _merge(config: TransferConfig, overrides: TransferConfig) -> dict[str, Any]:
    extra = {**extra_of(config), **extra_of(overrides)}
    return {**config, **overrides, EXTRA: extra}


def _split(config: TransferConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a configuration: a MultiConnector's own keys, and those for our entry in it."""
    whole = {key: value for key, value in config.items() if key in WHOLE_KEYS}
    return whole, {key: value for key, value in config.items() if key not in WHOLE_KEYS}


def _change_ours(
    config: TransferConfig, change: Callable[[TransferConfig], dict[str, Any]]
) -> dict[str, Any]:
    """Return a MultiConnector's configuration in which our one entry is changed."""
    ours = _our_entry(config)

    def changed(entry: TransferConfig) -> dict[str, Any]:
        if is_multi(entry):
            entries = [changed(child) for child in children(entry)]
            return {**entry, EXTRA: {**extra_of(entry), CHILDREN: entries}}
        return change(entry) if entry is ours else dict(entry)

    return changed(config)
