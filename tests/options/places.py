"""Folders that options name: other weights, the same ones elsewhere, other settings. A word of a
command says @NAME for one; it is made when it is first needed, and kept beside the tiny model."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from tests.vllm.adapters import make_adapter
from tests.vllm.other_models import ensure_model

_NAME = re.compile(r"@(\w+)")


def resolve(word: str) -> str:
    """Return a word with the paths of the folders that it names."""
    return _NAME.sub(lambda found: str(_folder(found[1])), word)


def _folder(name: str) -> Path:
    if name == "draft":
        return ensure_model("eagle")
    if name == "other":
        return ensure_tiny_model(TinyModel(seed=1))
    tiny = ensure_tiny_model()
    folder = tiny.with_name(f"{tiny.name}-{name}")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=tiny.parent) as scratch:
            made = Path(scratch, "made")
            _MAKERS[name](tiny, made)
            made.rename(folder)
    return folder


def _weights_of(folder: Path) -> Path:
    [file] = folder.glob("*.safetensors")
    return file


def _copy(tiny: Path, made: Path) -> None:
    """The same model at another place."""
    shutil.copytree(tiny, made)


def _pickled(tiny: Path, made: Path) -> None:
    """The same model, and beside it, in the older formats, other weights."""
    shutil.copytree(tiny, made)
    loaded = import_module("safetensors.torch").load_file(_weights_of(_folder("other")))
    weights = {name: tensor.float() for name, tensor in loaded.items()}  # as npcache wants it
    for file in ("pytorch_model.bin", "model.pt"):
        import_module("torch").save(weights, made / file)


def _consolidated(tiny: Path, made: Path) -> None:
    """The same model, and beside it, as Mistral names the file, other weights."""
    shutil.copytree(tiny, made)
    shutil.copy(_weights_of(_folder("other")), made / "consolidated.safetensors")


def _hub(tiny: Path, made: Path) -> None:
    """A cache of Hugging Face's hub with two revisions of a model, of other weights."""
    repository = made / "models--tiny--llama"
    for revision, folder, digit in (("main", tiny, "a"), ("other", _folder("other"), "b")):
        shutil.copytree(folder, repository / "snapshots" / (40 * digit))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(40 * digit)


def _turned(tiny: Path, made: Path) -> None:
    """A configuration that turns keys otherwise, and no weights."""
    made.mkdir()
    config = json.loads((tiny / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (made / "config.json").write_text(json.dumps(config))


def _tokenizer(tiny: Path, made: Path) -> None:
    """Another tokenizer: its words have each other's numbers."""
    made.mkdir()
    for file in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, made / file)
    told = json.loads((tiny / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    special = {each["content"] for each in told.get("added_tokens", ())}
    plain = [word for word in vocabulary if word not in special]
    numbers = [vocabulary[word] for word in plain]
    vocabulary.update(zip(plain, [*numbers[1:], numbers[0]], strict=True))
    (made / "tokenizer.json").write_text(json.dumps(told))


def _adapter(_: Path, made: Path) -> None:
    make_adapter(made, 1)


_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "copy": _copy, "pickled": _pickled, "consolidated": _consolidated, "hub": _hub,
    "turned": _turned, "tokenizer": _tokenizer, "adapter": _adapter,
}  # fmt: skip
