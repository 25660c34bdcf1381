"""A checkpoint's fingerprint: what tells two sets of weights apart without reading them again.

Names, types and shapes of all tensors, and a sample of each tensor's bytes at places that its name
decides. So it does not matter how tensors are spread over files, where the files are, or which
loader reads them. It is a matter of probability: weights that differ only where no sample was taken
look alike (docs/weights.md says how likely that is).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

NUM_PLACES = 4  # in each tensor
SAMPLED_BYTES = 256 << 10  # of all tensors together, if each gets at least
LEAST_BYTES = 16  # at each place
MAX_HEADER_BYTES = 100 << 20  # as safetensors allows
# What vLLM loads of a folder, by load format, in each of its releases: the first of these of which
# there are files. Another format reads *.safetensors, or *.gguf.
_HF = ("*.safetensors", "*.bin", "*.pt")
_READ = {
    "auto": ("consolidated*.safetensors", *_HF, "*.gguf"),
    "hf": _HF,
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
}
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. `read(offset, nbytes)` returns bytes of its contiguous form."""

    name: str
    kind: str  # dtype and shape
    nbytes: int
    read: Callable[[int, int], bytes]


def name_of_checkpoint(vllm_config: VllmConfig) -> str:
    """Return a name for the weights that vLLM loads at start, the same for the same weights.

    Reads at most some hundred KiB, or LEAST_BYTES at each place if there are many tensors.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    kind = str(load.load_format)
    if kind == "dummy":  # drawn for each part of a tensor alike, so another split is other weights
        parallel = vllm_config.parallel_config
        return f"dummy-{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
    try:
        folder = _folder_of(model.model, model.revision, load.download_dir)
        return f"checkpoint-{fingerprint(folder, kind)}"
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, struct.error) as error:
        named = f"{kind} {model.model_weights or model.model} {model.revision or ''}".strip()
        logger.warning(
            "the weights cannot be sampled, peers must name them alike: %r reason=%s",
            named, str(error),
        )  # fmt: skip
        return f"named-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}"


def name_of_adapter(path: str, number: int) -> str:
    """Return a name for a LoRA adapter's weights and settings, as they were when vLLM first named
    the adapter by this number; its path, if its files are not here.

    Reads the files' times, and the first time as much as of a checkpoint.
    """
    return _adapter(path, number)[1]


def has_changed(path: str, number: int) -> bool:
    """Whether an adapter's files are others than when vLLM first named it by this number. vLLM may
    have loaded them again since, or may not: its workers forget the adapters used least."""
    return _stamps(path) != _adapter(path, number)[0]


@functools.lru_cache(maxsize=1024)
def _adapter(path: str, number: int) -> tuple[tuple[object, ...], str]:
    stamps = _stamps(path)
    try:
        folder = _folder_of(path, None)
        settings = json.loads((folder / "adapter_config.json").read_text())
        settings.pop("base_model_name_or_path", None)
        told = f"{fingerprint(folder)} {json.dumps(settings, sort_keys=True)}"
    except (OSError, ValueError, AttributeError, RuntimeError, struct.error):
        return stamps, path
    return stamps, hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _stamps(path: str) -> tuple[object, ...]:
    """Return what changes when a file of a folder is written or replaced."""
    try:
        files = sorted(Path(path).iterdir())
        found = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, told.st_size, told.st_mtime_ns, told.st_ino) for name, told in found)


def fingerprint(folder: Path, load_format: str = "auto") -> str:
    """Return the fingerprint of a folder's weights, as 16 hexadecimal digits.

    Raises:
        OSError: a file cannot be read.
        ValueError: there are no weights, or a file is not of its format.
    """
    if folder.is_file():
        pieces = [_whole(folder)]
    else:
        pieces = [piece for file in _files_in(folder, load_format) for piece in _pieces_of(file)]
    if not pieces:
        raise ValueError(f"no weights in {folder}")
    nbytes = max(LEAST_BYTES, SAMPLED_BYTES // (NUM_PLACES * len(pieces)))
    samples = sorted(_sample(piece, nbytes) for piece in pieces)
    return hashlib.blake2b(b"".join(samples), digest_size=8).hexdigest()


def _folder_of(model: str, revision: str | None, cache: str | None = None) -> Path:
    """Return where the weights are: vLLM has fetched them by now."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    found = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    return Path(found)


def _files_in(folder: Path, load_format: str) -> list[Path]:
    """Return the files that vLLM loads of a folder; where it has an index, those that it names."""
    for pattern in _READ.get(load_format, ("*.safetensors", "*.gguf")):
        files = [file for file in sorted(folder.glob(pattern)) if file.name not in _OF_TRAINING]
        if files:
            kind = "consolidated" if pattern.startswith("consolidated") else "model"
            index = folder / f"{kind}.safetensors.index.json"
            if not pattern.endswith(".safetensors") or not index.exists():
                return files
            named = set(json.loads(index.read_text())["weight_map"].values())
            return [file for file in files if file.name in named]
    return []


def _pieces_of(file: Path) -> Iterator[StoredTensor]:
    if file.suffix == ".safetensors":
        yield from _of_safetensors(file)
    elif file.suffix == ".gguf":
        yield _whole(file)
    else:
        yield from _of_pickle(file)


def _of_safetensors(file: Path) -> Iterator[StoredTensor]:
    """Read the header: its length in 8 bytes, then JSON with each tensor's place."""
    with file.open("rb") as opened:
        [length] = struct.unpack("<Q", opened.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file.name}: a header of {length} bytes")
        header = json.loads(opened.read(length))
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    for name, told in header.items():
        begin, end = (8 + length + offset for offset in told["data_offsets"])
        yield StoredTensor(
            name,
            f"{_DTYPES.get(told['dtype'], told['dtype'])} {tuple(told['shape'])}",
            end - begin,
            partial(_slice, memory, begin),
        )


def _of_pickle(file: Path) -> Iterator[StoredTensor]:
    loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield StoredTensor(
                name,
                f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
                data.nbytes,
                partial(_slice, data.data, 0),
            )


def _whole(file: Path) -> StoredTensor:
    """A file of which we do not read the format."""
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return StoredTensor(file.name, file.suffix, len(memory), partial(_slice, memory, 0))


def _slice(memory: mmap.mmap | memoryview, begin: int, offset: int, nbytes: int) -> bytes:
    return bytes(memory[begin + offset : begin + offset + nbytes])


def _sample(piece: StoredTensor, nbytes: int) -> bytes:
    """Return a digest of a tensor's name, kind and some of its bytes."""
    told = f"{piece.name} {piece.kind} {piece.nbytes}".encode()
    places = hashlib.blake2b(told, digest_size=8 * NUM_PLACES).digest()
    digest = hashlib.blake2b(told, digest_size=16)
    room = max(1, piece.nbytes - nbytes + 1)
    for [place] in struct.iter_unpack("<Q", places):
        digest.update(piece.read(place % room, min(nbytes, piece.nbytes)))
    return digest.digest()


# As torch names what safetensors names by letters.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
