"""vLLM's --kv-transfer-config, as JSON: which part of it is ours. Knows nothing of vLLM's code.

It is ours as a whole, or it is a MultiConnector's, and we are one of the entries in its list
`connectors`, which may be MultiConnectors in turn. vLLM gives each connector its own entry alone,
and an entry inherits nothing but the engine's id from what it is in.
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
# vLLM reads the policy from the whole, and fails on an entry that names the engine.
WHOLE_KEYS = frozenset({"engine_id", "kv_load_failure_policy"})
# What they answer when a request finishes has keys that ours has too (remote_host and others), and
# then MultiConnector raises in the scheduler. All others, of 0.29 to 0.33, answer with keys of
# their own or with none. Names by which they are configured, and of classes: what is derived from
# them counts.
CLASHING = frozenset(
    {
        *("MoRIIOConnector", "NixlBaseConnector", "NixlConnector", "NixlPullConnector"),
        *("NixlPushConnector", CONNECTOR),
    }
)


def is_multi(config: TransferConfig) -> bool:
    """Whether this is a MultiConnector's."""
    return config.get("kv_connector") == MULTI


def extra_of(config: TransferConfig) -> Mapping[str, Any]:
    """Return what is for the connector alone.

    Raises:
        ConfigError: it is no JSON object.
    """
    extra = config.get(EXTRA)
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{EXTRA} is {extra!r}; allowed: a JSON object")
    return extra


def children(config: TransferConfig) -> list[TransferConfig]:
    """Return the entries of a MultiConnector, in order; of all else none.

    Raises:
        ConfigError: they are no list of JSON objects.
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
    """Return what vLLM gives to us: our entry in a MultiConnector, or the whole.

    Raises:
        ConfigError: not one entry of a MultiConnector is ours, or several are.
    """
    if not is_multi(config):
        return config
    entries = single_connectors(config)
    ours = [entry for entry in entries if entry.get("kv_connector") == CONNECTOR]
    if len(ours) != 1:
        raise ConfigError(f"{len(ours)} entries of {MULTI} are {CONNECTOR}; allowed: one")
    return ours[0]


def merge_configs(config: TransferConfig, overrides: TransferConfig) -> dict[str, Any]:
    """Join two values; `overrides` win, key by key on both levels.

    If one of them is a MultiConnector's, the other is about our entry in it.

    Raises:
        ConfigError: there is none, or what must be a JSON object is not.
    """
    if is_multi(overrides) and not is_multi(config):
        whole, entry = _split(config)
        return {**whole, **_change_ours(overrides, lambda ours: _merge(entry, ours))}
    if is_multi(config) and not is_multi(overrides):
        whole, entry = _split(overrides)
        return {**_change_ours(config, lambda ours: _merge(ours, entry)), **whole}
    return _merge(config, overrides)


def with_role(config: TransferConfig, kv_role: str) -> dict[str, Any]:
    """Give this role to the whole and to each entry of it that has none, for none inherits it."""
    filled = {"kv_role": kv_role, **config}
    if is_multi(config):
        entries = [with_role(child, kv_role) for child in children(config)]
        filled[EXTRA] = {**extra_of(config), CHILDREN: entries}
    return filled


def _merge(config: TransferConfig, overrides: TransferConfig) -> dict[str, Any]:
    extra = {**extra_of(config), **extra_of(overrides)}
    return {**config, **overrides, EXTRA: extra}


def _split(config: TransferConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is for a MultiConnector itself, and what is for our entry in it."""
    whole = {key: value for key, value in config.items() if key in WHOLE_KEYS}
    return whole, {key: value for key, value in config.items() if key not in WHOLE_KEYS}


def _change_ours(
    config: TransferConfig, change: Callable[[TransferConfig], dict[str, Any]]
) -> dict[str, Any]:
    """Return a MultiConnector's value in which our one entry is changed."""
    ours = our_config(config)

    def changed(entry: TransferConfig) -> dict[str, Any]:
        if is_multi(entry):
            entries = [changed(child) for child in children(entry)]
            return {**entry, EXTRA: {**extra_of(entry), CHILDREN: entries}}
        return change(entry) if entry is ours else dict(entry)

    return changed(config)
