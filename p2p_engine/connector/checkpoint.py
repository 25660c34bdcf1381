"""A checkpoint's fingerprint: what tells two sets of weights apart without reading them again.

Names, types and shapes of all tensors, and a sample of each tensor's bytes at places that its name
decides. So it does not matter how tensors are spread over files, where the files are, or which
loader reads them. It is a matter of probability: weights that differ only where no sample was taken
look alike (docs/weights.md says how likely that is).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import torch

from p2p_engine.connector.compat import release_name
from p2p_engine.connector.file_times import changed_since_start
from p2p_engine.errors import named
from p2p_engine.wire.bindings import no_name

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

Given = TypeVar("Given")
Found = TypeVar("Found")
logger = logging.getLogger(__name__)

NUM_PLACES = 4  # in each tensor
MANY_TENSORS = 4096  # above, one place in each: where files are far away, each place takes a while
SAMPLED_BYTES = 256 << 10  # of all tensors together, if each gets at least
LEAST_BYTES = 16  # at each place
NUM_READERS = 64  # at once: where files are far away, a read is a wait
SAMPLE_SECONDS = 60
MAX_HEADER_BYTES = 100 << 20  # as safetensors allows
# What vLLM loads of a model's folder, by load format, in each of its releases: the first of these
# of which there are files. Any other format may read elsewhere.
_HF = ("*.safetensors", "*.bin", "*.pt")
_READ = {
    "auto": ("consolidated*.safetensors", *_HF, "*.gguf"),
    "hf": _HF,
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    **dict.fromkeys(
        ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
        ("*.safetensors", "*.gguf"),
    ),
}
# Folders in a model's own of which some of vLLM's models load weights, too: Kimi-Audio, MiMo-Audio.
_INNER = ("whisper-large-v3", "audio_tokenizer")
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. `read(offset, nbytes)` returns bytes of its contiguous form."""

    name: str
    kind: str  # dtype and shape
    nbytes: int
    read: Callable[[int, int], bytes]


