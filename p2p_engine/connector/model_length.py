"""What vLLM computes otherwise of one and the same prompt because of its length or a prompt's.

docs/cache.md says where else vLLM's models use that length, and why nothing else is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LLAMA4_LENGTH = 32768  # above, vLLM tunes its temperature by default


def decided_by_length(model: ModelConfig) -> Mapping[str, str]:
    """Return the settings of a model that vLLM derives from its length, by name."""
    config, found = getattr(model, "hf_text_config", None), {}
    factors = [_factors_of(model, config, rope) for rope in _ropes_of(config)]
    if any(factors):
        found["rope_factors"] = ",".join(filter(None, factors))
    if getattr(config, "model_type", "") == "llama4_text":
        found["attn_temperature_tuning"] = "on" if _is_tuned(model, config) else "off"
    return found


def _factors_of(model: ModelConfig, config: Any, rope: Mapping[str, Any]) -> str:
    """Return how a rope's factors are chosen, "" if there is no choice.

    vLLM's own models choose once, by their length. The implementation of transformers chooses in
    each step, by the longest prompt of the batch.
    """
    kind, length = rope.get("rope_type", ""), _length_of(model)
    if kind == "longrope":
        chosen = "long" if length > rope["original_max_position_embeddings"] else "short"
    elif kind == "dynamic" and length > config.max_position_embeddings:
        chosen = ""
    else:
        return ""
    return "by prompt" if model.using_transformers_backend() else chosen


def _is_tuned(model: ModelConfig, config: Any) -> bool:
    """Whether Llama 4's queries are scaled by their position."""
    if model.using_transformers_backend():
        return bool(config.attn_temperature_tuning)
    told = {**model.try_get_generation_config(), **model.override_generation_config}
    return bool(told.get("attn_temperature_tuning", _length_of(model) > LLAMA4_LENGTH))


def _ropes_of(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield each rope's parameters: a model may have one for each type of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    yield from nested or [ropes]


def _length_of(model: ModelConfig) -> int:
    """Return the length with which vLLM has made the model.

    Of -1 it makes the model's own length, and lowers that when the model is made and the KV cache
    has too few blocks.
    """
    if getattr(model, "original_max_model_len", None) == -1:
        return int(model.get_and_verify_max_len(-1))
    return model.max_model_len
