"""Computes a model's KV cache per token from its config.json; needs no vLLM.

A family is supported only if a test compares the result with vLLM's own KV cache specs. All others
are refused, because a wrong size is worse than none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_engine.errors import ConfigError
from p2p_engine.memory.plan import heads_per_rank
from p2p_engine.wire.messages import CacheSpec

FULL, SLIDING = "full_attention", "sliding_attention"
ELEMENT_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
AUTO = "auto"  # the dtype of the model
DTYPES = ", ".join(ELEMENT_BYTES)
# What transformers assumes where a family's config.json does not say it. `pattern`: one layer of so
# many is full attention, the others look back at a window.
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"pattern": 2},
    "gemma3_text": {
        "pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096,
    },
    "gpt_oss": {"pattern": 2},
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {},
}  # fmt: skip
_LATENT = frozenset({"deepseek_v2", "deepseek_v3"})
FAMILIES = frozenset(_PLAIN) | _LATENT
# With one of these a layer keeps something else than the rest of config.json says.
_UNKNOWN_KEYS = (
    "attention_chunk_size", "compress_ratios", "index_topk",
    "layers_block_type", "num_kv_shared_layers", "use_bidirectional_attention",
)  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal KV: `row_bytes` for each token and KV head of the model."""

    name: str
    num_layers: int
    num_kv_heads: int
    row_bytes: int
    row: str  # the formula of row_bytes, in words
    window: int = 0  # tokens that the layers attend to; 0: all

    def token_bytes(self, tp_size: int) -> int:
        """Return the bytes of one token on one rank, in all of these layers."""
        return self.num_layers * self.heads(tp_size) * self.row_bytes

    def heads(self, tp_size: int) -> int:
        """Return the KV heads of one rank; with more ranks than heads, ranks share heads."""
        return heads_per_rank(CacheSpec(num_kv_heads=self.num_kv_heads, tp_size=tp_size))

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks of a prompt that are transferred: none behind the window."""
        first = max(0, num_tokens - self.window) // block_size if self.window else 0
        return -(-num_tokens // block_size) - first


@dataclass(frozen=True)
class ModelShape:
    """The KV cache of a model; `dtype` is that of the cache."""

    name: str
    dtype: str
    kinds: tuple[LayerKind, ...]

    def check_ranks(self, tp_size: int) -> None:
        """Check that the KV heads can be divided among `tp_size` ranks.

        Raises:
            ConfigError: neither number is a multiple of the other.
        """
        for heads in {kind.num_kv_heads for kind in self.kinds}:
            if heads % tp_size and tp_size % heads:
                raise ConfigError(
                    f"--tp {tp_size}: the model has {heads} KV heads; allowed: a divisor of "
                    f"{heads}, or a multiple of it"
                )

    def token_bytes(self, tp_size: int) -> int:
        """Return the bytes of one token on one rank, without regard to windows."""
        return sum(kind.token_bytes(tp_size) for kind in self.kinds)

    def prompt_bytes(self, num_tokens: int, block_size: int, tp_size: int) -> int:
        """Return the bytes that one rank sends or receives for a prompt: whole blocks of each
        layer."""
        return sum(
            kind.num_blocks(num_tokens, block_size) * block_size * kind.token_bytes(tp_size)
            for kind in self.kinds
        )


def read_model(path: Path, dtype: str) -> ModelShape:
    """Read a model's config.json, or that of its folder; `dtype` as vLLM's --kv-cache-dtype.

    Raises:
        ConfigError: it cannot be read, or not computed from; the message says what to give instead.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = f"--model {path}: {error}; allowed: a config.json, or a folder with one"
        raise ConfigError(reason) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object; allowed: a model's config.json")
    inner = config.get("text_config")  # the language model of several
    text = inner if isinstance(inner, dict) else config
    family = str(text.get("model_type"))
    if family not in FAMILIES:
        raise _refusal(f"model_type {family!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    for key in _UNKNOWN_KEYS:
        if text.get(key):
            raise _refusal(f"{key} is set, and the KV of such layers is not known")
    element = _resolve_dtype(dtype, config, text, _scheme(file, config))
    kinds = _latents(text, element) if family in _LATENT else _plain(text, family, element)
    return ModelShape(file.resolve().parent.name, element, kinds)


def plain_model(num_layers: int, num_kv_heads: int, head_size: int, dtype: str) -> ModelShape:
    """Describe a model in which every layer keeps K and V of every token.

    Raises:
        ConfigError: the dtype is unknown.
    """
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"--kv-cache-dtype {dtype}: allowed without a model: {DTYPES}")
    kind = _keys_and_values(num_layers, num_kv_heads, head_size, dtype)
    return ModelShape("a model", dtype, (kind,))


