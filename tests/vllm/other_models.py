"""Tiny models of other kinds than the tiny Llama, made on this machine, with its tokenizer.

deepseek: what a token leaves in the cache is one latent vector for all heads, the same on each rank
gemma:    two layers of three look back no farther than a window, and have block tables of their own
granite:  attention in one layer of three; Mamba2 in the others, which keep a state
eagle:    no model, but a draft for the tiny Llama; what it proposes is hardly ever right
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model

WINDOW = 96  # three blocks of 32


def ensure_model(name: str) -> Path:
    """Return a model's folder ("llama": the tiny one); make it in a child process when it is not
    there yet."""
    tiny = ensure_tiny_model()
    folder = tiny.with_name(tiny.name.replace("llama", name))
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", __spec__.name, name, str(tiny), str(folder)]
        subprocess.run(command, check=True)
    return folder


def _deepseek(transformers: Any) -> Any:
    config = transformers.DeepseekV2Config(
        vocab_size=TinyModel.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,  # this and the next but one: all that vLLM's CPU backend can
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.DeepseekV2ForCausalLM(config)


def _gemma(transformers: Any) -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=TinyModel.vocab_size,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return transformers.Gemma3ForCausalLM(config)


COMMON: dict[str, Any] = {
    "vocab_size": TinyModel.vocab_size, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "initializer_range": 0.15,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def _granite(transformers: Any) -> Any:
    config = transformers.GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["mamba", "mamba", "attention"] * 2,
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_n_groups=1,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _eagle(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=TinyModel.vocab_size,
        hidden_size=512,
        intermediate_size=512,
        head_dim=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def _save_eagle(model: Any, folder: Path) -> None:
    """Its layer, and what joins a token with what the model thinks of the last one."""
    torch, safetensors = import_module("torch"), import_module("safetensors.torch")
    weights = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if "layers." in name and "input_layernorm" not in name
    }
    width = model.config.hidden_size
    weights["fc.weight"] = torch.randn((width, 2 * width), dtype=torch.bfloat16) / 16
    model.config.architectures = [type(model).__name__]  # vLLM's name for it ends with this one
    model.config.save_pretrained(folder)
    safetensors.save_file(weights, folder / "model.safetensors")


def _make(name: str, tiny: Path, folder: Path) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    makers = _deepseek, _gemma, _granite, _eagle
    [make] = [item for item in makers if item.__name__ == f"_{name}"]
    model = make(transformers).to(torch.bfloat16)
    if name == "eagle":
        folder.mkdir(parents=True, exist_ok=True)
        _save_eagle(model, folder)
    else:
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
