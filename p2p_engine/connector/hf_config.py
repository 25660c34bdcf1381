"""What a model's own configuration says: its files, and what an operator has laid over them.

Compared is what is written, not the object that vLLM makes of it: the classes of two releases of
transformers or vLLM have other names and defaults for one and the same file, and a model changes
its object as it is made. What vLLM derives of options besides is compared in `identity`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.connector.identity_fields import HF, NULLS, is_compared

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CONFIGURATION = ("config.json", "params.json", "hf_quant_config.json")
_PROCESSORS = ("preprocessor_config", "processor_config", "video_preprocessor_config")


def settings_of(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """Yield each compared setting of a model's configuration, by its path.

    Reads the files, which vLLM has fetched by now. If there are none (a configuration made in
    code, or by a parser of a plugin's), or if the model's own code has read them, yields all that
    vLLM's object has.
    """
    config, overrides = model.hf_config, model.hf_overrides
    said = _written(model)
    is_by_hand = callable(overrides) and not _is_for_drafts(overrides)
    if said is None or is_by_hand or _has_own_class(config):
        yield "hf", "as resolved"
        said = config.to_dict()
    elif callable(overrides):
        said = {**said, "architectures": config.architectures}
    else:
        said = _laid_over(said, overrides, config)
    yield from _leaves(said, "hf.", is_config=True)


def processors_of(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """Yield what each file says from which a model's processors of media are made, by its name."""
    for name in _PROCESSORS:
        said = _read(model.model, model.revision, f"{name}.json")
        if said is not None:
            yield name, said


def files_of(model: ModelConfig) -> Iterator[Path]:
    """Yield the files that `settings_of` and `processors_of` read."""
    found = [_find(*_place_of(model), name) for name in _CONFIGURATION]
    found += [_find(model.model, model.revision, f"{name}.json") for name in _PROCESSORS]
    yield from (file for file in found if file is not None)


def _place_of(model: ModelConfig) -> tuple[str, str | None]:
    """Return where a model's configuration is, and its revision there."""
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    return str(model.hf_config_path or model.model), revision


def _written(model: ModelConfig) -> dict[str, Any] | None:
    """Return what the files say from which vLLM has made a model's configuration."""
    from transformers import PretrainedConfig

    if model.config_format not in ("auto", "hf", "mistral"):
        return None
    said, params, quantization = (_read(*_place_of(model), name) for name in _CONFIGURATION)
    # Of Mistral's file vLLM makes an object of no model's class; config.json adds what it lacks.
    if model.config_format == "mistral" or type(model.hf_config) is PretrainedConfig:
        return params and {**(said or {}), "params": params}
    if said and said.get("quantization_config") is None:
        return {**said, "quantization_config": quantization}
    return said


def _has_own_class(config: Any) -> bool:
    """Whether a class from the model's files (trust_remote_code) has read its configuration, or one
    in it: such a class has defaults of its own."""
    kinds = (type(each).__module__ for each in (config, *vars(config).values()))
    return any(kind.startswith("transformers_modules.") for kind in kinds)


def _read(where: str, revision: str | None, name: str) -> dict[str, Any] | None:
    file = _find(where, revision, name)
    if file is None:
        return None
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def _find(where: str, revision: str | None, name: str) -> Path | None:
    """Return a model's file here. Of ModelScope's models, only those that are given by a folder: in
    the cache of Hugging Face's hub, another one may have the name."""
    from vllm import envs
    from vllm.transformers_utils.repo_utils import try_get_local_file

    if envs.VLLM_USE_MODELSCOPE and not Path(where).exists():
        return None
    file = try_get_local_file(where, name, revision)
    return file if isinstance(file, Path) else None


def _is_for_drafts(overrides: Any) -> bool:
    """Whether a function is vLLM's own, which makes a target's configuration its draft's."""
    from vllm.config import SpeculativeConfig

    while isinstance(overrides, functools.partial):
        if overrides.args:
            return False  # an operator's function is one of these
        overrides = overrides.func
    return overrides is SpeculativeConfig.hf_config_override


def _laid_over(
    said: Mapping[str, Any], overrides: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    """Return settings with others over them: a configuration inside is changed, all else set."""
    found = dict(said)
    for name, value in overrides.items():
        inside = vars(config).get(name)
        if isinstance(value, Mapping) and hasattr(inside, "to_dict"):
            value = _laid_over(found.get(name) or {}, value, inside)
        found[name] = value
    return found


def _leaves(said: Mapping[str, Any], path: str, *, is_config: bool) -> Iterator[tuple[str, object]]:
    """Yield each value of nested mappings that may decide KV, by its path."""
    for name, value in said.items():
        if name.endswith("name_or_path") or (value is None and name in NULLS):
            continue
        if is_config and not is_compared(HF, name):
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.", is_config="model_type" in value)
        elif name == "architectures":
            yield f"{path}{name}", [str(each).lower() for each in value or ()]
        else:
            yield f"{path}{name}", value
