"""Tiny models of other kinds than the tiny Llama, made on this machine, with its tokenizer.

deepseek: what a token leaves in the cache is one latent vector for all heads, the same on each rank
gemma:    two layers of three look back no farther than a window, and have block tables of their own
granite:  attention in one layer of three; Mamba2 in the others, which keep a state
lfm:      the same with short convolutions, whose state is what they look back at
qwen:     the same with gated delta nets (GDN), which vLLM's CPU backend has in bfloat16 only
ocr:      takes images; how many tokens one has, and their places (rope in three dimensions), depend
          on its size
phi:      LongRoPE, whose long factors turn keys otherwise than its short ones
eagle:    no model, but a draft for the tiny Llama; what it proposes is hardly ever right
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from p2p_engine.cli.tiny_model import HEAD_DIM, TinyModel, ensure_tiny_model

WINDOW = 96  # three blocks of 32
PHI_ORIGINAL = 256  # up to this length of the model, vLLM takes LongRoPE's short factors
PATCH = 14  # pixels; an image has one token for each square of two by two
IMAGE = "<|IMAGE_PLACEHOLDER|>"
IMAGE_TOKENS = ("<|IMAGE_START|>", IMAGE, "<|IMAGE_END|>")
_IMAGE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    + "".join(IMAGE_TOKENS)
    + "{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


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


def _ocr(transformers: Any) -> Any:
    first = TinyModel.vocab_size  # behind the tiny tokenizer's own
    text = {
        **COMMON, "vocab_size": first + 32, "head_dim": HEAD_DIM, "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0,
            "mrope_section": [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8],
        },
    }  # fmt: skip
    vision = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": PATCH, "image_size": 8 * PATCH,
    }  # fmt: skip
    config = transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=first,
        image_token_id=first + 1,
        vision_end_token_id=first + 2,
        video_token_id=first + 3,
        tie_word_embeddings=False,
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config)


def _lfm(transformers: Any) -> Any:
    config = transformers.Lfm2Config(
        **COMMON,
        layer_types=["conv", "conv", "full_attention"] * 2,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        conv_dim=COMMON["hidden_size"],  # this and the next two as published, for vLLM
        block_dim=COMMON["hidden_size"],
        block_ff_dim=COMMON["intermediate_size"],
    )
    return transformers.Lfm2ForCausalLM(config)


def _qwen(transformers: Any) -> Any:
    config = transformers.Qwen3NextConfig(
        **COMMON,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        mlp_only_layers=list(range(COMMON["num_hidden_layers"] - 1)),  # vLLM wants one with experts
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    model = transformers.Qwen3NextForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # as made, a state forgets nearly all with each token
            weight.data.uniform_(-7, -3)
    return model


def _phi(transformers: Any) -> Any:
    half = COMMON["hidden_size"] // COMMON["num_attention_heads"] // 2
    ropes = {
        "rope_type": "longrope", "rope_theta": 10000.0,
        "original_max_position_embeddings": PHI_ORIGINAL,
        "short_factor": [1.0] * half, "long_factor": [1.0 + index / 4 for index in range(half)],
    }  # fmt: skip
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(
        **COMMON, original_max_position_embeddings=PHI_ORIGINAL, rope_parameters=ropes
    ))  # fmt: skip


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


def _add_processor(transformers: Any, folder: Path) -> None:
    """Save what makes patches of images, and a tokenizer that knows their tokens."""
    kinds = "vision_start_token", "image_token", "vision_end_token"
    names = dict(zip(kinds, IMAGE_TOKENS, strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    tokenizer.chat_template = _IMAGE_TEMPLATE
    images = transformers.PaddleOCRVLImageProcessorPil(
        patch_size=PATCH,
        size={"shortest_edge": (4 * PATCH) ** 2, "longest_edge": (32 * PATCH) ** 2},
    )
    transformers.PaddleOCRVLProcessor(images, tokenizer).save_pretrained(folder)


def _make(name: str, tiny: Path, folder: Path) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    makers = _deepseek, _gemma, _granite, _lfm, _qwen, _ocr, _phi, _eagle
    [make] = [item for item in makers if item.__name__ == f"_{name}"]
    model = make(transformers).to(torch.bfloat16)
    if name == "eagle":
        folder.mkdir(parents=True, exist_ok=True)
        _save_eagle(model, folder)
    else:
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)
    if name == "ocr":
        _add_processor(transformers, folder)


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
