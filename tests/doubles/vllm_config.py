"""vLLM's configuration of a simulated instance; it is the same for all releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)

from p2p_engine.transfer_config import CONNECTOR, MODULE_PATH

BLOCK_SIZE = 16
NUM_LAYERS = 3
NUM_HEADS = 2


def write_model_config(folder: Path, **changes: Any) -> Path:
    """Write as much of a model as a scheduler asks for."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_config(
    model: Path,
    role: Any,
    kv_port: int,
    *,
    max_tokens_per_step: int = 64,
    tp_size: int = 1,
    policy: Any = "fail",
    is_async: bool = False,
    has_prefix_cache: bool = True,
    settings: dict[str, Any] | None = None,
    block_size: int = BLOCK_SIZE,
    layout: str = "LBHNC",
    max_model_len: int = 2048,
    pp_size: int = 1,
    dp_rank: int = 0,
    max_num_seqs: int = 32,
    connector: str = CONNECTOR,
) -> VllmConfig:
    """Configure vLLM for our connector, by either of its names."""
    model_config = ModelConfig(
        model=str(model),
        dtype="float32",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens_per_step,
        max_model_len=model_config.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=is_async,
    )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=has_prefix_cache)
    cache_config.kv_cache_layout = layout
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=MODULE_PATH,
            kv_role=role,
            kv_port=kv_port,
            kv_load_failure_policy=policy,
            kv_buffer_device="cpu",
            kv_connector_extra_config=settings or {},
        ),
    )
    # Only what the connector reads of it; a real size would ask for real processes.
    config.parallel_config = ParallelConfig()
    config.parallel_config.tensor_parallel_size = tp_size
    config.parallel_config.pipeline_parallel_size = pp_size
    if dp_rank:  # what vLLM's engine core leaves of --data-parallel-external-lb and a dense model
        config.parallel_config.data_parallel_index = dp_rank
        config.parallel_config.data_parallel_external_lb = True
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.engine_id = f"engine_dp{dp_rank}"
    # On a CPU, vLLM has switched it off by now, and with it all that depends on running ahead.
    config.scheduler_config.async_scheduling = is_async
    with set_current_vllm_config(config):
        return config
