"""Validates the input of `p2p-engine size`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.model_shape import AUTO, DTYPES, ModelShape, plain_model, read_model
from p2p_engine.cli.size import KV_ROLES
from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import TransferConfig, extra_of, our_config

DEVICES = {"cuda": "cuda:0", "cpu": "cpu"}


def chosen_model(
    path: Path | None, num_layers: int, num_kv_heads: int, head_size: int, dtype: str
) -> ModelShape:
    """Return the model of this config.json, or of these numbers.

    Raises:
        ConfigError: both are given, or neither, or the model is not supported.
    """
    numbers = {"--layers": num_layers, "--kv-heads": num_kv_heads, "--head-size": head_size}
    if path is not None:
        if any(numbers.values()):
            given = ", ".join(name for name, number in numbers.items() if number)
            raise ConfigError(f"--model and {given}: allowed: the one or the other")
        return read_model(path, dtype)
    missing = [name for name, number in numbers.items() if not number]
    if dtype == AUTO:
        missing.append("--kv-cache-dtype")
    if missing:
        known = f", and not auto; allowed: {DTYPES}" if dtype == AUTO else ""
        raise ConfigError(f"{', '.join(missing)}: required without --model{known}")
    return plain_model(num_layers, num_kv_heads, head_size, dtype)


def chosen_roles(config: TransferConfig | None) -> tuple[str, ...]:
    """Return the role of the configuration; without one, all roles.

    Raises:
        ConfigError: an instance would refuse the configuration.
    """
    if config is None:
        return KV_ROLES
    if problems := config_problems(config):
        raise ConfigError(f"--kv-transfer-config: {'; '.join(problems)}")
    return (str(our_config(config)["kv_role"]),)


def chosen_settings(
    config: TransferConfig | None, send_type: SendMode | None, device: str, tp_size: int
) -> EngineConfig:
    """Return the settings from which sizes are computed.

    Raises:
        ConfigError: they are impossible, or for another device, or say another send type, or the
            cache is moved by way of a host buffer, whose size vLLM's cache decides.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: allowed: {', '.join(DEVICES)}")
    ours = our_config(config) if config is not None else {}
    if ours.get("kv_buffer_device") == "cpu" and device != "cpu":
        raise ConfigError(
            "kv_buffer_device is cpu: mem_pool_size_gb then holds host blocks, as many as vLLM's "
            "cache has if there is room; not computed here"
        )
    extra = extra_of(ours)
    settings = EngineConfig.from_extra_config(extra, num_local_ranks=tp_size)
    if send_type and "send_type" in extra and send_type is not settings.send_type:
        told = f"--kv-transfer-config says {settings.send_type.value}"
        raise ConfigError(f"--send-type {send_type.value}: {told}; give one of the two")
    settings = settings.on_device(DEVICES[device])
    settings.check_device()
    return dataclasses.replace(settings, send_type=send_type or settings.send_type)
