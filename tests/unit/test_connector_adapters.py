"""LoRA adapters that change under their names: vLLM's own routes load them, and the scheduler half
sees of each request what it needs to send nothing wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.entrypoints.openai.models import serving
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora import utils as lora_utils
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from p2p_engine.config import SendMode
from p2p_engine.connector import adapters
from p2p_engine.connector.intent import ThisInstance
from p2p_engine.connector.scheduler import SchedulerHalf
from p2p_engine.connector.weights import Weights, hear_of_weights
from tests.vllm.adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NAME = "ada"
SEND = {"do_remote_decode": True, "transfer_id": "t", "remote_host": "d", "remote_port": 2}
LOAD = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "p", "remote_port": 3}


class AdapterSide:
    """One instance: vLLM's routes for adapters, its engine core's call, and our scheduler half."""

    def __init__(self, params: dict[str, Any], folder: Path) -> None:
        hear_of_weights()
        self.params, self.folder = params, folder
        self.core: Any = object.__new__(EngineCore)
        self.core.model_executor = SimpleNamespace(add_lora=lambda request: True)
        client: Any = SimpleNamespace(
            model_config=None, renderer=None, input_processor=None, add_lora=self._add
        )
        self.models = serving.OpenAIServingModels(client, [])
        instance = ThisInstance("kv_both", "[::1]:1", SendMode.PUT_ASYNC, has_random_ids=True)
        self.weights = Weights("checkpoint", reset_keeps_weights=True)
        self.half = SchedulerHalf(instance, self.weights, [], tp_size=1)
        self.pool = BlockPool(num_gpu_blocks=2, enable_caching=True, hash_block_size=16)
        self.half.bind_pool(self.pool)
        connector = SimpleNamespace(
            weights_labelled=self.half.weights_labelled, adapter_loaded=self.half.adapter_loaded
        )
        scheduler: Any = SimpleNamespace(get_kv_connector=lambda: connector)
        self.core.scheduler = scheduler

    async def _add(self, request: LoRARequest) -> bool:
        return bool(self.core.add_lora(_over_the_wire(request, LoRARequest)))

    def write(self, seed: int, source: Path) -> None:
        """Write the files of one of the adapters over those that are there."""
        made = source / f"{seed}"
        if not made.exists():
            make_adapter(made, seed)
        shutil.copytree(made, self.folder, dirs_exist_ok=True, copy_function=shutil.copyfile)

    def load(self, *, in_place: bool = False) -> None:
        """vLLM's route."""
        request = LoadLoRAAdapterRequest(
            lora_name=NAME, lora_path=str(self.folder), load_inplace=in_place
        )
        answer = asyncio.run(self.models.load_lora_adapter(request))
        assert str(answer).startswith("Success"), answer

    def forget_the_flag(self) -> None:
        """vLLM 0.33 does so when it has loaded an adapter in place."""
        self.models.lora_requests[NAME].load_inplace = False

    def unload(self) -> None:
        """vLLM's route."""
        asyncio.run(self.models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=NAME)))

    def ask(self) -> bytes | None:
        """Ask for the adapter, as vLLM's front end passes it on; returns the binding under which
        its KV is sent or loaded, None if it has no part in a transfer."""
        request = Request.from_engine_core_request(
            _over_the_wire(
                _request(self.params, self.models.lora_requests[NAME]), EngineCoreRequest
            ),
            None,
        )
        self.half.on_new_request(request)
        parts: dict[str, Any] = {**self.half._sending, **self.half._loading}
        self.half._sending.clear()
        self.half._loading.clear()
        return parts[request.request_id].party.binding if parts else None


def _request(params: dict[str, Any], adapter: LoRARequest) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=list(range(40)), mm_features=None,
        sampling_params=sampling, pooling_params=None, arrival_time=0.0, lora_request=adapter,
        cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def _over_the_wire(item: Any, kind: Any) -> Any:
    """As it crosses from vLLM's front end to its engine core."""
    return MsgpackDecoder(kind).decode(MsgpackEncoder().encode(item))


Adapted = tuple[AdapterSide, AdapterSide, Callable[..., None]]


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOOK_SECONDS", 0.0)


