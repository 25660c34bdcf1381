"""The identity of an instance: all that vLLM has resolved and that decides the KV of a prompt.

The list is turned round: everything is compared, less what `identity_fields` leaves out and says
why. Two instances whose identities have one digest pair; where the digests differ, the fields tell
why not (docs/identity.md). What the layers keep is in the CacheSpec, what the weights are is in
each content's binding.

A value that is the default of its class counts as absent. So two releases pair if one of them has
a field more, at its default; and so do two releases of transformers, which write out every field
they know. No default of a compared field has changed in vLLM 0.29 to 0.33.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.connector.identity_fields import ENVIRONMENT, HF, TABLES, is_compared
from p2p_engine.connector.model_length import decided_by_length
from p2p_engine.wire.identity import Identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)


MAX_VALUE = 160  # characters; of a longer value, its beginning and a digest are told
TOLD_DEFAULTS = ("rope_parameters",)  # of the model: told also where they are the class's own
_KERNELS = ("_marlin", "_triton")  # a quantization's name may end with who computes it


def identity_of(
    vllm_config: VllmConfig, model: ModelConfig, accepted: Iterable[str] = ()
) -> Identity:
    """Return what decides the KV that `model` computes under a configuration, by name.

    `model` is the configuration's own or its draft's. `accepted` are names that an operator lets
    differ; each stands for itself and for what is below it (`hf.vision_config`).
    """
    found: dict[str, str] = {}
    for prefix, config in _configs_of(vllm_config, model):
        rows = TABLES[_table_of(config)]
        for field in dataclasses.fields(config):
            if is_compared(rows, field.name):
                default = _default_in(field)
                text = text_of(getattr(config, field.name, default))
                if text != text_of(default):
                    found[f"{prefix}{field.name}"] = text
    found["dtype"] = text_of(model.dtype)
    found["quantization"] = _format_of(model.quantization)
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales:
        found["mm_encoder_fp8_scales"] = _digest(Path(scales).read_bytes())
    found |= {f"env.{name}": os.environ[name] for name in ENVIRONMENT if name in os.environ}
    found.update(decided_by_length(model))
    found.update(_of_hf_config(model.hf_config, "hf."))
    return {name: found[name] for name in sorted(found) if not covers(accepted, name)}


def covers(names: Iterable[str], name: str) -> bool:
    """Whether a field is one of some names, or below one."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def text_of(value: object) -> str:
    """Return a value as a text that is the same in each process and release."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, enum.Enum):
        text = value.name.lower()
    else:
        text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=_nameable)
        text = text.strip('"')
    if len(text) <= MAX_VALUE:
        return text
    return f"{text[: MAX_VALUE - 20]}… {_digest(text.encode())}"


def _configs_of(vllm_config: VllmConfig, model: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield "", vllm_config
    yield "", model
    if model.multimodal_config is not None:
        yield "mm.", model.multimodal_config
    yield "cache.", vllm_config.cache_config
    yield "attention.", vllm_config.attention_config
    mamba = getattr(vllm_config, "mamba_config", None)
    if mamba is not None:
        yield "mamba.", mamba


def _table_of(config: object) -> str:
    """Return which table is a configuration's: its class's, or that of a class it extends."""
    return next(each.__name__ for each in type(config).__mro__ if each.__name__ in TABLES)


def _default_in(field: dataclasses.Field[Any]) -> object:
    """Return a field's default; vLLM's configurations are pydantic's dataclasses."""
    default: Any = field.default
    if hasattr(default, "get_default"):
        return default.get_default(call_default_factory=True)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return default


def _of_hf_config(config: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a model's own configuration that differ from its class's defaults, by
    path. A configuration inside is looked at by the defaults of its own class."""
    values, defaults = _values_of(config), _values_of(_default_of(config))
    for name, value in values.items():
        path = f"{prefix}{name}"
        if not is_compared(HF, name):
            continue
        if _is_config(value):
            yield from _of_hf_config(value, f"{path}.")
            continue
        usual = {} if name in TOLD_DEFAULTS else dict(_leaves(defaults.get(name), path))
        for leaf, text in _leaves(value, path):
            if text != usual.get(leaf):
                yield leaf, text


def _is_config(value: object) -> bool:
    return hasattr(value, "to_dict") and not isinstance(value, Mapping)


def _values_of(config: Any) -> dict[str, Any]:
    """Return a model's configuration as a dict, with the configurations inside it as they are."""
    known = config.to_dict() if config is not None else {}
    return {name: getattr(config, name, value) for name, value in known.items()}


def _default_of(config: Any) -> Any:
    """Return a configuration as its class makes it of nothing; None if the class cannot."""
    try:
        return type(config)()
    except Exception as error:  # noqa: BLE001  # the class is the model's
        logger.debug("no defaults: class=%s reason=%r", type(config).__name__, str(error))
        return None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings that may decide KV, by its path."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if is_compared(HF, str(name)):
                yield from _leaves(each, f"{path}.{name}")
    elif value is not None:
        yield path, text_of(value)


def _plain(value: object) -> object:
    """Return a value of builtin types, without what is None in a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(text_of, value))
    return value


def _nameable(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return str(getattr(value, "__qualname__", value)).removeprefix("torch.")


def _format_of(quantization: object) -> str:
    text = text_of(quantization) if quantization else "none"
    for kernel in _KERNELS:
        text = text.removesuffix(kernel)
    return text


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
