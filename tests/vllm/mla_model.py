"""A tiny model with multi-head latent attention, made on this machine: what a token leaves in the
cache is one latent vector for all heads, so that every rank keeps the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model

LATENT_BYTES = (512 + 64) * 4  # what vLLM's CPU backend can: DeepSeek's own sizes, in float32
NUM_LAYERS = 4


def ensure_mla_model() -> Path:
    """Return the model's folder; make it in a child process when it is not there yet."""
    tiny = ensure_tiny_model()
    folder = tiny.with_name(tiny.name.replace("llama", "deepseek"))
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-m", __spec__.name, str(tiny), str(folder)], check=True)
    return folder


def _make(tiny: Path, folder: Path) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=TinyModel.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, folder / name)


if __name__ == "__main__":
    _make(Path(sys.argv[1]), Path(sys.argv[2]))
