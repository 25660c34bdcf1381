"""LoRA adapters that change under their names: vLLM's own routes load them, and the scheduler half
sees of each request what it needs to send nothing wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
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
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from p2p_engine.config import SendMode
from p2p_engine.connector.intent import ThisInstance
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.scheduler import SchedulerHalf
from p2p_engine.connector.weights import Weights, hear_of_weights
from tests.vllm.adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NAME = "ada"
SEND = {"do_remote_decode": True, "transfer_id": "t", "remote_host": "d", "remote_port": 2}
LOAD = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "p", "remote_port": 3}


class LoadingWorkers:
    """What vLLM's workers have loaded, by number: LRUCacheWorkerLoRAManager.add_adapter, and no
    room for more than one, so each other adapter has them forget."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}

    def add_lora(self, request: LoRARequest) -> bool:
        if request.lora_int_id not in self.loaded or request.load_inplace:
            weights = Path(request.lora_path).expanduser() / "adapter_model.safetensors"
            text = weights.read_bytes().hex() if weights.exists() else "nothing"
            self.loaded = {request.lora_int_id: text}
        return True

    def remove_lora(self, number: int) -> bool:
        return self.loaded.pop(number, None) is not None

    def list_loras(self) -> set[int]:
        return set(self.loaded)


class AdapterSide:
    """One instance: vLLM's routes for adapters, its engine core's call, and our scheduler half."""

    def __init__(self, params: dict[str, Any], folder: Path) -> None:
        hear_of_weights()
        self.params, self.folder = params, folder
        self.core: Any = object.__new__(EngineCore)
        self.workers = self.core.model_executor = LoadingWorkers()
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
            weights_labelled=self.half.weights_labelled,
            adapter_loaded=self.half.adapter_loaded,
            adapter_failed=self.half.adapter_failed,
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

    def ask(self, adapter: LoRARequest | None = None) -> bytes | None:
        """Ask for the adapter; returns the binding under which its KV is sent or loaded, None if it
        has no part in a transfer."""
        self.arrive(adapter)
        parts: dict[str, Any] = {**self.half._sending, **self.half._loading}
        self.half._sending.clear()
        self.half._loading.clear()
        return parts["r"].party.binding if parts else None

    def arrive(self, adapter: LoRARequest | None = None) -> Request:
        """A request for the adapter arrives, as vLLM's front end passes it on, and waits."""
        adapter = adapter or self.models.lora_requests[NAME]
        told = _over_the_wire(_request(self.params, adapter), EngineCoreRequest)
        request = Request.from_engine_core_request(told, None)
        self.half.on_new_request(request)
        return request

    def compute(self, request: Request) -> P2pConnectorMetadata:
        """vLLM computes the whole prompt in its next step; returns the orders for it, and for the
        one behind the request's end."""
        new = SimpleNamespace(req_id="r", block_ids=(), num_computed_tokens=0)
        orders = self.half.build_metadata(_step(40, new))
        self.core.model_executor.add_lora(request.lora_request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.half.request_finished(request, ())
        orders.ended_sends = self.half.build_metadata(_step(0)).ended_sends
        return orders


def _request(params: dict[str, Any], adapter: LoRARequest) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=list(range(40)), mm_features=None,
        sampling_params=sampling, pooling_params=None, arrival_time=0.0, lora_request=adapter,
        cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def _step(num_tokens: int, *new: Any) -> Any:
    """vLLM's schedule of a step: requests that are computed for the first time."""
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens, num_scheduled_tokens=dict.fromkeys("r", num_tokens),
        scheduled_new_reqs=new, preempted_req_ids=(),
        scheduled_cached_reqs=SimpleNamespace(req_ids=()),
    )  # fmt: skip


def _over_the_wire(item: Any, kind: Any) -> Any:
    """As it crosses from vLLM's front end to its engine core."""
    return MsgpackDecoder(kind).decode(MsgpackEncoder().encode(item))


Adapted = tuple[AdapterSide, AdapterSide, Callable[..., None]]


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
    assert changed.weights.is_known
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


def evicted_and_written_over(side: AdapterSide, write: Callable[..., None]) -> None:
    """The workers forget the adapter used least, and read its files again with a request."""
    write(1, side)


def replaced_in_place(side: AdapterSide, write: Callable[..., None]) -> None:
    write(1, side)
    side.load(in_place=True)
    side.forget_the_flag()
    side.pool.reset_prefix_cache()


def removed_and_loaded(side: AdapterSide, write: Callable[..., None]) -> None:
    """As trainers do, who number their adapters themselves."""
    write(1, side)
    side.core.remove_lora(1)
    side.core.add_lora(side.models.lora_requests[NAME])
    side.pool.reset_prefix_cache()


def used_from_elsewhere(side: AdapterSide, write: Callable[..., None]) -> None:
    """Each API server numbers its adapters for itself."""
    side.arrive(LoRARequest(NAME, 1, str(side.folder.parent / "made" / "0")))


