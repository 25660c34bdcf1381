"""What `p2p-engine size` reads from config.json is what vLLM makes of it, family by family.

vLLM builds each model on the meta device, so that nothing is allocated, and each of its attention
layers says what it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from p2p_engine.cli.model_shape import FAMILIES, ModelShape, read_model
from p2p_engine.connector.groups import SUPPORTED

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # vLLM's own

TOKENS, BLOCK = 4000, 32
COMMON = {
    "torch_dtype": "bfloat16", "vocab_size": 128, "hidden_size": 512, "intermediate_size": 64,
    "max_position_embeddings": 8192, "num_hidden_layers": 4,
}  # fmt: skip
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 64,
}  # fmt: skip
EIGHT = {"num_hidden_layers": 8}  # of which some are full attention, whatever the pattern is
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", HEADS),
    "llama without shared heads": ("LlamaForCausalLM", {"num_attention_heads": 8}),
    "llama with another head size": ("LlamaForCausalLM", {**HEADS, "head_dim": 128}),
    "mistral": ("MistralForCausalLM", HEADS),
    "mistral without a window": ("MistralForCausalLM", {**HEADS, "sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen2": ("Qwen2ForCausalLM", {**HEADS, "sliding_window": 96, "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", HEADS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**HEADS, **EXPERTS, "head_dim": 128}),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, "head_dim": 64, "sliding_window": 96}),
    "gemma3_text": ("Gemma3ForCausalLM", {**HEADS, **EIGHT, "head_dim": 64, "sliding_window": 96}),
    "gemma3_text as published": ("Gemma3ForCausalLM", {**EIGHT, "sliding_window": 1024}),
    "gpt_oss": ("GptOssForCausalLM", {
        **HEADS, **EXPERTS, "head_dim": 64, "sliding_window": 96, "num_local_experts": 4,
    }),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
}  # fmt: skip


@pytest.fixture(autouse=True)
def inspects_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM look at a model's class in this process: another one imports vLLM each time."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Be the only rank: vLLM's layers ask how many there are."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield
    ending: Any = parallel_state  # untyped
    ending.destroy_model_parallel()
    ending.destroy_distributed_environment()


def configure(folder: Path) -> VllmConfig:
    """Let vLLM read the config.json, as `vllm serve` does."""
    args = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=TOKENS, block_size=BLOCK)
    return args.create_engine_config()


def specs_of(config: VllmConfig) -> list[AttentionSpec]:
    """What each layer of vLLM's model keeps."""
    dtype: Any = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        layers = config.compilation_config.static_forward_context.values()
        return [
            layer.get_kv_cache_spec(config)
            for layer in layers
            if hasattr(layer, "get_kv_cache_spec")
        ]


def read(folder: Path, case: str) -> ModelShape:
    """Write the config.json of a case, and read it."""
    architecture, changes = CASES[case]
    config = {"architectures": [architecture], "model_type": case.split()[0], **COMMON, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder, "auto")


def test_every_family_is_compared() -> None:
    assert {case.split()[0] for case in CASES} == FAMILIES


@pytest.mark.parametrize("case", CASES)
def test_a_token_takes_what_vllm_says(tmp_path: Path, case: str) -> None:
    model = read(tmp_path, case)
    config = configure(tmp_path)
    specs = specs_of(config)
    expected = sorted(
        (spec.page_size_bytes / spec.block_size, getattr(spec, "sliding_window", None) or 0)
        for spec in specs
    )
    found = sorted(
        (kind.token_bytes(1) / kind.num_layers, kind.window)
        for kind in model.kinds
        for _ in range(kind.num_layers)
    )
    assert found == expected
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    whole = [kind for kind in model.kinds if not kind.window]
    assert sum(spec.max_memory_usage_bytes(config) for spec in full) == sum(
        kind.num_blocks(TOKENS, BLOCK) * BLOCK * kind.token_bytes(1) for kind in whole
    )
    assert {type(spec) for spec in specs} <= set(SUPPORTED)  # docs/models.md names these models


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "deepseek_v3"])
def test_ranks_share_the_heads_as_vllm_does(tmp_path: Path, case: str) -> None:
    model = read(tmp_path, case)
    config = configure(tmp_path).model_config
    for tp_size in (1, 2, 4):
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = tp_size
        heads = 1 if config.use_mla else config.get_num_kv_heads(parallel)
        assert {kind.heads(tp_size) for kind in model.kinds} == {heads}
