"""Tiny LoRA adapters for the tiny Llama, made on this machine. They change all its words."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from p2p_engine.cli.tiny_model import HEAD_DIM, TinyModel

RANK = 8
_SPREAD = 0.15  # as of the model's own weights


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of queries, keys and values; each seed makes another one."""
    model, source = TinyModel(), np.random.default_rng(seed)
    width, narrow = model.num_heads * HEAD_DIM, model.num_kv_heads * HEAD_DIM
    outputs = {"q_proj": width, "k_proj": narrow, "v_proj": narrow}
    weights: dict[str, Any] = {}
    for layer in range(model.num_layers):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, width)), ("lora_B", (size, RANK))):
                values = source.normal(0, _SPREAD, shape).astype(np.float32)
                weights[f"{prefix}.{part}.weight"] = values
    folder.mkdir(parents=True)
    import_module("safetensors.numpy").save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(outputs),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
