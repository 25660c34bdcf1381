"""What an engine takes on a GPU is said before it starts, in the numbers of vLLM's settings."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_engine import P2pNcclEngine
from p2p_engine.cli.devices import find_room
from p2p_engine.cli.doctor import check_device_memory
from p2p_engine.cli.findings import Level
from p2p_engine.config import EngineConfig
from p2p_engine.connector import device_room
from p2p_engine.connector.device_room import check_room
from p2p_engine.errors import ConfigError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.sizing import MIB, DeviceMemory, Room, device_memory, memory_now
from tests.doubles.gpu import GpuDouble
from tests.rigs.engines import settings
from tests.support import records_of

DOUBLE = GpuDouble()
GIB = 1 << 30
NEEDED = DeviceMemory(600 * MIB, 100 * MIB, 300 * MIB)
CONFIG = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize("receives", [True, False])
@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_it_is_what_an_engine_takes_at_start(transport: str, receives: bool) -> None:
    """Counted by the double of CUDA, byte by byte."""
    config = settings(transport, kv_buffer_size=9 * MIB + 1)
    free = memory_now(config)[0]
    with P2pNcclEngine(config, receives=receives):
        taken = free - memory_now(config)[0]
    needed = device_memory(config, receives=receives)
    assert needed.at_start == taken
    assert bool(needed.group_bytes) == (transport == "nccl")


def test_the_defaults_are_what_the_documents_say() -> None:
    needed = device_memory(EngineConfig().on_device("cuda:0"))
    assert round(needed.slab_bytes / MIB) == 204
    assert needed.group_bytes == 16 * 36 * MIB
    pushing = device_memory(EngineConfig().on_device("cuda:0"), receives=False)
    assert (pushing.buffer_bytes, round(pushing.slab_bytes / MIB)) == (0, 156)
    assert pushing.group_bytes == 16 * 20 * MIB


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.92, 0.98, 1.0])
@pytest.mark.parametrize("gib", [8, 16, 24, 80, 141])
def test_what_is_advised_leaves_room(gib: int, utilization: float) -> None:
    """And a hundredth more would not, unless there was room already."""
    room = Room(gib * GIB, utilization, 4 * GIB)
    words = room.advice(NEEDED).split()
    advised, cache_bytes = float(words[2]), int(words[-1])
    assert not Room(gib * GIB, advised).lacking(NEEDED)
    assert 4 * GIB - cache_bytes == room.lacking(NEEDED)
    if room.lacking(NEEDED):
        assert Room(gib * GIB, advised + 0.01).lacking(NEEDED)
    else:
        assert advised == utilization


def test_what_others_took_is_not_left() -> None:
    room = Room(80 * GIB, 0.9, free_bytes=500 * MIB)
    assert room.lacking(NEEDED) == 500 * MIB
    assert room.advice(NEEDED) == "use --gpu-memory-utilization 0.89"


@pytest.mark.parametrize(
    ("room", "needs", "remedy"),
    [
        (Room(GIB // 2, 0.92), "buffer and slabs do not fit; they need 700 MiB", "kv_buffer_size:"),
        (Room(900 * MIB, 0.92), "and groups do not fit; they need 1000 MiB", "nccl_max_groups:"),
        (Room(1005 * MIB, 1.0), "need 1000 MiB, and vLLM can leave less than 995", "nccl_max"),
        (Room(9 * GIB, None, 1 * MIB, 5 * MIB), "slabs do not fit; they need 700", "less than 6 "),
        (Room(9 * GIB, None, 10 * MIB, 990 * MIB), "they need 1000 MiB", "less than 1000 MiB"),
    ],
)
def test_where_no_setting_leaves_room_it_says_what_does_not_fit(
    room: Room, needs: str, remedy: str
) -> None:
    """vLLM refuses a utilization of 0, and takes a cache of 0 bytes for one that is not set."""
    advice = room.advice(NEEDED)
    assert needs in advice
    assert remedy in advice
    assert "--" not in advice


def cache_config(utilization: float, chosen: int | None = None) -> Any:
    return SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=chosen)


def two_views() -> dict[str, torch.Tensor]:
    """Two layers in one allocation of 40 MiB."""
    memory = torch.empty(40 * MIB, dtype=torch.uint8)
    return {"a": memory[: 20 * MIB], "b": memory[20 * MIB :]}


def test_with_room_the_worker_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="p2p_engine")
    check_room(settings("cuda_ipc"), cache_config(0.5), two_views(), receives=True)
    assert "GPU memory: the engine takes 40 MiB" in caplog.text
    assert {record.levelname for record in records_of(device_room.logger, caplog)} == {"INFO"}


def test_without_room_for_groups_the_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    check_room(settings("nccl"), cache_config(0.99), two_views(), receives=True)
    assert "--gpu-memory-utilization 0." in caplog.text
    total = memory_now(settings("nccl"))[1]
    room = Room(total, 0.99)
    lower = 40 * MIB - room.lacking(device_memory(settings("nccl")))
    assert (f"--kv-cache-memory-bytes {lower}" in caplog.text) == (lower > 0)


def test_without_room_to_start_the_worker_refuses_with_the_setting() -> None:
    free = memory_now(settings("cuda_ipc"))[0]
    config = settings("cuda_ipc", kv_buffer_size=free + MIB)
    lacking = device_memory(config).at_most - free
    with pytest.raises(ConfigError, match="the engine cannot start; use") as raised:
        check_room(config, cache_config(0.9, 40 * MIB), two_views(), receives=True)
    assert f"--kv-cache-memory-bytes {40 * MIB - lacking}" in str(raised.value)


@pytest.mark.parametrize("chosen", [None, 30 * MIB])
def test_where_no_setting_leaves_room_the_worker_says_what_does_not_fit(
    chosen: int | None,
) -> None:
    config = settings("cuda_ipc", kv_buffer_size=1 << 45)
    with pytest.raises(ConfigError, match="cannot start; lower kv_buffer_size") as raised:
        check_room(config, cache_config(0.9, chosen), two_views(), receives=True)
    assert f"they need {(1 << 45) // MIB + 32} MiB" in str(raised.value)


@pytest.mark.parametrize(
    ("gib", "changes", "level"),
    [
        (80, {}, Level.OK),
        (16, {}, Level.CHANGE),
        (16, {"kv_role": "kv_producer"}, Level.OK),  # it receives nothing
        (16, {"kv_role": "kv_producer", "kv_connector_extra_config": {"send_type": "GET"}},
         Level.CHANGE),
        (80, {"kv_connector_extra_config": {"kv_buffer_size": 8e9}}, Level.CHANGE),
        (16, {"kv_connector_extra_config": {"transports": "cuda_ipc", "kv_buffer_size": 5e8}},
         Level.OK),
    ],
)  # fmt: skip
def test_the_doctor_computes_both_settings(
    gib: float, changes: dict[str, Any], level: Level
) -> None:
    [finding] = check_device_memory({**CONFIG, **changes}, find_room(gib, 0.92, 10 * GIB))
    assert finding.level is level
    if level is Level.CHANGE:
        assert finding.remedy.startswith("use --gpu-memory-utilization 0.")
        assert " or --kv-cache-memory-bytes " in finding.remedy


def test_what_was_taken_before_vllm_measured_is_not_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM takes its snapshot when CUDA's context and NCCL are there: its part comes on top."""
    free, total = memory_now(settings("cuda_ipc"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: free // 2)
    monkeypatch.setattr(Cuda, "memory", lambda self: (free // 4, total))
    assert total * 0.4 > device_memory(settings("nccl")).at_most  # of this, a quarter is taken
    check_room(settings("nccl"), cache_config(0.6), two_views(), receives=True)
    outside = total - free // 4 - free // 2
    left = total - outside - math.ceil(total * 0.6)
    assert f"vLLM leaves {left / MIB:.0f} MiB" in caplog.text


def test_a_cache_that_fills_the_gpu_leaves_nothing() -> None:
    """vLLM respects no utilization where its cache has a size."""
    [finding] = check_device_memory(CONFIG, find_room(80, 0.92, 80 * GIB))
    assert finding.level is Level.CHANGE


def test_by_way_of_host_memory_nothing_is_taken() -> None:
    room = find_room(1, 0.92, 0)
    assert not list(check_device_memory({**CONFIG, "kv_buffer_device": "cpu"}, room))
    assert not list(check_device_memory(CONFIG, None))
