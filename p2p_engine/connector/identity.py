"""The identity of an instance: all that vLLM has resolved and that decides the KV of a prompt.

The list is turned round: everything is compared, less what `identity_fields` leaves out and says
why. Two instances whose identities have one digest pair; where the digests differ, the fields tell
why not (docs/identity.md). What the layers keep is in the CacheSpec, what the weights are is in
each content's binding.

A value that is the default of its class of vLLM's counts as absent, since vLLM's release is
compared, too. Of the model's own configuration, what is written is compared (`hf_config`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.connector.checkpoint import name_of_checkpoint
from p2p_engine.connector.compat import formula_name, release_name
from p2p_engine.connector.file_times import changed_since_start
from p2p_engine.connector.hf_config import files_of, processors_of, settings_of
from p2p_engine.connector.identity_fields import ENVIRONMENT, TABLES, is_compared
from p2p_engine.connector.model_length import decided_by_length
from p2p_engine.wire.bindings import no_name
from p2p_engine.wire.identity import Identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

MAX_VALUE = 160  # characters; of a longer value, its beginning and a digest are told
_WEIGHT_ONLY_FORMATS = ("awq", "gptq")  # any kernel takes whole activations with these


def identity_of(
    vllm_config: VllmConfig, model: ModelConfig, accepted: Iterable[str] = ()
) -> Identity:
    """Return what decides the KV that `model` computes under a configuration, by name.

    `model` is the configuration's own or its draft's. `accepted` are names that an operator lets
    differ; each stands for itself and for what is below it (`hf.vision_config`).
    """
    # A quantised one is let pair with another that is not, in one release.
    is_any = covers(accepted, "quantization")
    found = {"vllm": release_name() if is_any else formula_name(vllm_config, model)}
    for prefix, config in _configs_of(vllm_config, model):
        rows = TABLES[_table_of(config)]
        for field in dataclasses.fields(config):
            if is_compared(rows, field.name):
                default = default_in(field)
                text = text_of(getattr(config, field.name, default))
                if text != text_of(default):
                    found[f"{prefix}{field.name}"] = text
    found["dtype"] = text_of(model.dtype)
    found.update(_resolved(vllm_config, model))
    found.update(_of_environment(model))
    found.update(decided_by_length(model))
    if _has_own_checkpoint(vllm_config, model) and not covers(accepted, "weights"):
        found["weights"] = name_of_checkpoint(vllm_config, model)
    found.update((name, text_of(value)) for name, value in settings_of(model))
    if not covers(accepted, "hf") and _has_changed(model):  # looked at behind what is read
        found["hf"] = f"changed while vLLM started, {no_name()}"
    return {name: _tellable(found[name]) for name in sorted(found) if not covers(accepted, name)}


def covers(names: Iterable[str], name: str) -> bool:
    """Whether a field is one of some names, or below one."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def text_of(value: object) -> str:
    """Return a value as a text that is the same in each process and release, at most MAX_VALUE
    characters."""
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
    yield "kernel.", vllm_config.kernel_config
    if vllm_config.lora_config is not None:
        yield "lora.", vllm_config.lora_config


def _has_own_checkpoint(vllm_config: VllmConfig, model: ModelConfig) -> bool:
    """Whether a model is a draft whose weights are not in its target's checkpoint. What names the
    target's weights says nothing of such ones."""
    target = vllm_config.model_config
    return (model.model, model.revision) != (target.model, target.revision)


def _has_changed(model: ModelConfig) -> bool:
    """Whether vLLM may have read another configuration than the files have now. Says so."""
    files, media = [*files_of(model)], model.multimodal_config
    if media is not None and media.mm_encoder_fp8_scale_path:
        files.append(Path(media.mm_encoder_fp8_scale_path))
    changed = changed_since_start(files, is_read_by_front_end=True)
    if changed is not None:
        logger.warning(
            "peers refuse this instance's configuration, start it again: model=%s "
            "changed_during_start=%s",
            model.model, changed,
        )  # fmt: skip
    return changed is not None


def _table_of(config: object) -> str:
    """Return which table is a configuration's: its class's, or that of a class it extends."""
    return next(each.__name__ for each in type(config).__mro__ if each.__name__ in TABLES)


