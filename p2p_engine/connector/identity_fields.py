"""What becomes of each field of vLLM's configuration in an instance's identity.

A field that stands in no table is compared, so a release that adds one cannot make two instances
pair that should not. docs/identity.md shows these tables; a test walks the installed vLLM's fields
and fails on one without a row, and another changes each field and looks at the identity.
"""

from __future__ import annotations

from collections.abc import Mapping

# Compared by value; its default counts as absent, so a release without the field has the default.
COMPARED = "compared"
# Rows that say another thing than COMPARED say why the field is left out, or what stands for it.
Rows = Mapping[str, str]

_BY_WEIGHTS = "left out: the name of the weights says it"
_BY_CACHE = "left out: the description of the cache says it"
_NO_KV = "left out: decides nothing of a prompt's KV"
_KERNEL = "left out: another kernel for the same formula and formats, so only rounding differs"
_PLACE = "left out: where and how fast it is computed, or what is kept how long"
_BY_PROMPT = "left out: the prompt is compared as tokens and media"
_OWN = "its own fields are compared"

CONFIG: Rows = {
    "model_config": _OWN,
    "cache_config": _OWN,
    "attention_config": _OWN,
    "mamba_config": _OWN,
    "quant_config": "left out: made of `quantization`, `quantization_config` and `hf_config`",
    "additional_config": COMPARED,
    "parallel_config": _BY_CACHE,
    "lora_config": "left out: an adapter is named with each request",
    "speculative_config": "left out: a draft's layers have an identity of their own",
    "load_config": _BY_WEIGHTS,
    "weight_transfer_config": _BY_WEIGHTS,
    "kernel_config": _KERNEL,
    "compilation_config": _KERNEL,
    "optimization_level": _KERNEL,
    "performance_mode": _KERNEL,
    "diffusion_config": _NO_KV,
    **dict.fromkeys(
        (
            "scheduler_config", "device_config", "offload_config", "engram_config",
            "observability_config", "logging_config", "profiler_config", "kv_transfer_config",
            "kv_events_config", "ec_transfer_config", "ec_manager_config", "instance_id",
            "shutdown_timeout", "watchdog_config",
        ),
        _PLACE,
    ),
    **dict.fromkeys(
        (
            "structured_outputs_config", "reasoning_config", "watermark_config",
            "aux_output_config",
        ),
        _NO_KV,
    ),
}  # fmt: skip

MODEL: Rows = {
    "hf_config": _OWN,
    "multimodal_config": _OWN,
    "dtype": COMPARED,
    "quantization": "compared, without the name of the kernel: `awq_marlin` is `awq`",
    "quantization_config": COMPARED,
    "runner": COMPARED,
    "convert": COMPARED,
    "code_revision": COMPARED,
    "model_class_overrides": COMPARED,
    "max_model_len": "what is derived from it: `rope_factors`, `attn_temperature_tuning`",
    "generation_config": "what is derived from it: `attn_temperature_tuning`",
    "override_generation_config": "what is derived from it: `attn_temperature_tuning`",
    "hf_overrides": "left out: `hf_config` has them",
    "hf_config_path": "left out: `hf_config` is what it leads to",
    "config_format": "left out: `hf_config` is what is read",
    "hf_text_config": "left out: `hf_config` has it",
    "is_submodel_config": "left out: `hf_config` is that part",
    "word_embeddings_untied_by_checkpoint": _NO_KV,
    "disable_sliding_window": _BY_CACHE,
    "model_impl": _KERNEL,
    "spec_target_max_model_len": _PLACE,
    **dict.fromkeys(("model", "model_weights", "revision", "trust_remote_code"), _BY_WEIGHTS),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init",
         "enable_prompt_embeds", "io_processor_plugin"), _BY_PROMPT
    ),
    **dict.fromkeys(
        (
            "seed", "return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel",
            "enable_trace_replay", "logits_processors", "pooler_config", "served_model_name",
            "enable_return_routed_experts",
        ),
        _NO_KV,
    ),
    **dict.fromkeys(
        (
            "allowed_local_media_path", "allowed_media_domains", "hf_token",
            "allow_deprecated_quantization", "enforce_eager", "disable_cascade_attn",
            "enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend",
            "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator",
            "renderer_num_workers",
        ),
        _PLACE,
    ),
}  # fmt: skip

