"""Two sets of weights have two names; one set has one, however it is kept."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from p2p_engine.connector import checkpoint, file_times
from p2p_engine.connector.checkpoint import fingerprint, name_of_checkpoint
from p2p_engine.connector.compat import release_name
from tests.support import eventually

Tensors = dict[str, torch.Tensor]


def weights(**changes: torch.Tensor) -> Tensors:
    """Of each dtype that checkpoints have, an empty and a scalar one among them."""
    generator = torch.Generator().manual_seed(7)
    made = {
        "embed": torch.randn(300, 64, generator=generator),
        "layers.0.weight": torch.randn(64, 64, generator=generator).bfloat16(),
        "layers.0.scale": torch.randn((), generator=generator).half(),
        "layers.1.weight": torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn),
        "layers.1.packed": torch.randint(0, 99, (8, 8), generator=generator, dtype=torch.int32),
        "nothing": torch.empty(0),
    }
    return {**made, **changes}


def in_one_file(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def in_shards(tensors: Tensors, folder: Path) -> None:
    for number, (name, tensor) in enumerate(reversed(tensors.items())):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")


def pickled(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def pickled_in_two(tensors: Tensors, folder: Path) -> None:
    for half in (0, 1):
        torch.save(dict(list(tensors.items())[half::2]), folder / f"pytorch_model-{half}.bin")


def beside_others(tensors: Tensors, folder: Path) -> None:
    """Files that vLLM does not load of such a folder."""
    in_one_file(tensors, folder)
    pickled({"other": torch.ones(3)}, folder)
    torch.save({}, folder / "training_args.bin")


def kept(tensors: Tensors, folder: Path, how: Callable[[Tensors, Path], None] = in_one_file) -> str:
    """The fingerprint of weights that are kept in some way."""
    folder.mkdir(exist_ok=True)
    how(tensors, folder)
    return fingerprint(folder)


@pytest.mark.parametrize("how", [in_shards, pickled, pickled_in_two, beside_others])
def test_one_set_of_weights_has_one_name_however_it_is_kept(
    how: Callable[[Tensors, Path], None], tmp_path: Path
) -> None:
    assert kept(weights(), tmp_path / "b", how) == kept(weights(), tmp_path / "a")


@pytest.mark.parametrize("name", [name for name, each in weights().items() if each.numel()])
def test_each_tensor_counts(name: str, tmp_path: Path) -> None:
    before, tensor = kept(weights(), tmp_path / "a"), weights()[name]
    other = (tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)) ^ 1
    changed = other.view(tensor.dtype).reshape(tensor.shape)
    assert kept(weights(**{name: changed}), tmp_path / "b") != before


def written_over(place: Path, other: Path) -> Path:
    file = place / "run" / "step-1" / "model.safetensors"
    file.write_bytes((other / file.name).read_bytes())
    return file


def another_file(place: Path, other: Path) -> Path:
    return (other / "model.safetensors").replace(place / "run" / "step-1" / "model.safetensors")


def another_folder(place: Path, other: Path) -> Path:
    folder = place / "run" / "step-1"
    folder.replace(place / "aside")
    return other.replace(folder)


def another_link(place: Path, other: Path) -> Path:
    return link(place / "latest", other)


def another_link_behind_a_link(place: Path, other: Path) -> Path:
    return link(place / "current", other.parent)


def link(path: Path, to: Path) -> Path:
    """Make or replace a link, as trainers do."""
    made = path.with_suffix(".new")
    made.symlink_to(to)
    return made.replace(path)


def begin_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM begin, and the clock of files go on."""
    clock = folder / "clock"
    clock.touch()
    began = clock.stat().st_ctime
    monkeypatch.setattr(file_times, "_process_began", lambda _: began)

    def has_gone_on() -> bool:
        clock.touch()
        return clock.stat().st_ctime > began

    eventually(has_gone_on)


