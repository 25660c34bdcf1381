"""What each option of vLLM's parser is changed to, or why it is left out.

A test fails on an option of the installed vLLM that is in neither list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.options.places import resolve


@dataclass(frozen=True)
class Scene:
    """What both sides of a pair are told."""

    model: str = "llama"
    args: tuple[str, ...] = ()
    prompts: str = "numbers"
    asked_for: str = "tiny"
    env: tuple[tuple[str, str], ...] = ()


# vLLM 0.32's kernel of RoPE for CPUs turns keys that are slices of rows, as those beside latents,
# as if they lay close together: alone, too, an answer changes with the length of what comes
# behind. So RoPE is computed without that kernel.
_NO_KERNELS = '--compilation-config={"custom_ops":["none"]}'
_LORA = "--enable-lora --max-lora-rank=8 --lora-modules ada=@adapter"
SCENES = {
    "llama": Scene(),
    "texts": Scene(prompts="texts"),
    "gemma": Scene("gemma"),
    "phi": Scene("phi"),
    "granite": Scene("granite"),
    "deepseek": Scene("deepseek", args=(_NO_KERNELS,)),
    "ocr": Scene("ocr", prompts="images"),
    "hub": Scene(args=("--model=tiny/llama",), env=(("HF_HUB_CACHE", "@hub"),)),
    "lora": Scene(args=tuple(_LORA.split()), asked_for="ada"),
}


def _told(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


# Both sides accept a difference of this field. So its change must be seen to be wrong, or the
# harness sees nothing.
ACCEPTED = "hf.rms_norm_eps"
CONTROL = _told(rms_norm_eps=0.9)

# Values of each option, by scene. "+" and "-" are a switch; what follows a space are other options
# of the same command, without which this one says nothing.
CHANGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llama": {
        "hf_overrides": (
            CONTROL,
            _told(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            _told(rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                "original_max_position_embeddings": 64,
            }),
            _told(rope_parameters={
                "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0,
            }),
            _told(rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            }),
            _told(sliding_window=64),
            _told(num_hidden_layers=4),
            _told(num_attention_heads=4),
            _told(architectures=["MistralForCausalLM"]),
            _told(is_causal=False),
            _told(attention_bias=True),
            _told(max_position_embeddings=8192),
            _told(tie_word_embeddings=True),
            _told(eos_token_id=7),
            _told(torch_dtype="float16"),
            _told(pretraining_tp=2, initializer_range=0.5),
            _told(unheard_of=1),
        ),
        "model": ("@copy", "@other", "@consolidated"),
        "hf_config_path": ("@turned",),
        "config_format": ("hf", "mistral"),
        "code_revision": ("other",),
        "load_format": (
            "dummy", "safetensors", "hf", "npcache", "mistral", "sharded_state", "runai_streamer",
            "fastsafetensors", "ipc_cache",
            "pt --model=@pickled", "npcache --model=@pickled",
        ),
        "safetensors_load_strategy": ("eager", "prefetch"),
        "model_loader_extra_config": (_told(enable_multithread_load=True),),
        "ignore_patterns": ("*.safetensors",),
        "pt_load_map_location": ("cpu:0",),
        "max_parallel_loading_workers": ("1",),
        "dtype": ("bfloat16", "float16", "auto"),
        "quantization": ("fp8", "int8_per_channel_weight_only", "mxfp4", "awq"),
        "quantization_config": (
            _told(linear={"weight": "int8_per_channel_static"}),
            _told(linear={"weight": "fp8_per_tensor_static", "activation": "fp8_per_token"}),
        ),
        "allow_deprecated_quantization": ("+",),
        "runner": ("generate", "pooling"),
        "convert": ("embed",),
        "model_impl": ("transformers", "vllm"),
        "model_class_overrides": (_told(LlamaForCausalLM="mistral:MistralForCausalLM"),),
        "trust_remote_code": ("+",),
        "seed": ("7",),
        "max_model_len": ("512", "4096"),
        "generation_config": ("vllm",),
        "override_generation_config": (
            _told(repetition_penalty=1.5), _told(attn_temperature_tuning=True)
        ),
        "disable_cascade_attn": ("+",),
        "enforce_eager": ("-",),
        "skip_tokenizer_init": ("+",),
        "enable_prompt_embeds": ("+",),
        "enable_return_routed_experts": ("+",),
        "return_sampling_mask": ("+",),
        "use_fp64_gumbel": ("+",),
        "enable_trace_replay": ("+",),
        "logprobs_mode": ("raw_logits",),
        "enable_sleep_mode": ("+",),
        "enable_cumem_allocator": ("+",),
        "renderer_num_workers": ("2",),
        "attention_backend": ("TORCH_SDPA", "FLEX_ATTENTION", "TRITON_ATTN"),
        "attention_config": (
            _told(use_non_causal=True), _told(use_prefill_query_quantization=True),
            _told(indexer_kv_dtype="bf16"), _told(flash_attn_version=3),
        ),
        "tensor_parallel_size": ("2", "4"),
        "pipeline_parallel_size": (
            "2 --no-enforce-eager --compilation-config={\"mode\":2,\"backend\":\"eager\"}",
        ),
        "decode_context_parallel_size": ("2 --tensor-parallel-size=2",),
        "dcp_kv_cache_interleave_size": ("32 --tensor-parallel-size=2",),
        "cp_kv_cache_interleave_size": ("32",),
        "prefill_context_parallel_size": ("2",),
        "distributed_executor_backend": ("mp", "uni"),
        "enable_expert_parallel": ("+",),
        "enable_eplb": ("+",),
        "enable_dbo": ("+",),
        "enable_hc_sp": ("+",),
        "enable_batch_sharded_sampling": ("+",),
        "disable_custom_all_reduce": ("+",),
        "enable_fault_tolerance": ("+",),
        "block_size": ("64", "128", "16"),
        "gpu_memory_utilization": ("0.5",),
        "kv_cache_memory_bytes": ("500000000",),
        "kv_cache_dtype": (
            "bfloat16", "float16", "fp8", "fp8_e5m2", "int8_per_token_head", "turboquant_4bit_nc"
        ),
        "kv_cache_dtype_skip_layers": ("0 --kv-cache-dtype=fp8",),
        "num_gpu_blocks_override": ("100",),
        "enable_prefix_caching": ("-", "+"),
        "prefix_caching_hash_algo": ("sha256_cbor",),
        "prefix_cache_retention_interval": ("64",),
        "prefix_match_unit": ("64",),
        "kv_sharing_fast_prefill": ("+",),
        "kv_offloading_size": ("1",),
        "cpu_offload_gb": ("1",),
        "offload_group_size": ("2 --offload-backend=prefetch",),
        "max_num_batched_tokens": ("64",),
        "max_num_scheduled_tokens": ("64",),
        "max_num_seqs": ("1",),
        "long_prefill_token_threshold": ("64",),
        "long_prefill_token_threshold_adaptive": ("+",),
        "scheduling_policy": ("priority",),
        "enable_chunked_prefill": ("-",),
        "scheduler_cls": ("vllm.v1.core.sched.scheduler.Scheduler",),
        "scheduler_reserve_full_isl": ("-",),
        "watermark": ("0.1",),
        "prefill_schedule_interval": ("4",),
        "async_scheduling": ("-", "+"),
        "stream_interval": ("4",),
        "compilation_config": (
            '{"mode":2,"backend":"eager"} --no-enforce-eager',
            '{"custom_ops":["none"]} --no-enforce-eager', '{"custom_ops":["all"]}',
        ),
        "optimization_level": ("0", "3"),
        "performance_mode": ("throughput",),
        "kernel_config": (_told(linear_backend="torch"),),
        "ir_op_priority": (_told(rms_norm=["native"]),),
        "linear_backend": ("torch", "triton"),
        "moe_backend": ("emulation",),
        "speculative_config": (
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}',
            '{"method":"eagle","model":"@draft","num_speculative_tokens":3}',
        ),
        "spec_method": ("ngram --spec-tokens=3",),
        "diffusion_config": ("{}",),
        "watermark_config": ("{}",),
        "reasoning_config": ("{}",),
        "structured_outputs_config": (_told(backend="guidance"),),
        "additional_config": (_told(unheard_of=1),),
        "weight_transfer_config": (_told(backend="ipc"),),
        "enable_lora": ("+",),
        "engram_config": ("{}",),
    },
    "texts": {
        "tokenizer": ("@copy", "@tokenizer"),
        "tokenizer_mode": ("slow", "mistral"),
        "tokenizer_revision": ("other",),
    },
    "gemma": {
        "disable_sliding_window": ("+",),
        "disable_hybrid_kv_cache_manager": ("+", "-"),
        "hf_overrides": (_told(sliding_window=64), _told(query_pre_attn_scalar=128)),
        "tensor_parallel_size": ("2",),
        "block_size": ("64",),
        "model_impl": ("transformers",),
    },
    "phi": {
        "max_model_len": ("256", "1024"),
        "hf_overrides": (_told(original_max_position_embeddings=4096),),
        "model_impl": ("transformers",),
    },
    "granite": {
        "mamba_backend": ("flashinfer", "cpu"),
        "mamba_ssu_algorithm": ("simple",),
        "enable_mamba_cache_stochastic_rounding": ("+",),
        "mamba_cache_philox_rounds": ("4 --enable-mamba-cache-stochastic-rounding",),
        "mamba_cache_dtype": ("bfloat16",),
        "mamba_ssm_cache_dtype": ("bfloat16",),
        "mamba_block_size": ("64 --enable-prefix-caching",),
        "mamba_cache_mode": ("align --enable-prefix-caching",),
        "enable_mamba_shared_prefix_checkpoint": ("+",),
        "use_replayssm": ("+",),
        "replayssm_buffer_len": ("8 --use-replayssm",),
        "block_size": ("64",),
        "tensor_parallel_size": ("2",),
        "hf_overrides": (_told(embedding_multiplier=2.0), _told(attention_multiplier=0.5)),
    },
    "deepseek": {
        "hf_overrides": (_told(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),),
        "tensor_parallel_size": ("2",),
        "block_size": ("64",),
        "dtype": ("bfloat16",),
    },
    "ocr": {
        "language_model_only": ("+",),
        "limit_mm_per_prompt": (_told(image=1),),
        "enable_mm_embeds": ("+",),
        "media_io_kwargs": (_told(image={"rgba_background_color": [0, 0, 0]}),),
        "mm_processor_kwargs": (_told(size={"shortest_edge": 3136, "longest_edge": 50176}),),
        "mm_processor_cache_gb": ("0",),
        "mm_processor_cache_type": ("shm",),
        "mm_hasher_algorithm": ("sha256",),
        "mm_encoder_only": ("+",),
        "mm_encoder_tp_mode": ("data",),
        "mm_encoder_attn_backend": ("TORCH_SDPA",),
        "mm_encoder_attn_dtype": ("fp8",),
        "mm_encoder_fp8_scale_path": ("@turned/config.json --mm-encoder-attn-dtype=fp8",),
        "interleave_mm_strings": ("+",),
        "skip_mm_profiling": ("+",),
        "video_pruning_rate": ("0.5",),
        "video_pruning_method": ("vidcom2",),
        "mm_tensor_ipc": ("torch_shm",),
        "mm_processor_device": ("cpu",),
        "mm_device_do_normalize": ("+",),
        "disable_chunked_mm_input": ("+",),
        "model_impl": ("transformers",),
        "hf_overrides": (_told(vision_config={"layer_norm_eps": 0.9}),),
        "tensor_parallel_size": ("2",),
    },
    "hub": {"revision": ("main", "other")},
    "lora": {
        "lora_dtype": ("bfloat16",),
        "lora_target_modules": ("o_proj",),
        "max_lora_rank": ("16",),
        "max_loras": ("2",),
        "max_cpu_loras": ("2",),
        "fully_sharded_loras": ("+ --tensor-parallel-size=2",),
        "specialize_active_lora": ("+",),
        "enable_mixed_moe_lora_format": ("+",),
        "enable_moe_shared_loras": ("+",),
        "enable_tower_connector_lora": ("+",),
        "tensor_parallel_size": ("2",),
    },
}  # fmt: skip

# Names, by the reason.
LEFT_OUT: Mapping[str, str] = {
    "no option: vLLM's own code sets it": (
        "_api_process_count _api_process_rank model_weights mamba_config tokens_only "
        "enable_mm_processor_stats"
    ),
    "the pair itself": ("kv_transfer_config kv_events_config ec_transfer_config ec_manager_config"),
    "where it listens, reads, logs and measures": (
        "served_model_name allowed_local_media_path allowed_media_domains hf_token download_dir "
        "use_tqdm_on_load logging_config log_level log_config_file enable_log_requests "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode "
        "jit_monitor_verbose disable_log_stats aggregate_engine_logging profiler_config "
        "fail_on_environ_validation shutdown_timeout watchdog_config ray_workers_use_nsight "
        "mm_shm_cache_max_object_size_mb mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size fault_tolerance_config"
    ),
    "says what is done with an answer, or which requests are taken": (
        "reasoning_parser reasoning_parser_plugin max_logprobs pooler_config io_processor_plugin "
        "max_num_active_seqs max_num_queued_reqs max_num_queued_tokens aux_output_config "
        "max_lora_cls_labels logits_processors"
    ),
    "where and when ranks find each other; behind one address: tests/vllm/test_unequal.py": (
        "master_addr master_port nnodes node_rank distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids "
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend "
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "dp_sync_interval disable_nccl_for_dp_synchronization enable_elastic_ep "
        "elastic_ep_max_dp_size enable_shm_tensor_arena"
    ),
    "where experts are computed; no tiny model has experts that a CPU computes": (
        "enable_ep_weight_filter all2all_backend eplb_config expert_placement_strategy"
    ),
    "chooses a kernel, or its memory, of a device that is not here": (
        "dcp_comm_backend dcp_q_replicate ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold sleep_mode_offload_cudagraph sleep_mode_backend "
        "sleep_preserve_parameter_names enable_nccl_comm_suspend cudagraph_capture_sizes "
        "max_cudagraph_capture_size enable_flashinfer_autotune sparse_indexer_topk_backend "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend mm_ipc_gpu_memory_gb "
        "enable_bf16x3_router_gemm monokernel swa_bounded_replay"
    ),
    "said with another option": (
        "kv_offloading_backend offload_backend offload_num_in_group offload_prefetch_step "
        "offload_params cpu_offload_params spec_model spec_tokens"
    ),
    "whose code it is, is the operator's to know": "worker_cls worker_extension_cls",
    "names a model of its own that hears or sees; an adapter is named with each request": (
        "default_mm_loras"
    ),
    "a later release than the one tried here": "enable_mamba_fine_grained_prefix_cache",
}


@dataclass(frozen=True)
class Change:
    """One option with another value, on one side of a pair."""

    option: str
    value: str
    place: str = "llama"  # the name of its scene
    scene: Scene = field(default=SCENES["llama"], compare=False)

    @property
    def name(self) -> str:
        """What the record and the page call it."""
        words = " ".join(self._words())
        return words if self.place == "llama" else f"{self.place}: {words}"

    @property
    def args(self) -> tuple[str, ...]:
        """The words of a command, with the folders that they name; makes these."""
        return tuple(map(resolve, self._words()))

    def _words(self) -> list[str]:
        value, *more = self.value.split(" ")
        name = self.option.replace("_", "-")
        switch = {"+": f"--{name}", "-": f"--no-{name}"}
        return [switch.get(value, f"--{name}={value}"), *more]


def changes() -> Iterator[Change]:
    """Yield all, those of one scene side by side."""
    for place, options in CHANGES.items():
        for option, values in options.items():
            for value in values:
                yield Change(option, value, place, SCENES[place])


def known_options() -> dict[str, str]:
    """Return each option that has a row, and why it is left out; "" if it is changed."""
    changed = {change.option: "" for change in changes()}
    return changed | {name: why for why, names in LEFT_OUT.items() for name in names.split()}