def _plain(text: Mapping[str, Any], family: str, dtype: str) -> tuple[LayerKind, ...]:
    """Return the layers with K and V per head; some may have a window."""
    text = {**_PLAIN[family], **text}
    total = _count(text, "num_hidden_layers")
    queries = _count(text, "num_attention_heads")
    # Of a llama without this key, each head has its own K and V; other families have a default.
    is_shared = family != "llama" or "num_key_value_heads" in text
    heads = _count(text, "num_key_value_heads") if is_shared else queries
    size = _head_size(text, queries)
    types = _layer_types(text, family, total)
    window = _count(text, "sliding_window") if SLIDING in types else 0
    kinds = [
        _keys_and_values(types.count(name), heads, size, dtype, window if name == SLIDING else 0)
        for name in (FULL, SLIDING)
    ]
    return tuple(kind for kind in kinds if kind.num_layers)


def _head_size(text: Mapping[str, Any], num_heads: int) -> int:
    if text.get("head_dim") is not None:
        return _count(text, "head_dim")
    hidden = _count(text, "hidden_size")
    if hidden < num_heads:
        raise _refusal(f"hidden_size is {hidden}, and num_attention_heads {num_heads}")
    return hidden // num_heads


def _keys_and_values(
    num_layers: int, num_kv_heads: int, head_size: int, dtype: str, window: int = 0
) -> LayerKind:
    item = ELEMENT_BYTES[dtype]
    name = f"sliding window of {window:,} tokens" if window else "full attention"
    row = f"K and V of {head_size} elements of {item} bytes"
    return LayerKind(name, num_layers, num_kv_heads, 2 * head_size * item, row, window)


def _layer_types(text: Mapping[str, Any], family: str, total: int) -> Sequence[str]:
    """Return each layer's kind of attention, as in vLLM's implementation of the family."""
    types = text.get("layer_types")
    if types is not None:
        is_list = isinstance(types, list) and len(types) == total
        if not is_list or not all(name in (FULL, SLIDING) for name in types):
            raise _refusal(f"layer_types is not {total} times {FULL} or {SLIDING}")
        return list(types)
    own = text.get("sliding_window_pattern") if family == "gemma3_text" else None
    if pattern := own or text.get("pattern"):
        if not isinstance(pattern, int) or pattern < 1:
            raise _refusal(f"sliding_window_pattern is {pattern!r}; allowed: a number above 0")
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(total)]
    if family.startswith("qwen") and not text.get("use_sliding_window"):
        return [FULL] * total
    if family.startswith("qwen"):
        raise _refusal("use_sliding_window is set without layer_types")
    # Mistral's own default applies where the key is absent; null and 0 say that there is none.
    return [SLIDING if text.get("sliding_window") else FULL] * total


def _latents(text: Mapping[str, Any], dtype: str) -> tuple[LayerKind, ...]:
    """Return MLA layers: one latent for all heads, equal on every rank."""
    total, item = _count(text, "num_hidden_layers"), ELEMENT_BYTES[dtype]
    size = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
    row = f"one latent of {size} elements of {item} bytes"
    return (LayerKind("MLA", total, 1, size * item, row),)


def _scheme(file: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how the checkpoint is quantised; older ModelOpt says it in a file of its own."""
    scheme = config.get("quantization_config")
    if scheme is None:
        with contextlib.suppress(OSError, ValueError):
            scheme = json.loads((file.parent / "hf_quant_config.json").read_text())
    if not isinstance(scheme, dict):
        return {}
    inner = scheme.get("quantization")
    return {**scheme, **inner} if isinstance(inner, dict) else scheme


def _resolve_dtype(
    dtype: str, config: Mapping[str, Any], text: Mapping[str, Any], scheme: Mapping[str, Any]
) -> str:
    """Return the dtype of the cache; "auto" is the model's."""
    if dtype in ELEMENT_BYTES:
        return dtype
    if dtype != AUTO:
        raise ConfigError(f"--kv-cache-dtype {dtype}: allowed: auto, {DTYPES}")
    found = next(
        (part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)),
        None,
    )
    remedy = f"give --kv-cache-dtype: {DTYPES}"
    if any(scheme.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
        raise ConfigError(f"the checkpoint quantises its KV cache; {remedy}")
    if found not in ("bfloat16", "float16"):  # vLLM chooses by the platform for all others
        raise ConfigError(f"config.json says dtype {found!r}, which vLLM may change; {remedy}")
    return str(found)


def _count(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _refusal(f"{key} is {value!r}; allowed: a number above 0")
    return value


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{what}. Where all layers keep K and V of each token, give --layers, --kv-heads, "
        "--head-size and --kv-cache-dtype instead of --model"
    )
