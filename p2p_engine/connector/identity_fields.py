"""What becomes of each field of vLLM's configuration in an instance's identity.

A field that stands in no table is compared, so a release that adds one cannot make two instances
pair that should not. docs/identity.md shows these tables; a test walks the installed vLLM's fields
and fails on one without a row, and another changes each field and looks at the identity.
"""

from __future__ import annotations

from collections.abc import Mapping

# Compared by value; its default counts as absent.
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
    "kernel_config": _OWN,
    "lora_config": _OWN,
    "quant_config": "left out: made of `quantization`, `quantization_config` and `hf_config`",
    "additional_config": "compared by a digest, without kernels: names that end with `_backend`",
    "parallel_config": _PLACE,
    "speculative_config": "left out: a draft's layers have an identity of their own",
    "load_config": _BY_WEIGHTS,
    "weight_transfer_config": _BY_WEIGHTS,
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
    "quantization": "compared, without the kernel: `awq_marlin` and `auto_awq` are `awq`",
    "quantization_config": COMPARED,
    "runner": "compared, as it is resolved: `auto` may be `generate`",
    "convert": "compared, as it is resolved: `auto` may be `none`",
    "code_revision": COMPARED,
    "model_class_overrides": COMPARED,
    **dict.fromkeys(
        ("max_model_len", "model_impl"),
        "what is derived from it: `rope_factors`, `attn_temperature_tuning`",
    ),
    "generation_config": "what is derived from it: `attn_temperature_tuning`",
    "override_generation_config": "what is derived from it: `attn_temperature_tuning`",
    "hf_overrides": "laid over what the files of `hf_config` say",
    **dict.fromkeys(
        ("hf_config_path", "config_format"), "which files are compared as `hf_config`"
    ),
    "trust_remote_code": "left out: `hf` is `as resolved` where it brings a class",
    "hf_text_config": "left out: `hf_config` has it",
    "is_submodel_config": "left out: `hf_config` is that part",
    "word_embeddings_untied_by_checkpoint": _NO_KV,
    "disable_sliding_window": _BY_CACHE,
    "spec_target_max_model_len": _PLACE,
    "model": "its files are compared as `hf_config`; the name of the weights says the rest",
    **dict.fromkeys(("model_weights", "revision"), _BY_WEIGHTS),
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
            "effective_attention_block_size", "_block_size_resolved", "use_kda_recoverssm",
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
}  # fmt: skip

ATTENTION: Rows = {
    "use_prefill_query_quantization": COMPARED,
    "disable_flashinfer_q_quantization": COMPARED,
    **dict.fromkeys(("indexer_kv_dtype", "use_fp4_indexer_cache"), _BY_CACHE),
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
    "mm_processor_kwargs": "compared, without `device`",
    "mm_encoder_attn_dtype": COMPARED,
    "mm_encoder_fp8_scale_path": "compared: the scales in that file",
    "mm_hasher_algorithm": COMPARED,
    "video_pruning_rate": COMPARED,
    "video_pruning_method": COMPARED,
    **dict.fromkeys(("mm_encoder_attn_backend", "mm_device_do_normalize"), _KERNEL),
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
            "mm_ipc_gpu_memory_gb",
        ),
        _PLACE,
    ),
}  # fmt: skip

_ASKED_FOR = "compared of a quantised model, unless it is `auto`, or in AWQ or GPTQ"

KERNEL: Rows = {
    **dict.fromkeys(("moe_backend", "linear_backend", "linear_backend_per_quant"), _ASKED_FOR),
    **dict.fromkeys(
        (
            "ir_op_priority", "enable_flashinfer_autotune", "enable_cutedsl_warmup",
            "enable_jit_warmup", "enable_bf16x3_router_gemm", "sparse_indexer_topk_backend",
            "enable_rocm_segmented_attn_autotune", "monokernel",
        ),
        _KERNEL,
    ),
}  # fmt: skip

# An adapter is named with each request, in the prompt's binding; this is how adapters are applied.
LORA: Rows = {
    "lora_dtype": "compared, if it is not the model's",
    "target_modules": COMPARED,
    "enable_tower_connector_lora": COMPARED,
    "enable_moe_shared_loras": COMPARED,
    "default_mm_loras": _BY_PROMPT,
    "max_lora_cls_labels": _NO_KV,
    **dict.fromkeys(
        (
            "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras",
            "specialize_active_lora", "enable_mixed_moe_lora_format",
        ),
        _PLACE,
    ),
}  # fmt: skip

# Of the model's own configuration and those in it, which are mappings with a `model_type`. All
# else is compared, except for names that end with `name_or_path`, at any depth, and that begin
# with an underscore: vLLM and transformers note there how they run the model.
HF: Rows = {
    "auto_map": "left out: it says where code is, and code is not compared",
    **dict.fromkeys(
        ("transformers_version", "unsloth_version"), "left out: the release that has written it"
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "left out: vLLM computes in `dtype`"),
    **dict.fromkeys(
        (
            "id2label", "label2id", "num_labels", "problem_type", "output_hidden_states",
            "output_attentions", "output_router_logits", "return_dict", "use_cache",
            "tie_word_embeddings", "torchscript",
        ),
        _NO_KV,
    ),
    **dict.fromkeys(
        (
            "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop",
            "embd_pdrop", "attn_pdrop", "dropout", "classifier_dropout", "router_aux_loss_coef",
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
    "KernelConfig": KERNEL,
    "LoRAConfig": LORA,
}

# Of the model's own configuration, whose null says what a file without the field says: transformers
# has no other default, or the description of the cache says the rest.
NULLS = ("quantization_config", "rope_parameters", "rope_scaling", "sliding_window")

# Variables of the environment that choose a format or a rule, and their defaults; compared by the
# value that vLLM makes of them. docs/identity.md says what the others do.
ENVIRONMENT: Mapping[str, object] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_DISABLED_KERNELS": [],
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MEDIA_CONNECTOR": "http",
    "VLLM_MM_HASHER_ALGORITHM": "blake3",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_MOE_USE_DEEP_GEMM": True,
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": False,
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": "",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": "fp32",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": True,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": None,
    "VLLM_ROCM_USE_AITER_FP4BMM": False,
    "VLLM_ROCM_USE_AITER_FP8BMM": False,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4": False,
    "VLLM_USE_DEEP_GEMM": True,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_VIDEO_LOADER_BACKEND": "opencv",
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
}


def is_compared(rows: Rows, name: str) -> bool:
    """Whether a field is compared by its value."""
    return rows.get(name, COMPARED) == COMPARED and not (rows is HF and name.startswith("_"))
