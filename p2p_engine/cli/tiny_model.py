"""Creates a tiny Llama without a download: weights, tokenizer and chat template.

Its random weights have a large spread, so that its output is chaotic: one wrong byte in the KV
cache changes the continuation at once. Equal tokens therefore prove that the cache arrived whole.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

HEAD_DIM = 64
_SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vo", "ne", "shi", "dor", "pel", "qua")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)


@dataclass(frozen=True)
class TinyModel:
    """The shape of the model; `version` changes with anything else about it."""

    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 1024
    seed: int = 0
    version: int = 1

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of K and V per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * HEAD_DIM * element_bytes

    @property
    def path(self) -> Path:
        """The folder in which the model is cached."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "p2p-engine" / ("tiny-llama-" + "-".join(map(str, astuple(self))))


def ensure_tiny_model(model: TinyModel | None = None, *, timeout: float = 180.0) -> Path:
    """Return the model's folder; create the model in a child process if it does not exist.

    The child keeps torch and transformers out of this process. Blocks for up to `timeout` seconds.

    Raises:
        subprocess.CalledProcessError: the child failed; its error is on stderr.
    """
    model = model or TinyModel()
    if not model.path.exists():
        shape = [f"--{name.replace('_', '-')}={value}" for name, value in vars(model).items()]
        command = [sys.executable, "-m", "p2p_engine.cli.tiny_model", *shape]
        subprocess.run(command, check=True, timeout=timeout, stdout=subprocess.DEVNULL)
    return model.path


def make_tiny_model(model: TinyModel) -> None:
    """Write the model's folder atomically, so that no reader finds half a model."""
    model.path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=model.path.parent))
    try:
        _write_model(model, draft)
        draft.rename(model.path)
    except OSError:
        if not model.path.exists():  # else another process created the same model first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_model(model: TinyModel, folder: Path) -> None:
    import torch

    transformers = _optional("transformers")
    torch.manual_seed(model.seed)
    vocab_size = _write_tokenizer(model, folder)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HEAD_DIM * model.num_heads,
        intermediate_size=1024,
        head_dim=HEAD_DIM,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    weights = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    weights.save_pretrained(folder)


def _write_tokenizer(model: TinyModel, folder: Path) -> int:
    tokenizers = _optional("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = byte_level
    pieces.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=model.vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(_words(), trainer)
    tokenizer = _optional("transformers").PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", model_max_length=8192
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _optional(name: str) -> Any:
    """Import a library that vLLM brings; neither it nor its types are there without vLLM."""
    return importlib.import_module(name)


def _words() -> Iterator[str]:
    """Yield the tokenizer's training text: a made-up language, equal on every machine and
    Python."""
    yield "system: user: assistant:"
    for syllables in itertools.product(_SYLLABLES, repeat=3):
        yield " " + "".join(syllables)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(TinyModel()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    model = TinyModel(**vars(parser.parse_args()))
    make_tiny_model(model)
    print(model.path)


if __name__ == "__main__":
    _main()
