"""What vLLM computes otherwise of one and the same prompt because of `max_model_len`.

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
    originals = [
        rope["original_max_position_embeddings"]
        for rope in _ropes_of(config)
        if rope.get("rope_type") == "longrope"
    ]
    if originals:
        is_long = [_length_of(model) > original for original in originals]
        found["rope_factors"] = ",".join("long" if each else "short" for each in is_long)
    if getattr(config, "model_type", "") == "llama4_text":
        told = {**model.try_get_generation_config(), **model.override_generation_config}
        is_on = told.get("attn_temperature_tuning", _length_of(model) > LLAMA4_LENGTH)
        found["attn_temperature_tuning"] = "on" if is_on else "off"
    return found


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
