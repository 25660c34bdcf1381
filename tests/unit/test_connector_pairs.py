"""Pairs of vLLM's own configurations, from its own options: right ones have one digest, wrong ones
differ in a field that is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from p2p_engine.connector.compat import ALIKE_SPAN, release_name
from p2p_engine.connector.identity import identity_of
from p2p_engine.wire.identity import differences, digest_of
from tests.doubles.vllm_config import write_model_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_size": 32, "skip_tokenizer_init": True, "max_model_len": 2048,
}  # fmt: skip


# Of a plain model it is told with the next one, which computes the same.
RELEASE = ["vllm"] if release_name() in ALIKE_SPAN else []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


def configured(model: Path, **options: Any) -> VllmConfig:
    """As vLLM resolves it from its options."""
    return EngineArgs(model=str(model), **{**OPTIONS, **options}).create_engine_config()


def told(config: VllmConfig) -> dict[str, str]:
    """Its identity."""
    return dict(identity_of(config, config.model_config))


@pytest.fixture(scope="module")
def usual(model: Path) -> dict[str, str]:
    return told(configured(model))


def check_pairs(here: dict[str, str], there: dict[str, str]) -> None:
    assert differences(here, there) == []
    assert digest_of(here) == digest_of(there)


# Right pairs


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"block_size": 64},
        {"max_model_len": 512},
        {"max_model_len": -1},
        {"max_num_batched_tokens": 4096, "max_num_seqs": 7},
        {"gpu_memory_utilization": 0.3},
        {"num_gpu_blocks_override": 50},
        {"attention_backend": "TRITON_ATTN"},
        {"load_format": "safetensors"},
        {"load_format": "pt"},
        {"load_format": "dummy"},
        {"model_impl": "transformers"},
        {"model_impl": "vllm"},
        {"runner": "generate", "convert": "none"},
        {"config_format": "hf", "trust_remote_code": True},
        {"generation_config": "vllm"},
        {"override_generation_config": {"temperature": 0.1, "top_k": 3}},
        {"seed": 7, "served_model_name": "other", "max_logprobs": 3},
        {"enforce_eager": True, "optimization_level": 0},
        {"performance_mode": "throughput"},
        {"moe_backend": "marlin", "linear_backend": "marlin"},
        {"gdn_prefill_backend": "triton"},
        {"enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"},
        {"cpu_offload_gb": 1},
        {"enable_prompt_embeds": True},
        {"speculative_config": {
            "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        {"hf_overrides": {"vocab_size": 1000}},
    ],
    ids=str,
)  # fmt: skip
def test_instances_pair_whose_options_change_no_kv(
    options: dict[str, Any], model: Path, usual: dict[str, str]
) -> None:
    """Of the cache's dtype, block size and the like, the cache's own description speaks."""
    check_pairs(usual, told(configured(model, **options)))


@pytest.mark.parametrize("make", [shutil.copytree, os.symlink], ids=["copied", "linked"])
def test_instances_pair_that_find_the_model_elsewhere(
    make: Callable[[Path, Path], Any], model: Path, usual: dict[str, str], tmp_path: Path
) -> None:
    make(model, tmp_path / "model")
    check_pairs(usual, told(configured(tmp_path / "model")))


def test_a_path_to_the_configuration_pairs_with_the_folder_that_has_it(
    model: Path, usual: dict[str, str], tmp_path: Path
) -> None:
    other = write_model_config(tmp_path, rms_norm_eps=0.5)
    check_pairs(usual, told(configured(other, hf_config_path=str(model))))


@pytest.mark.parametrize(
    ("here", "there"),
    [("awq", "auto_awq"), ("awq_marlin", "auto_awq"), ("gptq_marlin", "gptq")],
)
def test_what_platforms_call_one_quantization_is_one(here: str, there: str, model: Path) -> None:
    """vLLM takes `auto_awq` for a checkpoint in AWQ where it has a GPU, and `awq` on a CPU."""
    config = configured(model)
    identities = []
    for name in (here, there):
        object.__setattr__(config.model_config, "quantization", name)
        identities.append(told(config))
    check_pairs(*identities)


def test_instances_pair_after_vllm_has_made_the_model_of_either_implementation(
    model: Path, usual: dict[str, str]
) -> None:
    """The transformers implementation notes in the configuration how it runs the model."""
    config = configured(model, model_impl="transformers")
    hf_config: Any = config.model_config.hf_config
    hf_config._attn_implementation = "vllm"
    hf_config.dtype = "float32"
    check_pairs(usual, told(config))


# Wrong pairs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"quantization": "fp8", "dtype": "bfloat16"}, ["dtype", "quantization", *RELEASE]),
        ({"kv_cache_dtype": "fp8"}, RELEASE),
        ({"enable_lora": True, "max_loras": 3}, RELEASE),
        ({"hf_overrides": {"rms_norm_eps": 0.5}}, ["hf.rms_norm_eps"]),
        ({"hf_overrides": {"hidden_act": "gelu"}}, ["hf.hidden_act"]),
        (
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}},
            ["hf.rope_parameters.rope_type", "hf.rope_parameters.rope_theta"],
        ),
        (
            {"hf_overrides": {"rope_parameters": {
                "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}},
            [f"hf.rope_parameters.{name}" for name in ("rope_type", "factor", "rope_theta")],
        ),
        (
            {"hf_overrides": {"architectures": ["MistralForCausalLM"]}},
            ["hf.architectures", *RELEASE],
        ),
        ({"hf_overrides": {"a_new_field": 3}}, ["hf.a_new_field"]),
        ({"code_revision": "other"}, ["code_revision"]),
        ({"additional_config": {"a": 1}}, ["additional_config"]),
        ({"attention_config": {"use_prefill_query_quantization": True}},
         ["attention.use_prefill_query_quantization"]),
        ({"attention_config": {"disable_flashinfer_q_quantization": True}},
         ["attention.disable_flashinfer_q_quantization"]),
        (
            {"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_cache_dtype": "float16"},
            ["mamba.enable_stochastic_rounding"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_changes_kv_is_named(
    options: dict[str, Any], named: list[str], model: Path, usual: dict[str, str]
) -> None:
    changed = told(configured(model, **options))
    found = [one.partition(":")[0] for one in differences(usual, changed)]
    assert found == sorted(named)


def test_another_configuration_than_the_folders_is_named(
    model: Path, usual: dict[str, str], tmp_path: Path
) -> None:
    other = write_model_config(tmp_path, rms_norm_eps=0.5)
    assert differences(usual, told(configured(model, hf_config_path=str(other)))) == [
        "hf.rms_norm_eps: '(default, or accepted)' here, '0.5' there"
    ]


def test_longrope_is_named_where_transformers_computes(tmp_path: Path) -> None:
    """It chooses the factors by each prompt, vLLM's own model by the length of the model."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": 16 * [1.0],
            "long_factor": 16 * [2.0], "original_max_position_embeddings": 512}  # fmt: skip
    model = write_model_config(tmp_path, rope_parameters=rope)
    here, there = (told(configured(model, model_impl=each)) for each in ("vllm", "transformers"))
    assert differences(here, there) == ["rope_factors: 'long' here, 'by prompt' there"]


