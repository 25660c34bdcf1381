"""Where the cache lies: strides are read, and what cannot be moved page by page is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector.cache_spec import attention_spec, read_cache, read_spec
from p2p_engine.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 10, 2, 16, 8
NAMES = [f"layer{index}" for index in range(LAYERS)]
FULL: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "dtype": torch.float32}
SPEC = FullAttentionSpec(head_size=WIDTH // 2, **FULL)
SHAPE = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH), strict=True))


def caches_of(layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One allocation in this order, and each layer's view of it: [blocks, heads, tokens, width]."""
    size = [SHAPE[axis] for axis in layout]
    backing = torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)
    views = backing.permute([layout.index(axis) for axis in "LBHNC"])
    return backing, dict(zip(NAMES, views, strict=True))


def bytes_at(address: int, nbytes: int, backing: torch.Tensor) -> list[float]:
    start = (address - backing.data_ptr()) // 4
    return sorted(backing.flatten()[start : start + nbytes // 4].tolist())


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_page_is_exactly_its_block(layout: str) -> None:
    backing, views = caches_of(layout)
    cache = read_cache(views, BLOCKS)
    assert cache.page_bytes.tolist() == [HEADS * TOKENS * WIDTH * 4] * LAYERS
    for layer, block in ((0, 0), (1, 7), (LAYERS - 1, BLOCKS - 1)):
        address = int(cache.layer_addresses[layer] + block * cache.block_strides[layer])
        found = bytes_at(address, int(cache.page_bytes[layer]), backing)
        assert found == sorted(views[NAMES[layer]][block].flatten().tolist())


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_scatter_a_block_are_refused(layout: str) -> None:
    _, views = caches_of(layout)
    with pytest.raises(ConfigError, match=r"layer0.*scattered"):
        read_cache(views, BLOCKS)


def test_blocks_that_a_backend_has_cut_are_joined() -> None:
    backing, views = caches_of("LBHNC")
    cache = read_cache(views, BLOCKS // 2)
    page = 2 * HEADS * TOKENS * WIDTH * 4
    assert cache.page_bytes.tolist() == cache.block_strides.tolist() == [page] * LAYERS
    address = int(cache.layer_addresses[1] + 3 * page)
    assert bytes_at(address, page, backing) == sorted(views["layer1"][6:8].flatten().tolist())


@pytest.mark.parametrize(("layout", "num_blocks"), [("BLHNC", 5), ("LBHNC", 3), ("LBHNC", 20)])
def test_blocks_that_do_not_join_are_refused(layout: str, num_blocks: int) -> None:
    _, views = caches_of(layout)
    with pytest.raises(ConfigError, match=f"cannot be read as {num_blocks} blocks"):
        read_cache(views, num_blocks)


def test_layers_that_share_a_cache_are_moved_once() -> None:
    _, views = caches_of("LBHNC")
    views["shared"] = views["layer1"]
    assert len(read_cache(views, BLOCKS).page_bytes) == LAYERS


def test_other_devices_are_refused() -> None:
    views = {"layer0": torch.empty((BLOCKS, 1, 1, 1), device="meta")}
    with pytest.raises(ConfigError, match="on meta; supported: cpu"):
        read_cache(views, BLOCKS)


def config_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(NAMES, spec) for spec in specs]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def test_one_group_of_full_attention_is_supported() -> None:
    mla = MLAAttentionSpec(head_size=576, **{**FULL, "num_kv_heads": 1})
    uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": SPEC, "b": SPEC})
    assert attention_spec(config_of(SPEC)) is SPEC
    assert attention_spec(config_of(mla)) is mla
    assert attention_spec(config_of(uniform)) is SPEC


WINDOW = SlidingWindowSpec(head_size=WIDTH, sliding_window=64, **FULL)
MIXED = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": SPEC, "b": WINDOW})


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ((SPEC, WINDOW), r"several KV cache groups.*FullAttentionSpec, SlidingWindowSpec"),
        ((WINDOW,), r"SlidingWindowSpec.*--disable-hybrid-kv-cache-manager"),
        ((MIXED,), "SlidingWindowSpec"),
        ((), "several"),
    ],
)
def test_other_caches_are_refused_by_name(specs: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        attention_spec(config_of(*specs))


def test_peers_must_agree_on_whatever_changes_the_bytes() -> None:
    _, views = caches_of("LBHNC")
    cache = read_cache(views, BLOCKS)
    first = read_spec(vllm_config(), SPEC, cache, views)
    assert not first.differences(read_spec(vllm_config(), SPEC, cache, views))
    for change, named in (
        ({"isa": "amx"}, "packing"),
        ({"model": "other"}, "model"),
        ({"layout": "LBNHC"}, "layout"),
        ({"tp_size": 2}, "tp_size"),
        ({"cache_dtype": "fp8"}, "packing"),
    ):
        [difference] = first.differences(read_spec(vllm_config(**change), SPEC, cache, views))
        assert difference.startswith(named)


def vllm_config(
    *,
    isa: str = "vec",
    model: str = "m",
    layout: str = "LBHNC",
    tp_size: int = 1,
    cache_dtype: str = "auto",
) -> Any:
    """What `read_spec` looks at."""
    resolved = SimpleNamespace(name=layout)
    layers = {name: SimpleNamespace(isa=isa) for name in NAMES}
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, get_resolved_kv_cache_layout=lambda: resolved
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
