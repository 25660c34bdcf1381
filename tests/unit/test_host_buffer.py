"""The host buffer by itself: lending, copying by any torch device's index copies, its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from p2p_engine import TransferKey
from p2p_engine.connector.host_buffer import HostBuffer, InPlace, make_host_buffer
from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from tests.rigs.engines import engines
from tests.rigs.host_buffers import BLOCK_BYTES, BLOCKS, buffer_config, handles, layers_on

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]  # a CPU's is a device like any other


def copy_blocks(
    sources: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    source_ids: list[int],
    target_ids: list[int],
    direction: str,
) -> None:
    """What vLLM's platforms do: gather, move, put."""
    for name, source in sources.items():
        target = targets[name]
        target[torch.tensor(target_ids, device=target.device)] = source[
            torch.tensor(source_ids, device=source.device)
        ].to(target.device)


def buffer_of(layers: dict[str, torch.Tensor], num_blocks: int = 5) -> HostBuffer:
    made = HostBuffer(layers, BLOCKS, num_blocks * BLOCK_BYTES, 1)
    made.set_copy(copy_blocks)
    return made


def ids(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


def blocks_of(layers: dict[str, torch.Tensor], block_ids: np.ndarray[Any, Any]) -> list[Any]:
    """The contents of vLLM's blocks in every layer."""
    pieces = torch.from_numpy((block_ids[:, None] * 2 + np.arange(2)).ravel())
    pairs = [("a", pieces), ("b", pieces), ("c", torch.from_numpy(block_ids))]
    return [layers[name].cpu()[index].tolist() for name, index in pairs]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_go_there_and_back(device: str) -> None:
    layers = layers_on(device)
    buffer = buffer_of(layers)
    assert (buffer.num_blocks, buffer.nbytes) == (5, 5 * BLOCK_BYTES)
    assert buffer.layers["b"].stride()[1:] == layers["b"].stride()[1:]  # inside, as on the device
    expected, places = blocks_of(layers, ids(7, 0, 11)), buffer.take(ids(7, 0, 11))
    assert places is not None
    buffer.save(ids(7, 0, 11), places)
    for tensor in layers.values():
        tensor.zero_()
    buffer.load(places, ids(2, 9, 4))
    assert blocks_of(layers, ids(2, 9, 4)) == expected
    assert sum(float(tensor[:2].sum()) for tensor in layers.values()) == 0  # no other block


@pytest.mark.parametrize("device", DEVICES)
def test_from_device_to_device(device: str) -> None:
    """Through two engines: what a sender saves and a receiver loads is the same."""
    here, there = layers_on(device), layers_on(device)
    buffers = [buffer_of(layers) for layers in (here, there)]
    block_ids, targets = ids(3, 8, 1), ids(10, 2, 5)
    places, landing = (buffer.take(block_ids) for buffer in buffers)
    assert places is not None
    assert landing is not None
    source, sink = (cache_of(buffer) for buffer in buffers)
    buffers[0].save(block_ids, places)
    with engines(2, "shm") as (sender, receiver):
        key = TransferKey("request-1")
        waiting = receiver.receive(key, PagedSink(sink, landing, 0, 12))
        sender.send(key, PeerAddress(receiver.zmq_address), PagedSource(source, places, 0, 12))
        waiting.wait(10)
    buffers[1].load(landing, targets)
    assert blocks_of(there, targets) == blocks_of(here, block_ids)


def cache_of(buffer: HostBuffer) -> PagedCache:
    """Describe the host blocks."""
    layers = buffer.layers.values()
    pages = [tensor.nbytes // buffer.num_blocks for tensor in layers]
    return PagedCache(
        np.array([tensor.data_ptr() for tensor in layers], np.int64),
        np.array(pages, np.int64), np.array(pages, np.int64), buffer.num_blocks,
    )  # fmt: skip


def test_a_block_is_lent_to_one_at_a_time() -> None:
    buffer = buffer_of(layers_on("cpu"))
    first, second = buffer.take(ids(0, 1, 2)), buffer.take(ids(0, 1))
    assert first is not None
    assert second is not None
    assert sorted([*first, *second]) == list(range(5))
    assert buffer.take(ids(3)) is None
    assert buffer.num_lent == 5
    buffer.give_back(first)
    assert buffer.take(ids(4, 5, 6, 7)) is None
    again = buffer.take(ids(4, 5, 6))
    assert again is not None
    assert sorted(again) == sorted(first)


def test_a_copy_that_fails_or_is_missing_is_named() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of streams")

    buffer = HostBuffer(layers_on("cpu"), BLOCKS, 5 * BLOCK_BYTES, 1)
    with pytest.raises(TransportError, match="d2h: vLLM has given no copy operation"):
        buffer.save(ids(1), ids(2))
    buffer.set_copy(fail)
    buffer.load(ids(), ids())  # nothing to copy
    with pytest.raises(TransportError, match=r"h2d copy of 2 blocks failed: .*out of streams"):
        buffer.load(ids(1, 2), ids(2, 3))


def test_it_is_made_only_where_it_is_asked_for_and_needed() -> None:
    budget = 3 * BLOCK_BYTES
    assert make_host_buffer(buffer_config("meta"), handles(), BLOCKS, budget) is None
    assert make_host_buffer(buffer_config("cpu"), layers_on("cpu"), BLOCKS, budget) is None
    made = make_host_buffer(buffer_config("cpu"), handles(), BLOCKS, budget)
    assert made is not None
    assert made.num_blocks == 3
    whole = make_host_buffer(buffer_config("cpu", 10**6), handles(), BLOCKS, 10**9)
    assert whole is not None
    assert whole.num_blocks == BLOCKS  # more than the device has is never needed
    with pytest.raises(ConfigError, match=r"hold 3 blocks.*one request may need 4"):
        make_host_buffer(buffer_config("cpu", 25), handles(), BLOCKS, budget)


def test_blocks_in_host_memory_stand_for_themselves() -> None:
    staging = InPlace()
    block_ids = ids(3, 1)
    assert staging.take(block_ids) is block_ids
    staging.save(block_ids, block_ids)
    staging.load(block_ids, block_ids)
    staging.give_back(block_ids)
    assert not staging.is_copy
