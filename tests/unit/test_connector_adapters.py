"""LoRA adapters that change under their names: vLLM's own routes load them, and the scheduler half
sees of each request what it needs to send nothing wrong."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.models import serving
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from p2p_engine.config import SendMode
from p2p_engine.connector import checkpoint
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
        self.half = SchedulerHalf(
            instance, Weights("checkpoint", reset_keeps_weights=True), [], tp_size=1
        )

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


@pytest.fixture
def sides(tmp_path: Path) -> Adapted:
    """Prefill and decode, each with its own copy of the files, and how to write one of them."""
    checkpoint._adapter.cache_clear()
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
        changed.half.reset_cache()
    after = changed.ask()
    assert after not in (None, before, other.ask())
    other.unload()
    write(1, other)
    other.load()
    assert other.ask() is None
    other.half.reset_cache()
    assert other.ask() == after


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_one_that_was_loaded_in_place_has_no_part(
    sides: Adapted, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM replaces it under its number, and caches on as if it were the same."""
    caplog.set_level(logging.INFO, "p2p_engine")
    *both, write = sides
    write(1, both[which])
    both[which].load(in_place=True)
    assert both[which].models.lora_requests[NAME].load_inplace
    assert both[which].ask() is None
    assert "the adapter 'ada' was loaded in place of another one" in caplog.text
    assert both[1 - which].ask() is not None


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
    assert "the files of the adapter 'ada' are not those that were loaded" in caplog.text
    assert d.ask() is not None
    p.unload()
    p.load()  # says which files count
    p.half.reset_cache()
    assert p.ask() not in (None, d.ask())


def test_adapters_that_are_not_here_are_named_by_their_path(tmp_path: Path) -> None:
    path = str(tmp_path / "elsewhere")
    assert checkpoint.name_of_adapter(path, 1) == path
    assert not checkpoint.has_changed(path, 1)