@pytest.mark.parametrize(
    "change",
    [written_over, another_file, another_folder, another_link, another_link_behind_a_link],
)
def test_what_changes_while_vllm_starts_has_no_name(
    change: Callable[[Path, Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody knows which of both vLLM has loaded."""
    other = tmp_path / "other" / "step-1"
    other.parent.mkdir()
    kept(weights(embed=torch.ones(300, 64)), other)
    (tmp_path / "run").mkdir()
    before = kept(weights(), tmp_path / "run" / "step-1")
    link(tmp_path / "current", Path("run"))
    told = config(link(tmp_path / "latest", Path("current/step-1")))
    begin_now(tmp_path, monkeypatch)
    assert name_of_checkpoint(told) == f"checkpoint-{before}"
    changed = change(tmp_path, other)
    names = {name_of_checkpoint(told) for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("unknown-") for name in names)
    assert f"changed_during_start={changed}" in caplog.text


def a_folder_inside(folder: Path) -> None:
    """A trainer's next checkpoint, or what vLLM writes by itself with `npcache`."""
    (folder / "checkpoint-500").mkdir()
    kept(weights(embed=torch.ones(300, 64)), folder / "checkpoint-500")


def a_file_beside(folder: Path) -> None:
    (folder / "notes.txt").touch()


def no_file_beside(folder: Path) -> None:
    (folder / "training_args.bin").unlink()


@pytest.mark.parametrize("change", [a_folder_inside, a_file_beside, no_file_beside])
def test_what_changes_beside_the_weights_while_vllm_starts_does_not_count(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept(weights(), tmp_path / "model", beside_others)
    begin_now(tmp_path, monkeypatch)
    change(tmp_path / "model")
    assert name_of_checkpoint(config(tmp_path / "model")) == f"checkpoint-{before}"


def test_what_vllm_itself_fetches_while_it_starts_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each revision has its folder in the hub's cache."""
    folder = tmp_path / "models--tiny--llama" / "snapshots" / "0123"
    folder.parent.mkdir(parents=True)
    fetched = kept(weights(), folder)
    monkeypatch.setattr(file_times, "_process_began", lambda _: 0.0)
    assert name_of_checkpoint(config(folder)) == f"checkpoint-{fetched}"


STARTS = """
import multiprocessing, os, sys
from setproctitle import setproctitle
from p2p_engine.connector import file_times

def ask(names, said):
    setproctitle(f"VLLM::{names[0]}")
    if len(names) > 1:
        run(names[1:], said)
    else:
        front_end = file_times._front_end()
        began = [file_times._process_began(each) for each in (front_end, os.getpid())]
        said.put((front_end, *began))

def run(names, said):
    child = multiprocessing.get_context("fork").Process(target=ask, args=(names, said))
    child.start()
    child.join()

said = multiprocessing.get_context("fork").SimpleQueue()
run(sys.argv[1:], said)
print(os.getpid(), *said.get())
"""


@pytest.mark.parametrize(
    ("names", "is_found"),
    [
        (["EngineCore"], True),
        (["EngineCore_DP1", "Worker_TP1"], True),
        (["APIServer_DP1"], False),
        (["a trainer's"], False),
    ],
)
def test_what_the_front_end_reads_counts_from_its_own_start(
    names: list[str], is_found: bool
) -> None:
    """In the engine core and in its workers; not from that of a supervisor, nor of a trainer whose
    child runs a core."""
    core = inspect.getsource(EngineCoreProc.run_engine_core)
    worker = inspect.getsource(WorkerProc.setup_proc_title_and_log_prefix)
    assert '"EngineCore"' in core
    assert 'set_process_title(name="Worker")' in worker
    done = subprocess.run(
        [sys.executable, "-c", STARTS, *names], capture_output=True, text=True, check=True
    )
    parent, front_end, front_end_began, began = map(float, done.stdout.split())
    assert (front_end == parent) is is_found
    assert front_end_began < began + 0.1
    assert abs(began - psutil.Process().create_time()) < 3600.0


def test_names_kinds_and_shapes_count(tmp_path: Path) -> None:
    plain, embed = weights(), weights()["embed"]
    others: list[Tensors] = [
        {**plain, "embed": embed.reshape(64, 300)},
        {**plain, "embed": embed.view(torch.int32)},
        {**plain, "one more": torch.zeros(1)},
        {name: each for name, each in plain.items() if name != "nothing"},
        {name.replace("layers.0", "layers.2"): each for name, each in plain.items()},
    ]
    found = [kept(each, tmp_path / f"{number}") for number, each in enumerate([plain, *others])]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("many", "places"), [(50, checkpoint.NUM_PLACES), (49, 1)])
def test_of_many_tensors_little_is_read(
    many: int, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAMPLED_BYTES", 1 << 9)
    monkeypatch.setattr(checkpoint, "MANY_TENSORS", many)
    kept({f"{number}": torch.randn(1000) for number in range(50)}, tmp_path)
    read: list[int] = []
    honest = os.pread

    def counted(file: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return honest(file, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    fingerprint(tmp_path)
    assert read == 50 * places * [checkpoint.LEAST_BYTES]


def test_a_file_that_is_cut_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_one_file(weights(), tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert name_of_checkpoint(config(tmp_path)).startswith("named-")
    assert f"{file}: {file.stat().st_size} bytes, but " in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_file_that_is_cut_while_it_is_sampled_ends_no_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    save_file(weights(), file)
    honest = checkpoint._sample

    def late(*given: Any) -> bytes:
        os.truncate(file, 100)
        return honest(*given)

    monkeypatch.setattr(checkpoint, "_sample", late)
    with pytest.raises(ValueError, match=f"{name}: ends before "):
        fingerprint(tmp_path)


def test_sampling_that_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_one_file(weights(), tmp_path)
    caplog.set_level("INFO")
    name_of_checkpoint(config(tmp_path))
    assert "sampled" not in caplog.text
    clock = itertools.chain([0], itertools.repeat(7))
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=clock.__next__))
    name_of_checkpoint(config(tmp_path))
    assert f"the weights are sampled: model={tmp_path} seconds=7.0" in caplog.text


def test_many_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each read is a wait, they wait together."""
    expected = kept({f"{number}": torch.randn(9) for number in range(8)}, tmp_path)
    together, honest = threading.Barrier(8), os.pread

    def awaited(*given: int) -> bytes:
        together.wait(timeout=30)
        return honest(*given)

    monkeypatch.setattr(os, "pread", awaited)
    assert fingerprint(tmp_path) == expected


@pytest.mark.parametrize("reads", [0, 3])
def test_what_cannot_be_read_in_time_is_named_by_its_owner(
    reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_one_file(weights(), tmp_path)
    honest, is_over, left = os.pread, threading.Event(), itertools.count(reads, -1)

    def stuck(*given: int) -> bytes:
        if next(left) <= 0:
            is_over.wait()
        return honest(*given)

    monkeypatch.setattr(os, "pread", stuck)
    monkeypatch.setattr(checkpoint, "SAMPLE_SECONDS", 0.2)
    try:
        name = name_of_checkpoint(config(tmp_path))
    finally:
        is_over.set()
    assert name.startswith("named-")
    assert "reason=TimeoutError: reading takes longer than 0.2 s" in caplog.text


def test_no_part_counts_as_the_whole_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_file(weights(), tmp_path)
    clock = itertools.chain(itertools.repeat(0, 4), itertools.repeat(61))
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=clock.__next__))
    with pytest.raises(TimeoutError, match="reading takes longer than 60 s"):
        fingerprint(tmp_path)


def config(
    model: Path | str,
    load_format: str = "auto",
    download_dir: str | None = None,
    extra: dict[str, Any] | None = None,
    is_transformers: bool = False,
    ids: dict[str, Any] | None = None,
    **split: Any,
) -> Any:
    """As much of vLLM's configuration as is looked at."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), model_weights="", revision=None,
            using_transformers_backend=lambda: is_transformers,
            hf_config=SimpleNamespace(**(ids or {})),
        ),
        load_config=SimpleNamespace(
            load_format=load_format, download_dir=download_dir,
            model_loader_extra_config=extra or {},
        ),
        parallel_config=SimpleNamespace(**{
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
            "prefill_context_parallel_size": 1, "enable_expert_parallel": False,
            "eplb_config": SimpleNamespace(num_redundant_experts=0), **split,
        }),
    )  # fmt: skip


@pytest.mark.parametrize(
    "load_format", ["auto", "safetensors", "runai_streamer", "fastsafetensors"]
)
def test_the_loader_does_not_matter(load_format: str, tmp_path: Path) -> None:
    in_one_file(weights(), tmp_path)
    name = name_of_checkpoint(config(tmp_path, load_format))
    assert name == f"checkpoint-{fingerprint(tmp_path)}"


# What each loader reads of a folder that has all of these: DefaultModelLoader._prepare_weights.
READ = {
    "auto": "consolidated.safetensors",
    "mistral": "consolidated.safetensors",
    "hf": "model.safetensors",
    "safetensors": "model.safetensors",
    "npcache": "pytorch_model.bin",
    "pt": "model.pt",
}


@pytest.mark.parametrize("load_format", READ)
def test_what_a_loader_reads_beside_other_files_is_named(load_format: str, tmp_path: Path) -> None:
    """Each file has other weights; an index says that model.safetensors is all of them."""
    expected = {}
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for number, file in enumerate(dict.fromkeys(READ.values())):
        tensors, alone = {"weight": torch.full((9, 9), number)}, tmp_path / file
        alone.mkdir()
        for folder in (alone, mixed):
            save = save_file if file.endswith(".safetensors") else torch.save
            save(tensors, folder / file)
        expected[file] = name_of_checkpoint(config(alone, "auto"))
    index = {"weight_map": {"weight": "model.safetensors"}}
    (mixed / "model.safetensors.index.json").write_text(json.dumps(index))
    (mixed / "optimizer.pt").write_bytes(b"of training")
    assert len(set(expected.values())) == len(expected)
    assert name_of_checkpoint(config(mixed, load_format)) == expected[READ[load_format]]


def test_weights_are_looked_for_where_they_were_downloaded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder may have another revision under the same name."""
    names = []
    for number, cache in enumerate(("usual", "told")):
        repository = tmp_path / cache / "models--tiny--llama"
        folder = repository / "snapshots" / (40 * str(number))
        folder.mkdir(parents=True)
        save_file({"weight": torch.full((9, 9), number)}, folder / "model.safetensors")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(folder.name)
        names.append(name_of_checkpoint(config(folder)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    found = [
        name_of_checkpoint(config("tiny/llama", download_dir=folder))
        for folder in (None, str(tmp_path / "told"))
    ]
    assert found == names
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert name_of_checkpoint(config("tiny/llama")).startswith("named-")  # ModelScope has its own
    given = next((tmp_path / "told").glob("*/snapshots/*"))
    assert name_of_checkpoint(config(given)) == names[-1]


@pytest.mark.parametrize("where", ["text_model_id", "whisper-large-v3", "audio_tokenizer"])
def test_weights_that_a_model_loads_besides_count(where: str, tmp_path: Path) -> None:
    """By another model's id (Ultravox), or in a folder of its own (Kimi-Audio, MiMo-Audio)."""
    model, by_id = tmp_path / "model", where.endswith("_id")
    kept(weights(), model)
    other = tmp_path / "other" if by_id else model / where
    told = config(model, ids={"text_model_id": str(other), "audio_model_id": None} if by_id else {})
    names = [name_of_checkpoint(config(model)), name_of_checkpoint(told)]
    assert names[1].startswith("named-" if by_id else "checkpoint-")  # it is not there
    for number in range(2):
        kept({"weight": torch.full((9, 9), number)}, other)
        names.append(name_of_checkpoint(told))
        assert names[-1].startswith(f"checkpoint-{fingerprint(model)}-")
    assert len(set(names)) == 3 + by_id
    moved = other.rename(other.with_name("moved"))
    if by_id:
        assert name_of_checkpoint(config(model, ids={"text_model_id": str(moved)})) == names[-1]
    else:
        assert name_of_checkpoint(config(model)) == names[0]


def test_a_file_that_a_model_loads_in_place_of_the_others_counts(tmp_path: Path) -> None:
    in_one_file(weights(), tmp_path)
    names = set[str]()
    for content in (b"one", b"two"):
        (tmp_path / "model.gguf").write_bytes(content)
        names.add(name_of_checkpoint(config(tmp_path, ids={"model_type": "flint"})))
        assert name_of_checkpoint(config(tmp_path)) == f"checkpoint-{fingerprint(tmp_path)}"
    assert len(names) == 2


def test_made_up_weights_are_no_checkpoint(tmp_path: Path) -> None:
    """vLLM draws each rank's part of a tensor from the same seed, so they differ by the split."""
    in_one_file(weights(), tmp_path)
    names = [
        name_of_checkpoint(config(tmp_path, "dummy", **changes))
        for changes in (
            {},
            {"tensor_parallel_size": 2},
            {"data_parallel_size": 2},
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            {"is_transformers": True},
        )
    ]
    release = release_name()  # each has its own way to fill some tensors
    assert [name.removeprefix(f"dummy-{release}-") for name in names] == [
        "1x1", "2x1", "1x1-dp2", "1x1-dp2-ep0", "1x1-transformers",
    ]  # fmt: skip


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "sharded_state", "my_loader"])
def test_of_a_loader_that_may_read_elsewhere_its_options_count(
    load_format: str, tmp_path: Path
) -> None:
    """And what is in the folder, where it reads perhaps."""
    in_one_file(weights(), tmp_path)
    told = [
        config(tmp_path, load_format),
        config(tmp_path, load_format, extra={"uri": "s3://bucket/step-1"}),
        config(tmp_path, load_format, extra={"uri": "s3://bucket/step-2"}),
        config("elsewhere", load_format),
    ]
    names = [name_of_checkpoint(each) for each in told]
    assert all(name.startswith("named-") for name in names)
    assert [name_of_checkpoint(each) for each in told] == names
    in_one_file(weights(embed=torch.ones(300, 64)), tmp_path)
    names.append(name_of_checkpoint(told[0]))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "content", [b"", b"short", struct.pack("<Q", 1 << 40), struct.pack("<Q", 9) + b"no header"],
    ids=["empty", "short", "a long header", "no header"],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_its_owner(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    name = name_of_checkpoint(config(tmp_path))
    assert name.startswith("named-")
    assert name == name_of_checkpoint(config(tmp_path))
    assert name != name_of_checkpoint(config("s3://bucket/model", "runai_streamer"))
    assert "the weights cannot be sampled" in caplog.text


def of_a_trainer(folder: Path) -> None:
    torch.save({"rng": random.Random(1)}, folder / "rng_state.pt")


def of_something_else(folder: Path) -> None:
    (folder / "vocab.bin").write_bytes(b"hello world\n" * 50)


def with_a_listed_index(folder: Path) -> None:
    in_one_file(weights(), folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def with_a_listed_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


def with_sparse_tensors(folder: Path) -> None:
    torch.save({"weight": torch.eye(3).to_sparse()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "what",
    [of_a_trainer, of_something_else, with_a_listed_index, with_a_listed_header,
     with_sparse_tensors],
)  # fmt: skip
@pytest.mark.parametrize("load_format", ["auto", "modelexpress"])
def test_no_file_ends_the_start(
    what: Callable[[Path], None], load_format: str, tmp_path: Path
) -> None:
    what(tmp_path)
    assert name_of_checkpoint(config(tmp_path, load_format)).startswith("named-")


def test_a_single_file_is_sampled_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 64)
    before = fingerprint(file)
    assert before == fingerprint(tmp_path)
    file.write_bytes(bytes(range(1, 256)) * 64 + bytes(64))
    assert fingerprint(file) != before