@pytest.fixture
def sides(tmp_path: Path) -> Adapted:
    """Prefill and decode, each with its own copy of the files, and how to write one of them."""
    p, d = AdapterSide(SEND, tmp_path / "p"), AdapterSide(LOAD, tmp_path / "d")

    def write(seed: int, *which: AdapterSide) -> None:
        for side in which or (p, d):
            side.write(seed, tmp_path / "made")

    write(0)
    p.load()
    d.load()
    return p, d, write


def test_the_same_adapter_at_two_places_pairs(sides: Adapted) -> None:
    p, d, _ = sides
    assert p.ask() == d.ask() is not None


@pytest.mark.parametrize("was_asked_before", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_an_adapter_that_was_loaded_again_is_another_one(
    sides: Adapted, which: int, was_asked_before: bool
) -> None:
    """Unloaded, and loaded under its name and path with other files; first on one side only. vLLM
    takes KV of the old ones from its cache then, until it is reset."""
    *both, write = sides
    changed, other = both[which], both[1 - which]
    before = changed.ask() if was_asked_before else None
    changed.unload()
    write(1, changed)
    changed.load()
    if was_asked_before:
        assert changed.ask() is None
        changed.pool.reset_prefix_cache()
    after = changed.ask()
    assert after not in (None, before, other.ask())
    other.unload()
    write(1, other)
    other.load()
    assert other.ask() is None
    other.pool.reset_prefix_cache()
    assert other.ask() == after


def test_what_was_in_between_is_not_forgotten(sides: Adapted) -> None:
    """The first files again: vLLM's cache has KV of the second ones, too."""
    p, _, write = sides
    for seed, is_sent in ((0, True), (1, False), (0, False)):
        p.unload()
        write(seed, p)
        p.load()
        assert (p.ask() is not None) is is_sent
    p.pool.get_new_blocks(1)
    assert not p.pool.reset_prefix_cache()  # vLLM's cache is as it was
    assert p.ask() is None


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_one_that_was_loaded_in_place_has_no_part(
    sides: Adapted, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM replaces it under its number, and caches on as if it were the same. Up to 0.32 it reads
    the files again for each request then."""
    caplog.set_level(logging.INFO, "p2p_engine")
    *both, write = sides
    changed, other = both[which], both[1 - which]
    before = other.ask()
    changed.ask()
    write(1, changed)
    changed.load(in_place=True)
    assert not changed.weights.is_known  # what waits was to have the other one
    changed.half.weights_labelled("default")
    changed.models.lora_requests[NAME].load_inplace = True
    assert changed.ask() is None
    assert "the adapter 'ada' was loaded in place of another one" in caplog.text
    changed.forget_the_flag()
    assert changed.ask() is None
    changed.pool.reset_prefix_cache()
    assert changed.ask() not in (None, before)
    assert other.ask() == before


def test_the_same_files_in_place_change_nothing(sides: Adapted) -> None:
    p, d, _ = sides
    p.load(in_place=True)
    p.forget_the_flag()
    assert p.weights.is_known
    assert p.ask() == d.ask() is not None


def test_loaded_again_under_its_number_it_may_be_the_old_one(
    sides: Adapted, caplog: pytest.LogCaptureFixture
) -> None:
    """Another API server's call: vLLM's workers have an adapter of this number, and keep it."""
    caplog.set_level(logging.INFO, "p2p_engine")
    p, _, write = sides
    write(1, p)
    p.core.add_lora(p.models.lora_requests[NAME])
    p.half.weights_labelled("default")
    assert p.ask() is None
    assert "the adapter 'ada' has other files than were loaded" in caplog.text


@pytest.mark.parametrize("was_asked_before", [False, True])
@pytest.mark.parametrize("how", ["written over", "replaced"])
def test_one_whose_files_changed_without_a_word_has_no_part(
    sides: Adapted, how: str, was_asked_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers may have the old weights, or may have loaded the new ones since. It is known
    from when vLLM loaded them, not from when they were first asked for."""
    caplog.set_level(logging.INFO, "p2p_engine")
    p, d, write = sides
    if was_asked_before:
        assert p.ask() is not None
    file = p.folder / "adapter_model.safetensors"
    if how == "replaced":
        file.unlink()
    write(1, p)
    assert p.ask() is None
    assert "the adapter 'ada' has other files than were loaded" in caplog.text
    assert d.ask() is not None
    p.unload()
    p.load()  # says which files count
    p.pool.reset_prefix_cache()
    assert p.ask() not in (None, d.ask())


def test_files_are_looked_at_once_in_a_while(
    sides: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only those that vLLM reads."""
    p, _, write = sides
    now = [p.half._adapters._clock()]
    monkeypatch.setattr(adapters, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(p.half._adapters, "_clock", lambda: now[0])
    assert p.ask() is not None
    write(1, p)
    assert p.ask() is not None
    now[0] += 1.0
    assert p.ask() is None


class Sampler:
    """What a trainer pickles, and nobody may load."""


def has_no_settings(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def has_odd_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[1]")


def has_no_rank(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 0, "lora_alpha": 1, "target_modules": []}')


def has_no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def is_gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "what", [has_no_settings, has_odd_settings, has_no_rank, has_no_weights, is_gone]
)
def test_one_that_cannot_be_read_has_no_part(
    sides: Adapted, what: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands at its path, requests go on; vLLM's workers may be on other machines."""
    caplog.set_level(logging.INFO, "p2p_engine")
    p, d, _ = sides
    p.unload()
    what(p.folder)
    p.load()
    assert p.ask() is None
    assert "the adapter 'ada' cannot be read: " in caplog.text
    p.params = {}
    assert p.ask() is None
    assert d.ask() is not None


def test_only_what_vllm_reads_counts(sides: Adapted) -> None:
    """Trainers leave other files beside an adapter, and base models are shipped with one."""
    p, d, _ = sides
    p.unload()
    torch.save(Sampler(), p.folder / "sampler.bin")
    torch.save(Sampler(), p.folder / "adapter_model.bin")  # vLLM takes the other one
    (p.folder / "model.safetensors.index.json").write_text("{}")
    settings = json.loads((p.folder / "adapter_config.json").read_text())
    told = {"base_model_name_or_path": "/home/me", "target_modules": ["v_proj"], "rank_pattern": {}}
    (p.folder / "adapter_config.json").write_text(json.dumps({**settings, **told}))
    p.load()
    assert p.ask() == d.ask() is not None
    p.unload()
    for side in (p, d):
        (side.folder / "adapter_model.safetensors").unlink()
    torch.save(Sampler(), d.folder / "adapter_model.bin")
    d.unload()
    p.load()
    d.load()
    p.pool.reset_prefix_cache()
    d.pool.reset_prefix_cache()
    assert p.ask() == d.ask() is not None


@pytest.mark.parametrize(("setting", "value"), [("lora_alpha", 99), ("use_rslora", True)])
def test_settings_that_decide_are_compared(sides: Adapted, setting: str, value: object) -> None:
    p, d, _ = sides
    p.unload()
    settings = json.loads((p.folder / "adapter_config.json").read_text())
    (p.folder / "adapter_config.json").write_text(json.dumps({**settings, setting: value}))
    p.load()
    assert p.ask() not in (None, d.ask())


def test_one_of_the_hub_is_named_when_it_is_here(
    sides: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's workers fetch it while they load it, and what they load again may be newer."""
    p, d, _ = sides
    hub = tmp_path / "models--me--ada"
    made = hub / "snapshots" / "1"

    def fetch(_: LoRARequest) -> bool:
        shutil.copytree(d.folder, made)
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text("1")
        return True

    monkeypatch.setattr(
        lora_utils, "get_adapter_absolute_path", lambda path: {"me/ada": str(made)}[path]
    )
    p.unload()
    p.folder, p.core.model_executor.add_lora = Path("me/ada"), fetch
    p.load()
    assert p.ask() == d.ask() is not None
    (hub / "refs" / "main").write_text("22")
    assert p.ask() is None


def test_one_at_home_is_found_as_vllm_finds_it(
    sides: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, _ = sides
    monkeypatch.setenv("HOME", str(tmp_path))
    p.unload()
    p.folder = Path("~/p")
    p.load()
    assert p.ask() == d.ask() is not None


def test_one_that_nobody_has_loaded_has_no_part(
    sides: Adapted, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers load it with the request, when that is under way."""
    caplog.set_level(logging.INFO, "p2p_engine")
    p, _, _ = sides
    p.models.lora_requests[NAME] = LoRARequest(NAME, 77, str(p.folder))
    assert p.ask() is None
    assert "the adapter 'ada' was used before anybody loaded it" in caplog.text