CACHE: Rows = {
    **dict.fromkeys(
        (
            "block_size", "user_specified_block_size", "kv_cache_layout", "cache_dtype",
            "kv_cache_dtype_skip_layers", "sliding_window", "is_attention_free",
            "mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size",
            "user_specified_mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
            "mamba_cache_mode", "replayssm_buffer_len", "use_replayssm",
            "effective_attention_block_size", "_block_size_resolved",
        ),
        _BY_CACHE,
    ),
    **dict.fromkeys(
        (
            "prefix_match_unit", "gpu_memory_utilization", "num_gpu_blocks_override",
            "enable_prefix_caching", "prefix_caching_hash_algo",
            "prefix_cache_retention_interval", "enable_mamba_shared_prefix_checkpoint",
            "enable_mamba_fine_grained_prefix_cache", "num_gpu_blocks", "num_cpu_blocks",
            "simple_cpu_offload_num_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency",
            "hash_block_size", "cache_hit_alignment_tokens", "kv_cache_memory_bytes",
            "kv_offloading_size", "kv_offloading_backend",
        ),
        _PLACE,
    ),
    "kv_sharing_fast_prefill": "left out: the layers that it skips keep no KV of their own",
    "swa_bounded_replay": "left out: only DeepSeek-V4.1 has it, whose cache is refused",
    "use_kda_recoverssm": COMPARED,
}  # fmt: skip

ATTENTION: Rows = {
    "use_prefill_query_quantization": COMPARED,
    "disable_flashinfer_q_quantization": COMPARED,
    "indexer_kv_dtype": COMPARED,
    "use_fp4_indexer_cache": COMPARED,
    "indexer_sparse_logits": COMPARED,
    "use_non_causal": COMPARED,
    **dict.fromkeys(("backend", "backend_per_kind"), "left out: `packing` says what it keeps"),
    "hisparse_config": "left out: its cache is refused",
    **dict.fromkeys(
        (
            "minimax_m3_msa_decode_backend", "minimax_m3_indexer_cp", "flash_attn_version",
            "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph", "use_trtllm_attention", "trtllm_ragged_backend",
            "mla_prefill_backend", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
            "indexer_tp_shard_min_rows", "flex_attn_block_m", "flex_attn_block_n",
            "flex_attn_q_block_size", "flex_attn_kv_block_size",
        ),
        _KERNEL,
    ),
}  # fmt: skip

MAMBA: Rows = {
    "enable_stochastic_rounding": COMPARED,
    "stochastic_rounding_philox_rounds": _KERNEL,
    "backend": _KERNEL,
    "ssu_algorithm": _KERNEL,
}

MULTIMODAL: Rows = {
    "media_io_kwargs": COMPARED,
    "mm_processor_kwargs": COMPARED,
    "mm_device_do_normalize": COMPARED,
    "mm_encoder_attn_dtype": COMPARED,
    "mm_encoder_fp8_scale_path": "compared: the content of that file",
    "mm_hasher_algorithm": COMPARED,
    "video_pruning_rate": COMPARED,
    "video_pruning_method": COMPARED,
    "mm_encoder_attn_backend": _KERNEL,
    "interleave_mm_strings": _BY_PROMPT,
    **dict.fromkeys(
        (
            "language_model_only", "limit_per_prompt", "enable_mm_embeds", "mm_encoder_only",
            "allow_missing_mm_embeddings",
        ),
        "left out: decides which media are taken, not what is computed of them",
    ),
    **dict.fromkeys(
        (
            "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
            "mm_encoder_tp_mode", "mm_encoder_fp8_scale_save_path",
            "mm_encoder_fp8_scale_save_margin", "skip_mm_profiling", "mm_tensor_ipc",
            "mm_ipc_gpu_memory_gb", "mm_processor_device",
        ),
        _PLACE,
    ),
}  # fmt: skip

# Of the model's own configuration, at any depth. All else is compared.
HF: Rows = {
    **dict.fromkeys(("_name_or_path", "name_or_path", "auto_map"), _BY_WEIGHTS),
    "transformers_version": "left out: the release that has read or written it",
    **dict.fromkeys(("dtype", "torch_dtype"), "left out: vLLM computes in `dtype`"),
    **dict.fromkeys(
        (
            "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
            "decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type",
            "output_hidden_states", "output_attentions", "output_router_logits", "return_dict",
            "use_cache", "tie_word_embeddings", "torchscript", "chunk_size_feed_forward",
        ),
        _NO_KV,
    ),
    **dict.fromkeys(
        (
            "initializer_range", "attention_dropout", "hidden_dropout", "hidden_dropout_prob",
            "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "classifier_dropout",
            "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "pretraining_tp",
        ),
        "left out: for training",
    ),
}  # fmt: skip

TABLES: Mapping[str, Rows] = {
    "VllmConfig": CONFIG,
    "ModelConfig": MODEL,
    "CacheConfig": CACHE,
    "AttentionConfig": ATTENTION,
    "MambaConfig": MAMBA,
    "MultiModalConfig": MULTIMODAL,
}

# Variables of the environment that choose a format, where they are set. Of some 300 others of
# vLLM's, each chooses a kernel, a place, or a limit.
ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_VIDEO_LOADER_BACKEND",
)


def is_compared(rows: Rows, name: str) -> bool:
    """Whether a field is compared by its value."""
    return rows.get(name, COMPARED) == COMPARED