OWN_CLASS = """
from transformers import LlamaConfig

class Own(LlamaConfig):
    def __init__(self, rms_norm_eps={eps}, **values):
        super().__init__(rms_norm_eps=rms_norm_eps, **values)
"""


def test_a_class_of_the_models_own_is_told_by_what_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has defaults of its own, of what no file says."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(tmp_path / "cache")
    found = []
    for name, eps in (("one", 0.5), ("same", 0.5), ("other", 0.25)):
        (tmp_path / name).mkdir()
        model = write_model_config(tmp_path / name, auto_map={"AutoConfig": "own.Own"})
        (model / "own.py").write_text(OWN_CLASS.format(eps=eps))
        found.append(told(configured(model, trust_remote_code=True)))
    without, (one, same, other) = told(configured(tmp_path / "one")), found
    assert differences(one, other) == ["hf.rms_norm_eps: '0.5' here, '0.25' there"]
    assert differences(without, one)[0].startswith("hf: ")
    check_pairs(one, same)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, "mm.media_io_kwargs"),
        ({"mm_processor_kwargs": {"size": 3, "device": "cpu"}}, "mm.mm_processor_kwargs"),
        ({"video_pruning_rate": 0.5}, "mm.video_pruning_rate"),
        ({"mm_encoder_attn_dtype": "fp8"}, "mm.mm_encoder_attn_dtype"),
        ({"mm_hasher_algorithm": "sha256"}, "mm.mm_hasher_algorithm"),
        ({"mm_processor_kwargs": {"device": "cpu"}}, None),
        ({"mm_encoder_attn_backend": "TORCH_SDPA"}, None),
        ({"mm_processor_cache_gb": 0, "limit_per_prompt": {"image": 1}}, None),
    ],
    ids=str,
)
def test_of_the_options_for_media_those_are_named_that_change_what_is_computed(
    options: dict[str, Any], named: str | None, model: Path
) -> None:
    here, there = configured(model), configured(model)
    here.model_config.multimodal_config = MultiModalConfig()
    there.model_config.multimodal_config = MultiModalConfig(**options)
    found = differences(told(here), told(there))
    assert [one.partition(":")[0] for one in found] == ([named] if named else [])


