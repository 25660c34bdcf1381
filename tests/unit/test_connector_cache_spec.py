"""Where the cache lies: strides are read, and what cannot be moved page by page is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector.cache_spec import attention_spec, read_cache
from p2p_engine.errors import ConfigError
from p2p_engine.messages import CacheSpec, Plane
from p2p_engine.paged import PagedCache
from p2p_engine.plan import obstacles, sources_of

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


def read(views: dict[str, torch.Tensor], num_blocks: int = BLOCKS, **changes: Any) -> PagedCache:
    spec = replace(SPEC, block_size=TOKENS * BLOCKS // num_blocks)
    return read_cache(vllm_config(**changes), spec, views, num_blocks, 0)


def spec_of(cache: PagedCache) -> CacheSpec:
    assert cache.spec is not None
    return cache.spec


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_page_is_exactly_its_block(layout: str) -> None:
    backing, views = caches_of(layout)
    cache = read(views)
    assert cache.page_bytes.tolist() == [HEADS * TOKENS * WIDTH * 4] * LAYERS
    for layer, block in ((0, 0), (1, 7), (LAYERS - 1, BLOCKS - 1)):
        address = int(cache.layer_addresses[layer] + block * cache.block_strides[layer])
        found = bytes_at(address, int(cache.page_bytes[layer]), backing)
        assert found == sorted(views[NAMES[layer]][block].flatten().tolist())


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_the_shape_finds_every_row(layout: str) -> None:
    """Head, token, keys and values of a block, whatever lies beside what."""
    backing, views = caches_of(layout)
    cache = read(views)
    shape = spec_of(cache).shape
    assert shape is not None
    for layer, block, head, token in ((0, 0, 0, 0), (2, 7, 1, 15), (1, 3, 0, 9)):
        base = cache.layer_addresses[layer] + block * cache.block_strides[layer]
        row = views[NAMES[layer]][block, head, token]
        for plane, part in zip(shape.planes, row.view(2, -1), strict=True):
            at = base + plane.offset + head * shape.head_stride + token * plane.token_stride
            assert bytes_at(int(at), plane.row_bytes, backing) == sorted(part.tolist())


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_blocks_that_are_scattered_have_no_pages(layout: str) -> None:
    _, views = caches_of(layout)
    assert not len(read(views).page_bytes)
    with pytest.raises(ConfigError, match=r"layer0.*scattered"):
        read(views, num_kv_heads=HEADS * 2)  # not all of them are here: nothing else is known


def test_blocks_that_a_backend_has_cut_are_joined() -> None:
    backing, views = caches_of("LBHNC")
    cache = read(views, BLOCKS // 2)
    page = 2 * HEADS * TOKENS * WIDTH * 4
    assert cache.page_bytes.tolist() == cache.block_strides.tolist() == [page] * LAYERS
    address = int(cache.layer_addresses[1] + 3 * page)
    assert bytes_at(address, page, backing) == sorted(views["layer1"][6:8].flatten().tolist())
    shape = spec_of(cache).shape
    assert shape is not None
    assert (shape.num_tokens, cache.piece_stride) == (TOKENS, page // 2)


@pytest.mark.parametrize("num_blocks", [3, 20])
def test_blocks_that_do_not_join_are_refused(num_blocks: int) -> None:
    _, views = caches_of("LBHNC")
    with pytest.raises(ConfigError, match=f"cannot be read as {num_blocks} blocks"):
        read(views, num_blocks)


def test_layers_that_share_a_cache_are_moved_once() -> None:
    _, views = caches_of("LBHNC")
    views["shared"] = views["layer1"]
    cache = read(views)
    assert len(cache.page_bytes) == LAYERS
    assert spec_of(cache).layer_cuts == (0, LAYERS)


def test_other_devices_are_refused() -> None:
    views = {"layer0": torch.empty((BLOCKS, 1, 1, 1), device="meta")}
    with pytest.raises(ConfigError, match="on meta; supported: cpu"):
        read(views)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [32, 64])
def test_the_shape_of_packed_blocks_is_what_the_cpu_writes(
    isa: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """vLLM's own operation fills a cache, whose rows are then read by our description of it."""
    pytest.importorskip("vllm._C")
    depth = 64
    cache = torch.zeros((2, HEADS, num_tokens, 2 * depth), dtype=dtype)
    keys, values = torch.randn((2, 2 * num_tokens, HEADS, depth)).to(dtype)
    torch.ops._C.cpu_attn_reshape_and_cache(
        keys, values, *cache.view(2, HEADS, 2 * num_tokens, depth).chunk(2, dim=2),
        torch.arange(2 * num_tokens), isa, 1.0, 1.0, "auto",
    )  # fmt: skip
    spec = FullAttentionSpec(
        block_size=num_tokens, num_kv_heads=HEADS, head_size=depth, dtype=dtype
    )
    described = read_cache(vllm_config(isa=isa), spec, {"layer0": cache}, 2, 0)
    assert spec_of(described).packing == "cpu columns auto"
    shape, item = spec_of(described).shape, cache.element_size()
    assert shape is not None
    for block, head, token in ((0, 0, 0), (1, 1, num_tokens - 1), (1, 0, 7)):
        page = cache[block].flatten()
        for plane, kept in zip(shape.planes, (keys, values), strict=True):
            start = plane.offset + head * shape.head_stride + token * plane.token_stride
            offsets = start // item + torch.arange(plane.num_rows)[:, None] * (
                plane.row_stride // item
            )
            found = page[offsets + torch.arange(plane.row_bytes // item)].flatten()
            assert torch.equal(found, kept[block * num_tokens + token, head])


@pytest.mark.parametrize("has_head_axis", [True, False])
def test_latent_attention_has_one_row_for_all_heads_on_every_rank(has_head_axis: bool) -> None:
    view = torch.zeros((BLOCKS, 1, TOKENS, WIDTH))
    views = {"layer0": view if has_head_axis else view[:, 0]}
    mla = MLAAttentionSpec(head_size=WIDTH, **{**FULL, "num_kv_heads": 1})
    described = spec_of(read_cache(vllm_config(tp_size=4), mla, views, BLOCKS, 3))
    assert (described.num_kv_heads, described.rank) == (1, 3)
    assert described.shape is not None
    assert described.shape.planes == (Plane(0, WIDTH * 4, WIDTH * 4),)
    target = msgspec.structs.replace(described, tp_size=2)
    assert [sources_of(described, target, rank) for rank in range(2)] == [[0], [1]]


def test_packings_that_we_do_not_know_move_whole() -> None:
    _, views = caches_of("LBHNC")
    shape = spec_of(read(views, isa="amx")).shape
    assert shape is not None
    assert (shape.num_tokens, shape.rows) == (1, [(1, TOKENS * WIDTH * 4)])


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


def test_scales_beside_the_values_are_refused_by_name() -> None:
    scaled = replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    with pytest.raises(ConfigError, match=r"FP8_PER_TOKEN_HEAD.*not transferred"):
        attention_spec(config_of(scaled))
    attention_spec(config_of(replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"isa": "amx"}, r"packing: 'cpu columns auto' here, 'cpu amx auto' there"),
        ({"model": "other"}, r"model: 'm' here, 'other' there"),
        ({"cache_dtype": "fp8"}, r"packing: 'cpu columns auto' here, 'cpu columns fp8' there"),
    ],
)
def test_peers_must_agree_on_whatever_changes_the_bytes(change: Any, named: str) -> None:
    _, views = caches_of("LBHNC")
    first = spec_of(read(views, isa="vec"))
    assert not obstacles(first, spec_of(read(views, isa="vec16")))
    assert obstacles(first, spec_of(read(views, **{"isa": "vec", **change}))) == [named]


def vllm_config(
    *,
    isa: str = "",
    model: str = "m",
    layout: str = "LBHNC",
    tp_size: int = 1,
    cache_dtype: str = "auto",
    num_kv_heads: int = HEADS,
) -> Any:
    """What `read_spec` looks at."""
    resolved = SimpleNamespace(name=layout)
    layers = {name: SimpleNamespace(isa=isa) for name in NAMES}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, get_total_num_kv_heads=lambda: num_kv_heads
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, get_resolved_kv_cache_layout=lambda: resolved
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