def default_in(field: dataclasses.Field[Any]) -> object:
    """Return a field's default; vLLM's configurations are pydantic's dataclasses."""
    default: Any = field.default
    if hasattr(default, "get_default"):
        return default.get_default(call_default_factory=True)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return default


def _resolved(vllm_config: VllmConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield what is compared otherwise than by a field's value."""
    format_ = _format_of(model.quantization)
    yield "quantization", format_
    for name, usual in (("runner", "generate"), ("convert", "none")):
        value = getattr(model, f"{name}_type", usual)
        if value != usual:
            yield name, text_of(value)
    if format_ not in ("none", *_WEIGHT_ONLY_FORMATS):
        yield from _kernels(vllm_config.kernel_config)
    extra = vllm_config.additional_config
    if isinstance(extra, dict):
        extra = {name: each for name, each in extra.items() if not name.endswith("_backend")}
    if extra:
        yield "additional_config", _digest_of(extra)
    lora = vllm_config.lora_config
    if lora is not None and lora.lora_dtype not in ("auto", model.dtype):
        yield "lora.lora_dtype", text_of(lora.lora_dtype)
    if model.multimodal_config is not None:
        yield from _of_media(model, model.multimodal_config)


def _of_media(model: ModelConfig, media: Any) -> Iterator[tuple[str, str]]:
    """Yield what is read and told to process images, videos and audio. The identifier by which
    prompts name a medium says none of it."""
    kwargs = media.mm_processor_kwargs or {}
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if kwargs:
        yield "mm.mm_processor_kwargs", text_of(kwargs)
    if media.mm_encoder_fp8_scale_path:
        scales = json.loads(Path(media.mm_encoder_fp8_scale_path).read_text("utf-8"))
        yield "mm.mm_encoder_fp8_scales", _digest_of(scales)
    for name, said in processors_of(model):
        yield f"mm.{name}", _digest_of(said)


def _kernels(kernels: Any) -> Iterator[tuple[str, str]]:
    """Yield the kernels that are asked for: of a quantised model's activations, a kernel chooses
    the format."""
    per_quant = getattr(kernels, "linear_backend_per_quant", None) or {}
    named = {
        "moe_backend": kernels.moe_backend,
        "linear_backend": kernels.linear_backend,
        **{f"linear_backend_per_quant.{name}": backend for name, backend in per_quant.items()},
    }
    yield from ((f"kernel.{name}", text_of(each)) for name, each in named.items() if each != "auto")


def _of_environment(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the variables that are not at their defaults and that this platform looks at."""
    from vllm import envs
    from vllm.platforms import current_platform

    platform = current_platform._enum.name
    for name, usual in ENVIRONMENT.items():
        owner = name.split("_")[1]
        if owner in ("CPU", "ROCM", "XPU") and owner != platform:
            continue
        if "_AITER_" in name and not envs.VLLM_ROCM_USE_AITER:
            continue
        if name.endswith("BMM") and not model.use_mla:
            continue
        # vLLM takes a choice in any case, and keeps it as it was written.
        value, default = (text_of(each).lower() for each in (getattr(envs, name, usual), usual))
        if value != default:
            yield f"env.{name}", value


def _plain(value: object) -> object:
    """Return a value of builtin types, without what is None in a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1e6 in one file is 1000000 in another
    if isinstance(value, (set, frozenset)):
        return sorted(map(text_of, value))
    return value


def _nameable(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return _plain(vars(value))  # its text would be where it lies in memory
    return str(getattr(value, "__qualname__", value)).removeprefix("torch.")


def _format_of(quantization: object) -> str:
    text = text_of(quantization) if quantization else "none"
    return text.removeprefix("auto_").removesuffix("_marlin").removesuffix("_triton")


def _tellable(text: str) -> str:
    """Return a value as peers are told it: of what may be a path, a digest."""
    return f"a path: {_digest(text.encode())}" if "/" in text else text


def _digest_of(value: object) -> str:
    return _digest(json.dumps(_plain(value), sort_keys=True, default=_nameable).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