def name_of_checkpoint(vllm_config: VllmConfig, draft: ModelConfig | None = None) -> str:
    """Return a name for the weights that vLLM loads at start, the same for the same weights; or for
    those of a draft with a checkpoint of its own. If files have changed since this process began,
    vLLM may have loaded others, and the name is one from `no_name`.

    Reads at most some hundred KiB, or LEAST_BYTES at each place if there are many tensors. Blocks
    for at most SAMPLE_SECONDS. What cannot be read in that time, or at all, has a name, too.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if draft is not None:
        told = getattr(vllm_config.speculative_config, "draft_load_config", None)
        model, load = draft, told or load
    if load.load_format == "dummy":
        return _drawn(vllm_config.parallel_config, model)
    start, found = time.monotonic(), list[str]()
    deadline = start + SAMPLE_SECONDS
    try:
        for folder in _folders_of(model, load.download_dir):
            found.append(fingerprint(folder, str(load.load_format), deadline - time.monotonic()))
            if changed := changed_since_start(_told_by(folder, str(load.load_format))):
                logger.warning(
                    "the weights have no name, %s: model=%s changed_during_start=%s",
                    "label them" if draft is None else "start this instance again",
                    model.model, changed,
                )  # fmt: skip
                return no_name()
        if load.load_format not in _READ:
            raise LookupError(f"load format {load.load_format} may read elsewhere")
    except Exception as error:  # noqa: BLE001 - of whatever lies in a folder, and its reader raises
        return _named_by(model, load, "-".join(found), named(error))
    seconds = time.monotonic() - start
    if seconds > 1:
        logger.info("the weights are sampled: model=%s seconds=%.1f", model.model, seconds)
    return f"checkpoint-{'-'.join(found)}"


def _drawn(parallel: Any, model: ModelConfig) -> str:
    """Name dummy weights. vLLM draws each part of a tensor from one seed, so another split makes
    other weights; so do other tensors, which the implementation of transformers has, and another
    release, which fills some tensors otherwise."""
    split = f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
    name = f"dummy-{release_name()}-{split}"
    # Experts are split over all of these ranks, by tensor or by expert.
    ranks = parallel.data_parallel_size * parallel.prefill_context_parallel_size
    if ranks > 1:
        name += f"-dp{ranks}"
    if parallel.enable_expert_parallel:
        name += f"-ep{parallel.eplb_config.num_redundant_experts}"
    return f"{name}-transformers" if model.using_transformers_backend() else name


def _named_by(model: ModelConfig, load: Any, found: str, reason: str) -> str:
    """Name weights that cannot be sampled by all that says where they come from, and by what was
    found in the model's folder."""
    place = model.model_weights or model.model
    logger.warning(
        "the weights cannot be sampled, peers must name them alike: "
        "load_format=%s model=%r reason=%s",
        load.load_format, place, reason,
    )  # fmt: skip
    told = [load.load_format, place, model.revision, load.model_loader_extra_config, found]
    text = json.dumps(told, sort_keys=True, default=str)
    return f"named-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def fingerprint(folder: Path, load_format: str = "auto", seconds: float = SAMPLE_SECONDS) -> str:
    """Return the fingerprint of a folder's weights, or of one file's, as 16 hexadecimal digits.

    Raises:
        OSError: a file cannot be read.
        TimeoutError: that takes longer than `seconds`.
        ValueError: there are no weights, or a file is not of its format.
        Exception: a file is not what its name says.
    """
    deadline = time.monotonic() + seconds
    # Not in a `with`: a read that takes long would be waited for.
    readers = futures.ThreadPoolExecutor(NUM_READERS, "p2p-sample")
    with ExitStack() as opened:
        opened.callback(readers.shutdown, wait=False, cancel_futures=True)
        files = [folder] if folder.is_file() else _files_in(folder, load_format)
        pieces = _gather(readers, partial(_pieces_of, opened), files, deadline)
        if not pieces:
            raise ValueError(f"no weights in {folder}")
        num_places = NUM_PLACES if len(pieces) <= MANY_TENSORS else 1
        nbytes = max(LEAST_BYTES, SAMPLED_BYTES // (num_places * len(pieces)))
        sample = partial(_samples, num_places=num_places, nbytes=nbytes, deadline=deadline)
        shares = [pieces[reader::NUM_READERS] for reader in range(NUM_READERS)]
        samples = sorted(_gather(readers, sample, shares, deadline))
    return hashlib.blake2b(b"".join(samples), digest_size=8).hexdigest()


def _gather(
    readers: futures.Executor,
    call: Callable[[Given], list[Found]],
    items: Iterable[Given],
    deadline: float,
) -> list[Found]:
    """Return what a call finds in all items, which are read at once.

    Raises:
        TimeoutError: the deadline has passed.
    """
    seconds = max(0.0, deadline - time.monotonic())
    try:
        return [each for found in readers.map(call, items, timeout=seconds) for each in found]
    except futures.TimeoutError:  # before Python 3.11 another one than the built-in
        raise TimeoutError(f"reading takes longer than {SAMPLE_SECONDS} s") from None


def _folders_of(model: ModelConfig, cache: str | None) -> Iterator[Path]:
    """Yield where weights are that vLLM loads: the model's, and what it loads besides: from a
    folder inside, from other models by their ids (Ultravox), which vLLM takes at no revision, or
    from a file in place of the others (Flint)."""
    own = _folder_of(model.model, model.revision, cache)
    yield own
    yield from (own / name for name in _INNER if (own / name).is_dir())
    if getattr(model.hf_config, "model_type", "") == "flint":
        yield from sorted(own.glob("*.gguf"))
    for name, place in sorted(vars(model.hf_config).items()):
        if name.endswith("_model_id") and isinstance(place, str):
            yield _folder_of(place, None, cache)


def _folder_of(model: str, revision: str | None, cache: str | None) -> Path:
    """Return where the weights are: vLLM has fetched them by now."""
    from huggingface_hub import snapshot_download
    from vllm import envs

    if Path(model).exists():
        return Path(model)
    if envs.VLLM_USE_MODELSCOPE:
        raise LookupError("ModelScope has fetched them")

    found = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    return Path(found)


def _files_in(folder: Path, load_format: str) -> list[Path]:
    """Return the files that vLLM loads of a folder; where it has an index, those that it names."""
    for pattern in _READ.get(load_format, _HF):
        files = [file for file in sorted(folder.glob(pattern)) if file.name not in _OF_TRAINING]
        if files:
            kind = "consolidated" if pattern.startswith("consolidated") else "model"
            index = folder / f"{kind}.safetensors.index.json"
            if not pattern.endswith(".safetensors") or not index.exists():
                return files
            named = set(json.loads(index.read_text())["weight_map"].values())
            return [file for file in files if file.name in named]
    return []


def _told_by(folder: Path, load_format: str) -> list[Path]:
    """Return what a fingerprint is made of: a folder, or a file, and what vLLM loads in it."""
    return [folder, *_files_in(folder, load_format), *folder.glob("*.index.json")]


def _pieces_of(opened: ExitStack, file: Path) -> list[StoredTensor]:
    """Return a file's tensors; `opened` closes what they are read from."""
    if file.suffix in (".bin", ".pt"):
        return list(_of_pickle(file))
    stream = opened.enter_context(file.open("rb"))
    return list(_of_safetensors(stream)) if file.suffix == ".safetensors" else [_whole(stream)]


def _of_safetensors(file: BinaryIO) -> Iterator[StoredTensor]:
    """Read the header: its length in 8 bytes, then JSON with each tensor's place."""
    [length] = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{file.name}: a header of {length} bytes")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    size = _size_without_readahead(file)
    for name, told in header.items():
        begin, end = (8 + length + offset for offset in told["data_offsets"])
        if end > size:
            raise ValueError(f"{file.name}: {size} bytes, but {name} ends at {end}")
        yield StoredTensor(
            name,
            f"{_DTYPES.get(told['dtype'], told['dtype'])} {tuple(told['shape'])}",
            end - begin,
            partial(_read, file, begin),
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
                partial(_slice, data.data),
            )


def _whole(file: BinaryIO) -> StoredTensor:
    """A file of which we do not read the format."""
    path = Path(file.name)
    return StoredTensor(
        path.name, path.suffix, _size_without_readahead(file), partial(_read, file, 0)
    )


def _size_without_readahead(file: BinaryIO) -> int:
    """Return a file's size; from now on the kernel reads what is asked for and no more."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return os.fstat(file.fileno()).st_size


def _read(file: BinaryIO, begin: int, offset: int, nbytes: int) -> bytes:
    # Not by a memory map: if somebody cuts the file now, that ends the process.
    found = os.pread(file.fileno(), nbytes, begin + offset)
    if len(found) < nbytes:
        raise ValueError(f"{file.name}: ends before {begin + offset + nbytes}")
    return found


def _slice(memory: memoryview, offset: int, nbytes: int) -> bytes:
    return bytes(memory[offset : offset + nbytes])


def _samples(
    pieces: list[StoredTensor], num_places: int, nbytes: int, deadline: float
) -> list[bytes]:
    """Return a digest of each tensor. Past the deadline nobody waits for them."""
    samples = []
    for piece in pieces:
        if time.monotonic() > deadline:
            raise futures.TimeoutError
        samples.append(_sample(piece, num_places, nbytes))
    return samples


def _sample(piece: StoredTensor, num_places: int, nbytes: int) -> bytes:
    """Return a digest of a tensor's name, kind and some of its bytes."""
    told = f"{piece.name} {piece.kind} {piece.nbytes}".encode()
    places = hashlib.blake2b(told, digest_size=8 * num_places).digest()
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