CHANGES = [evicted_and_written_over, replaced_in_place, removed_and_loaded, used_from_elsewhere]


@pytest.mark.parametrize("change", CHANGES)
def test_what_waits_while_its_adapter_changes_is_not_sent(
    sides: Adapted, change: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its KV is bound to the weights that were here when the request came."""
    p, _, write = sides
    before = p.compute(p.arrive())
    assert [step.num_computed_tokens for step in before.sends] == [40]
    assert [item.failure for item in before.ended_sends] == [None]
    p.half.untransferred.take_counts()
    request = p.arrive()
    sending = p.half._sending.copy()
    change(p, write)
    p.half._sending.update(sending)
    orders = p.compute(request)
    [ended] = orders.ended_sends
    assert not orders.sends
    assert ended.failure
    assert ended.failure.startswith("the adapter 'ada' ")
    assert not ended.is_held
    assert p.half.untransferred.take_counts()["unsupported"] > 0
    assert p.weights.is_known


@pytest.mark.parametrize("change", CHANGES)
def test_what_waits_while_its_adapter_changes_is_not_loaded(
    sides: Adapted, change: Callable[..., None]
) -> None:
    _, d, write = sides
    request = d.arrive()
    assert d.half.num_loadable_tokens(request, 0) == 40
    loading = d.half._loading.copy()
    change(d, write)
    d.half.untransferred.take_counts()
    d.half._loading.update(loading)
    assert d.half.num_loadable_tokens(request, 0) == 0
    assert d.half.num_loadable_tokens(request, 0) == 0
    assert d.half.untransferred.take_counts()["unsupported"] == 1
    assert d.weights.is_known


def test_a_trainer_that_removes_and_loads_again_is_served(sides: Adapted) -> None:
    """Under one number, time and again, from other folders or from one."""
    p, d, write = sides
    names = [p.ask()]
    for seed in (1, 0, 1):
        for side in (p, d):
            side.core.remove_lora(1)
            write(seed, side)
            side.core.add_lora(side.models.lora_requests[NAME])
            side.pool.reset_prefix_cache()
            assert side.weights.is_known
        names.append(p.ask())
        assert names[-1] == d.ask() is not None
    assert names[0] == names[2] != names[1] == names[3]


def test_one_that_was_used_before_it_was_loaded_is_what_was_used(
    sides: Adapted, tmp_path: Path
) -> None:
    """vLLM's workers have loaded it from the request's path, and keep it."""
    p, _, _ = sides
    early = LoRARequest("early", 7, str(tmp_path / "made" / "0"))
    late = LoRARequest("early", 7, str(make_adapter(tmp_path / "late", 2)))
    assert p.ask(early) is None
    p.workers.add_lora(early)
    p.core.add_lora(late)
    assert p.ask(late) is None
    late.load_inplace = True
    p.core.add_lora(late)
    late.load_inplace = False
    p.pool.reset_prefix_cache()
    assert p.ask(late) is not None


def test_two_api_servers_with_one_number_name_what_was_loaded(
    sides: Adapted, tmp_path: Path
) -> None:
    """The second one's adapter is answered by the first one's weights, which are neither's then."""
    p, _, _ = sides
    other = LoRARequest("other", 1, str(make_adapter(tmp_path / "other", 2)))
    p.core.add_lora(other)
    assert p.ask() is not None
    assert p.ask(other) is None
    assert p.ask() is None


@pytest.mark.parametrize("in_place", [True, False])
def test_of_one_that_could_not_be_loaded_the_workers_may_have_a_part(
    sides: Adapted,
    in_place: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM sets one layer after the other, and leaves the number where it was when one fails."""
    caplog.set_level(logging.INFO, "p2p_engine")
    p, d, _ = sides
    assert p.ask() is not None
    adapter = p.models.lora_requests[NAME]
    adapter.load_inplace = in_place
    monkeypatch.setattr(p.workers, "add_lora", failing)
    with pytest.raises(RuntimeError, match="of another size"):
        p.core.add_lora(adapter)
    monkeypatch.undo()
    p.forget_the_flag()
    for _ in range(2):
        assert p.ask() is None
        p.core.add_lora(adapter)  # workers keep what they have
        p.pool.reset_prefix_cache()
    assert "the adapter 'ada' was used before anybody loaded it, or could not be" in caplog.text
    p.load(in_place=True)
    p.forget_the_flag()
    p.pool.reset_prefix_cache()
    assert p.ask() == d.ask() is not None


def failing(_: LoRARequest) -> bool:
    raise RuntimeError("a tensor is of another size")


def test_one_whose_files_were_written_with_their_times_has_no_part(sides: Adapted) -> None:
    """As `cp -p` and `rsync -t` write."""
    p, _, write = sides
    file = p.folder / "adapter_model.safetensors"
    before = file.stat()
    write(1, p)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
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
    p.core.add_lora(p.models.lora_requests[NAME])  # of another API server
    assert p.weights.is_known
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