@pytest.mark.parametrize(
    "name", ["preprocessor_config", "processor_config", "video_preprocessor_config"]
)
def test_the_files_that_make_a_models_processors_are_compared(
    name: str, usual: dict[str, str], tmp_path: Path
) -> None:
    """vLLM's identifier of an image says nothing of the mean that is taken from its pixels."""
    config = configured(write_model_config(tmp_path))
    found, file = [], tmp_path / f"{name}.json"
    for text in ('{"a": 1, "mean": [0.5, 1.0]}', '{"mean": [0.5, 1], "a": 1}', '{"mean": [0.1]}'):
        file.write_text(text)
        config.model_config.multimodal_config = None  # nobody reads the file
        check_pairs(usual, told(config))
        config.model_config.multimodal_config = MultiModalConfig()
        found.append(told(config))
    one, same, other = found
    check_pairs(one, same)
    assert [each.partition(":")[0] for each in differences(one, other)] == [f"mm.{name}"]
    file.unlink()
    check_pairs(usual, told(config))


def test_the_scales_of_an_encoder_are_compared_and_not_their_file(
    model: Path, tmp_path: Path
) -> None:
    scales = {"blocks.0": {"q": 1.0, "k": 2.0, "v": 3.0}}
    written = {
        "one": json.dumps(scales),
        "same": json.dumps(scales, indent=1),
        "other": json.dumps({"blocks.0": {**scales["blocks.0"], "q": 1.5}}),
    }
    identities = {}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
        config = configured(model)
        config.model_config.multimodal_config = MultiModalConfig(
            mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name)
        )
        identities[name] = told(config)
    check_pairs(identities["one"], identities["same"])
    [named] = differences(identities["one"], identities["other"])
    assert named.startswith("mm.mm_encoder_fp8_scales: ")
    assert str(tmp_path) not in named


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_lora_rank": 64, "max_loras": 2, "fully_sharded_loras": True}, None),
        ({"lora_dtype": "auto"}, None),
        ({"lora_dtype": "bfloat16"}, "lora.lora_dtype"),
        ({"target_modules": ["o_proj"]}, "lora.target_modules"),
        ({"enable_tower_connector_lora": True}, "lora.enable_tower_connector_lora"),
    ],
    ids=str,
)
def test_of_adapters_only_how_they_are_applied_is_compared(
    options: dict[str, Any], named: str | None, model: Path
) -> None:
    """Which adapters there are is no instance's identity: each request's prompt names its own."""
    config, identities = configured(model), []
    for each in ({}, options):
        config.lora_config = LoRAConfig(**each)
        config.lora_config.verify_with_model_config(config.model_config)
        identities.append(told(config))
    found = differences(*identities)
    assert [one.partition(":")[0] for one in found] == ([named] if named else [])


@pytest.mark.parametrize(
    ("quantization", "options", "named"),
    [
        ("fp8", {"linear_backend": "marlin"}, "kernel.linear_backend"),
        ("mxfp4", {"moe_backend": "aiter_triton_mxfp4_bf16"}, "kernel.moe_backend"),
        ("mxfp4", {"moe_backend": "triton"}, "kernel.moe_backend"),
        ("mxfp4", {"moe_backend": "emulation"}, "kernel.moe_backend"),
        ("fp8", {"linear_backend": "auto", "moe_backend": "auto"}, None),
        ("awq", {"linear_backend": "marlin"}, None),
        (None, {"moe_backend": "marlin"}, None),
    ],
)
def test_a_kernel_that_is_asked_for_is_named_as_it_chooses_a_quantised_models_activations(
    quantization: str | None, options: dict[str, str], named: str | None, model: Path
) -> None:
    here, there = configured(model), configured(model)
    for config in (here, there):
        object.__setattr__(config.model_config, "quantization", quantization)
    for name, value in options.items():
        object.__setattr__(there.kernel_config, name, value)
    found = differences(told(here), told(there))
    assert [one.partition(":")[0] for one in found] == ([named] if named else [])
