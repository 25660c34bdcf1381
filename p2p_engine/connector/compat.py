"""The differences between the supported vLLM releases, each in one place."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from p2p_engine.errors import ConfigError

OLDEST, NEWEST = (0, 29), (0, 33)
# Before, vLLM (#51562) begins a prompt of one token of a gated delta net with what its state's
# block held before, and prefill's prompts are cut by one. 0.31 was not looked at.
DELTA_NETS = (0, 32)

# Models of which these two releases compute one KV, in the cases of `_is_computed_alike`: the
# sources of both were compared (docs/identity.md).
ALIKE_SPAN = ("0.32", "0.33")
ALIKE = frozenset({
    "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
})  # fmt: skip
WHOLE_CACHES = ("auto", "float16", "bfloat16")

# 0.30 added failures by request; 0.29 reports invalid blocks only.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
HAS_FAILED_REQUESTS = TransferResults is not None
# 0.33 tells a worker's connector before its caches lose their memory, and when they have it again.
TELLS_OF_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def check_version() -> bool:
    """Return True if this vLLM release is tested, False if it is newer.

    Raises:
        ConfigError: it is older than the supported releases.
    """
    version = _release()
    if version is None:
        return False
    if (0, 1) <= version < OLDEST:
        raise ConfigError(
            f"vLLM {vllm.__version__} is not supported; supported: "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )
    return OLDEST <= version <= NEWEST


def check_delta_nets() -> None:
    """Check that this vLLM computes gated delta nets right where prefill's prompts are cut.

    Raises:
        ConfigError: it is too old.
    """
    version = _release()
    if version is not None and (0, 1) <= version < DELTA_NETS:
        raise ConfigError("a state of kind GDN_ATTN needs vLLM 0.32 or newer")


def release_name() -> str:
    """Return what peers compare of this vLLM's version: "0.32" of each 0.32.x, and all of a version
    that is no release's."""
    match = re.fullmatch(r"(\d+\.\d+)[\d.]*(\.post\d+)?(\+.*)?", vllm.__version__)
    return match[1] if match is not None else vllm.__version__


def formula_name(vllm_config: Any, model: Any) -> str:
    """Return what peers compare of this vLLM's version when it computes a model's KV: its release's
    name, or the span of releases that compute the same."""
    name = release_name()
    if name in ALIKE_SPAN and _is_computed_alike(vllm_config, model):
        return " or ".join(ALIKE_SPAN)
    return name


def _is_computed_alike(vllm_config: Any, model: Any) -> bool:
    """Whether the releases of ALIKE_SPAN compute one KV of a model. They do not with adapters (on a
    CPU), with a quantised cache (on ROCm), or with a window (by Triton)."""
    return (
        set(model.hf_config.architectures or [""]) <= ALIKE
        and model.quantization is None
        and vllm_config.lora_config is None
        and vllm_config.cache_config.cache_dtype in WHOLE_CACHES
        and model.get_sliding_window() is None
    )


def _release() -> tuple[int, int] | None:
    """Return this vLLM's release; None if it was built from a checkout: trust whoever did it."""
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(match[1]), int(match[2])) if match is not None else None


def cached_by(request: Any) -> object:
    """Return what vLLM's prefix cache tells the adapters of requests apart by: their names, and
    since 0.31 their paths."""
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    return tuple(_gen_lora_extra_hash_keys(request))


def num_lookahead_tokens(vllm_config: Any) -> int:
    """Return how many tokens after a position a draft's layers have read when they compute it.

    Before 0.31, only vLLM's scheduler has this number; the connector needs to know if it is above
    one.
    """
    known = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if known is not None:
        return int(known)
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.use_multi_module_mtp():
        return 0
    return int(speculation.num_speculative_tokens)


def num_speculative_tokens(vllm_config: Any) -> int:
    """Return how many tokens vLLM verifies in a step beside the one that it knows."""
    known = getattr(vllm_config, "num_speculative_tokens", None)
    if known is not None:
        return int(known)
    speculation = vllm_config.speculative_config
    return int(speculation.num_speculative_tokens or 0) if speculation is not None else 0


def watermark(vllm_config: Any) -> float:
    """Return which part of the cache vLLM leaves free when it starts a request beside others;
    older releases leave none."""
    return float(getattr(vllm_config.scheduler_config, "watermark", 0.0))


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether vLLM tells its clients which experts each token took; older releases ask the model's
    configuration."""
    owners = (getattr(vllm_config, name, None) for name in ("aux_output_config", "model_config"))
    return any(getattr(owner, "enable_return_routed_experts", False) for owner in owners)


def obstacle_to_layers(vllm_config: Any) -> str:
    """Return the setting with which a layer's hook does not prove that the layer is done for all
    tokens of a step, or that it will not be written again; "" if there is none."""
    parallel = vllm_config.parallel_config
    for name in ("use_ubatching", "enable_dbo", "ubatch_size"):
        if getattr(parallel, name, False):
            return "micro-batches"
    return "speculative decoding" if vllm_config.speculative_config is not None else ""


def has_random_request_ids() -> bool:
    """Whether vLLM appends eight random digits to each request id."""
    return not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)


def p2p_hit_source() -> Any:
    """Return the label of our cache hits, from 0.32 on; None before."""
    try:
        module = importlib.import_module("vllm.v1.metrics.cache_hit_source")
    except ModuleNotFoundError:
        return None
    return module.CacheHitSource.P2P


def show_logs() -> None:
    """Give our loggers vLLM's handlers; vLLM configures only its own loggers."""
    ours, theirs = logging.getLogger("p2p_engine"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate  # else the root logger repeats each line
        for handler in theirs.handlers:
            ours.addHandler(handler)
