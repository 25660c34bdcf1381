"""vLLM's --kv-transfer-config as JSON, and the part of it that is ours. Needs no code of vLLM.

The whole is ours, or it is a MultiConnector's, and we are one of the entries in its list
`connectors`, which may be MultiConnectors in turn. vLLM passes each connector its own entry only.
An entry inherits nothing from the whole but the engine's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from p2p_engine.errors import ConfigError

TransferConfig = Mapping[str, Any]

CONNECTOR = "P2pNcclConnector"
MULTI = "MultiConnector"
EXTRA = "kv_connector_extra_config"
CHILDREN = "connectors"
# vLLM reads the policy from the whole only, and fails if an entry names the engine.
WHOLE_KEYS = frozenset({"engine_id", "kv_load_failure_policy"})
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


def our_config(config: TransferConfig) -> TransferConfig:
    """Return the configuration that vLLM passes to us: our entry in a MultiConnector, or the whole.

    Raises:
        ConfigError: no entry of a MultiConnector is ours, or several are.
    """
    if not is_multi(config):
        return config
    entries = single_connectors(config)
    ours = [entry for entry in entries if entry.get("kv_connector") == CONNECTOR]
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
    ours = our_config(config)

    def changed(entry: TransferConfig) -> dict[str, Any]:
        if is_multi(entry):
            entries = [changed(child) for child in children(entry)]
            return {**entry, EXTRA: {**extra_of(entry), CHILDREN: entries}}
        return change(entry) if entry is ours else dict(entry)

    return changed(config)
