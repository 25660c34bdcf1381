"""Where the cache lies: strides are read, and what cannot be moved page by page is refused."""

from __future__ import annotations

import copy
import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.llama4 import Llama4ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector import compat
from p2p_engine.connector.cache_spec import read_cache, read_caches
from p2p_engine.connector.groups import attention_groups, can_name_lost_blocks, is_draft_layer
from p2p_engine.connector.identity import identity_of
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.errors import ConfigError
from p2p_engine.memory.paged import PagedCache
from p2p_engine.memory.plan import obstacles, sources_of
from p2p_engine.wire.identity import differences, digest_of
from p2p_engine.wire.messages import CacheSpec, Plane
from tests.doubles.vllm_config import make_config, write_model_config
from tests.rigs.vllm_caches import (
    BLOCKS,
    CHUNKED,
    FULL,
    HEADS,
    LAYERS,
    NAMES,
    SPEC,
    TOKENS,
    WIDTH,
    WINDOW,
    caches_of,
    config_of,
    group_of,
    read,
    read_all,
    vllm_config,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def bytes_at(address: int, nbytes: int, backing: torch.Tensor) -> list[float]:
    start = (address - backing.data_ptr()) // 4
    return sorted(backing.flatten()[start : start + nbytes // 4].tolist())


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
    with pytest.raises(ConfigError, match=r"layers.0.*scattered"):
        read(views, num_kv_heads=HEADS * 2)  # not all of them are here: nothing else is known


def test_blocks_that_a_backend_has_cut_are_joined() -> None:
    backing, views = caches_of("LBHNC")
    cache = read(views, BLOCKS // 2)
    page = 2 * HEADS * TOKENS * WIDTH * 4
    assert cache.page_bytes.tolist() == cache.block_strides.tolist() == [page] * LAYERS
    address = int(cache.layer_addresses[1] + 3 * page)
    assert bytes_at(address, page, backing) == sorted(views["layers.1"][6:8].flatten().tolist())
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
    views["shared"] = views["layers.1"]
    cache = read(views)
    assert len(cache.page_bytes) == LAYERS
    assert spec_of(cache).layer_cuts == (0, LAYERS)


def test_other_devices_are_refused() -> None:
    views = {"layers.0": torch.empty((BLOCKS, 1, 1, 1), device="meta")}
    with pytest.raises(ConfigError, match="on meta; supported: cpu"):
        read(views)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [32, 64])
def test_the_shape_of_packed_blocks_is_what_the_cpu_writes(
    isa: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """vLLM's own operation fills a cache, whose rows are then read by our description of it."""
    # Each build of the kernels claims the same names: loading a second one ends the process.
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no kernels for the CPU")
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
    described = read_cache(vllm_config(isa=isa), group_of(spec), {"layers.0": cache}, 2, 0)
    assert spec_of(described).packing == "cpu columns"
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
    views = {"layers.0": view if has_head_axis else view[:, 0]}
    mla = MLAAttentionSpec(head_size=WIDTH, max_tp_shards=1, **{**FULL, "num_kv_heads": 1})
    described = spec_of(read_cache(vllm_config(tp_size=4), group_of(mla), views, BLOCKS, 3))
    assert (described.num_kv_heads, described.rank) == (1, 3)
    assert described.shape is not None
    assert described.shape.planes == (Plane(0, WIDTH * 4, WIDTH * 4),)
    target = msgspec.structs.replace(described, tp_size=2)
    assert [sources_of(described, target, rank) for rank in range(2)] == [[0], [1]]


def test_the_shape_of_latent_blocks_is_what_the_cpu_writes() -> None:
    """vLLM's own backend fills a cache, whose rows are then read by our description of it."""
    rank, rope = 24, 8
    cache = torch.zeros((BLOCKS, 1, TOKENS, rank + rope))
    latents, ropes = torch.randn((40, rank)), torch.randn((40, 1, rope))
    slots = torch.randperm(BLOCKS * TOKENS)[:40]
    backend: Any = CPUMLAImpl
    backend.do_kv_cache_update(None, latents, ropes, cache, slots, "auto", torch.ones(1))
    mla = MLAAttentionSpec(head_size=rank + rope, max_tp_shards=1, **{**FULL, "num_kv_heads": 1})
    described = read_cache(vllm_config(), group_of(mla), {"layers.0": cache}, BLOCKS, 0)
    shape = spec_of(described).shape
    assert shape is not None
    [plane] = shape.planes
    memory = cache.flatten()
    for token, slot in enumerate(slots.tolist()):
        block, inside = divmod(slot, TOKENS)
        start = int(block * described.block_strides[0]) + plane.offset + inside * plane.token_stride
        found = memory[start // 4 :][: plane.row_bytes // 4]
        assert torch.equal(found, torch.cat([latents[token], ropes[token, 0]]))


def test_packings_that_we_do_not_know_move_whole() -> None:
    _, views = caches_of("LBHNC")
    shape = spec_of(read(views, isa="amx")).shape
    assert shape is not None
    assert (shape.num_tokens, shape.rows) == (1, [(1, TOKENS * WIDTH * 4)])


def test_groups_of_attention_are_supported() -> None:
    mla = MLAAttentionSpec(head_size=576, **{**FULL, "num_kv_heads": 1})
    uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": SPEC, "b": SPEC})
    for spec in (SPEC, mla, uniform):
        [found] = attention_groups(config_of(spec))
        assert (found.number, found.window, found.block_size) == (0, 0, TOKENS)
    [found] = attention_groups(config_of(uniform))
    assert found.spec is SPEC
    first, second = attention_groups(config_of(SPEC, WINDOW))
    assert (first.window, second.number, second.window) == (0, 1, 64)


def test_blocks_that_vllm_zeroes_are_filled_whole() -> None:
    """Caches of two precisions share blocks, and what one left there may be no number to the other.
    vLLM leaves zeroing to who fills them."""
    other = replace(SPEC, dtype=torch.float16)
    assert all(group.is_whole for group in attention_groups(config_of(SPEC, other)))
    assert not any(group.is_whole for group in attention_groups(config_of(SPEC, SPEC)))


# What vLLM derives from `max_model_len`

HALF = 16  # of a head
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0] * HALF, "long_factor": [2.0] * HALF,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": PLAIN,
    "linear": {**PLAIN, "rope_type": "linear", "factor": 2.0},
    "dynamic": {**PLAIN, "rope_type": "dynamic", "factor": 2.0},
    "yarn": {**PLAIN, **YARN, "rope_type": "yarn", "attention_factor": 1.5},
    "llama3": {**PLAIN, **YARN, **BANDS, "rope_type": "llama3"},
    "mrope": {**PLAIN, "mrope_section": [8, 4, 4]},
    "longrope": LONG,
    "longrope with scales": {**LONG, "short_mscale": 1.25, "long_mscale": 1.5},
    "by type of layer": {"sliding_attention": PLAIN, "full_attention": LONG},
}


def model_of(folder: Path, max_model_len: int, **changes: Any) -> VllmConfig:
    """vLLM's own configuration of a model of that length."""
    write_model_config(folder, **changes)
    return make_config(folder, "kv_producer", 0, max_model_len=max_model_len)


def described(config: VllmConfig) -> CacheSpec:
    """What peers are told of a model."""
    around = vllm_config()
    around.model_config = config.model_config
    return spec_of(read_cache(around, group_of(SPEC), caches_of("LBHNC")[1], BLOCKS, 0))


def rotated(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Keys as vLLM's own ropes of the model turn them."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    model = config.model_config.hf_text_config
    found = model.rope_parameters
    keys = torch.ones((256, 2 * HALF))
    with set_current_vllm_config(config):
        ropes = [
            rotary_embedding.get_rope(2 * HALF, model.max_position_embeddings, rope_parameters=each)
            for each in [item for item in found.values() if isinstance(item, dict)] or [found]
        ]
        shape = (3, 256) if "mrope_section" in found else (256,)
        places = torch.arange(256).expand(shape)
        turns = [getattr(rope, "forward_native", rope) for rope in ropes]
        return torch.stack([turn(places, keys, keys)[1] for turn in turns])


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("lengths", [(256, 512), (512, 1024), (1024, 2048)])
def test_lengths_pair_where_vllm_turns_keys_alike(
    name: str, lengths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE has two tables, and vLLM takes one of them by the length of the model."""
    types = [*ROPES[name], "full_attention"] if name == "by type of layer" else None
    one, other = (
        model_of(tmp_path, length, rope_parameters=ROPES[name], layer_types=types)
        for length in lengths
    )
    is_alike = torch.equal(rotated(one, monkeypatch), rotated(other, monkeypatch))
    assert is_alike == ("long" not in str(ROPES[name]) or lengths != (512, 1024))
    assert bool(obstacles(described(one), described(other))) != is_alike
    found = differences(*(identity_of(each, each.model_config) for each in (one, other)))
    assert found == ([] if is_alike else ["rope_factors: 'short' here, 'long' there"])


def turned_by_transformers(config: VllmConfig, num_tokens: int) -> torch.Tensor:
    """Keys of a prompt of so many tokens, as the implementation of transformers turns them."""
    hf_config: Any = copy.deepcopy(config.model_config.hf_config)
    rope = LlamaRotaryEmbedding(hf_config)
    keys = torch.ones((1, 1, num_tokens, 2 * HALF))
    cos, sin = rope(keys, torch.arange(num_tokens)[None])
    turned: torch.Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[1][0, 0]
    return turned


@pytest.mark.parametrize(
    ("name", "length"),
    [*itertools.product(("default", "linear", "yarn", "llama3", "dynamic", "longrope"), (2048,)),
     ("dynamic", 8192)],
)  # fmt: skip
def test_the_implementation_of_transformers_pairs_where_it_turns_keys_alike(
    name: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_of(tmp_path, length, rope_parameters=ROPES[name])
    own = rotated(config, monkeypatch)[0, :200]
    before = identity_of(config, config.model_config)
    short, long = (turned_by_transformers(config, each)[:200] for each in (200, length))
    is_alike = torch.allclose(short, long, atol=1e-4) and torch.allclose(short, own, atol=1e-4)
    assert is_alike == (name != "longrope" and length == 2048)
    monkeypatch.setattr(type(config.model_config), "using_transformers_backend", lambda _: True)
    found = differences(before, identity_of(config, config.model_config))
    assert [each.endswith("'by prompt' there") for each in found] == ([] if is_alike else [True])


def test_llama4_of_transformers_is_tuned_as_its_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That implementation reads no generation_config.json, and no length."""
    config = model_of(tmp_path, 1024, **LLAMA4)
    monkeypatch.setattr(type(config.model_config), "using_transformers_backend", lambda _: True)
    assert identity_of(config, config.model_config)["attn_temperature_tuning"] == "on"
    config.model_config.hf_text_config.attn_temperature_tuning = False
    assert identity_of(config, config.model_config)["attn_temperature_tuning"] == "off"


def test_a_draft_has_factors_of_its_own(tmp_path: Path) -> None:
    around = vllm_config()
    draft = model_of(tmp_path, 1024, rope_parameters=LONG).model_config
    around.speculative_config = SimpleNamespace(draft_model_config=draft)
    assert identity_of(around, draft)["rope_factors"] == "long"
    for model, is_draft in ((around.model_config, False), (draft, True)):
        group = replace(group_of(SPEC), is_draft=is_draft)
        cache = read_cache(around, group, caches_of("LBHNC")[1], BLOCKS, 0)
        assert spec_of(cache).identity == digest_of(identity_of(around, model))


def test_the_ropes_of_a_model_of_images_are_its_texts(tmp_path: Path) -> None:
    write_model_config(tmp_path, rope_parameters=LONG)
    text = json.loads((tmp_path / "config.json").read_text())
    config = model_of(tmp_path, 512, model_type="llava", text_config=text)
    assert identity_of(config, config.model_config)["rope_factors"] == "short"


def test_a_length_that_vllm_lowers_later_does_not_change_the_factors(tmp_path: Path) -> None:
    """With max_model_len -1 it makes the model first, and then looks for room."""
    config = model_of(tmp_path, -1, rope_parameters=LONG)
    before = described(config)
    config.model_config.max_model_len = 64
    assert described(config) == before
    assert identity_of(config, config.model_config)["rope_factors"] == "long"


LLAMA4 = {
    "model_type": "llama4_text", "max_position_embeddings": 1 << 20, "head_dim": 2 * HALF,
    "num_local_experts": 2, "intermediate_size_mlp": 64, "rope_parameters": PLAIN,
}  # fmt: skip


@pytest.mark.parametrize(
    ("length", "in_file", "on_command_line"),
    [(32768, {}, {}), (32769, {}, {}), (-1, {}, {}),
     (1024, {"attn_temperature_tuning": True}, {}),
     (65536, {"attn_temperature_tuning": True}, {"attn_temperature_tuning": False})],
)  # fmt: skip
def test_the_temperature_of_llama4_is_what_vllm_tunes(
    length: int, in_file: dict[str, bool], on_command_line: dict[str, bool],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """vLLM decides by the length, unless the model's folder or the command line says it."""
    if in_file:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_file))
    config = model_of(tmp_path, length, **LLAMA4)
    config.model_config.override_generation_config = on_command_line
    made: Any = Llama4ForCausalLM
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda self, **_: None)
    monkeypatch.setattr(made, "set_moe_parameters", lambda self: None)
    made(vllm_config=config)
    is_on = config.model_config.hf_config.attn_temperature_tuning
    if length == -1:
        config.model_config.max_model_len = 1024  # vLLM has made the model, and looks for room
    told = identity_of(config, config.model_config)["attn_temperature_tuning"]
    assert told == ("on" if is_on else "off")


@pytest.mark.parametrize("specs", [(CHUNKED,), (SPEC, CHUNKED)])
def test_other_caches_are_refused_by_name(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="ChunkedLocalAttentionSpec is not supported"):
        attention_groups(config_of(*specs))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        attention_groups(config_of())


@pytest.mark.parametrize("specs", [(SPEC, SPEC), (WINDOW,)])
def test_windows_need_failures_by_request(
    monkeypatch: pytest.MonkeyPatch, specs: tuple[Any, ...]
) -> None:
    """vLLM 0.29 knows failed blocks only, and cannot go on behind one of them here."""
    monkeypatch.setattr(compat, "HAS_FAILED_REQUESTS", False)
    with pytest.raises(ConfigError, match=r"need vLLM 0\.30"):
        attention_groups(config_of(*specs))


@pytest.mark.parametrize("window", [2, 16, 20, 63, 64, 65])
def test_the_first_block_of_a_window_is_the_first_that_vllm_makes(window: int) -> None:
    """What is loaded is all but the last token: that one looks back at the whole window."""
    spec = replace(WINDOW, sliding_window=window)
    [group] = attention_groups(config_of(spec))
    for num_tokens in range(2, 200):
        pool = BlockPool(40, enable_caching=False, hash_block_size=TOKENS)
        manager = SlidingWindowManager(
            spec, max_admission_blocks_per_request=40, block_pool=pool,
            enable_caching=False, kv_cache_group_id=0, scheduler_block_size=TOKENS,
        )  # fmt: skip
        manager.add_local_computed_blocks("r", [], 0, num_tokens - 1)
        manager.allocate_external_computed_blocks("r", 0, num_tokens - 1)
        made = [not block.is_null for block in manager.req_to_blocks["r"]]
        assert made.index(True) == group.first_block(num_tokens)
        assert len(made) == group.num_blocks(num_tokens - 1)


def test_scales_beside_the_values_are_refused_by_name() -> None:
    scaled = replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    with pytest.raises(ConfigError, match=r"FP8_PER_TOKEN_HEAD.*not transferred"):
        attention_groups(config_of(scaled))
    attention_groups(config_of(replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)))


def test_groups_lie_in_the_same_memory() -> None:
    """A block belongs to one group at a time: layers of two groups may have the same address."""
    _, views = caches_of("LBHNC")
    views = {"layers.0": views["layers.0"], "layers.1": views["layers.1"],
             "layers.2": views["layers.0"]}  # fmt: skip
    spec, caches = read_all(views, ["layers.1", "layers.0"], ["layers.2"])
    first, second = (item.cache for item in caches)
    assert [item.group.number for item in caches] == [0, 1]
    assert [len(cache.page_bytes) for cache in (first, second)] == [2, 1]
    assert first.layer_addresses[0] == second.layer_addresses[0]
    assert [(item.layers, item.window) for item in spec.groups] == [((0, 1), 0), ((2,), 64)]
    assert {item.layer_cuts for item in spec.groups} == {(0, 3)}


def test_layers_that_share_a_cache_are_known_by_their_place() -> None:
    """They have none of their own, so nobody waits for them; the others keep their numbers."""
    _, views = caches_of("LBHNC")
    views["layers.3"] = views["layers.1"]
    spec, [only] = read_all(views, [*views], num_layers=4)
    assert (spec.layer_cuts, spec.layers) == ((0, 4), (0, 1, 2))
    assert len(only.cache.page_bytes) == LAYERS
    assert read_all(views, NAMES, num_layers=4)[0] == spec  # vLLM may not name them


# Drafts, with which vLLM speculates


@pytest.mark.parametrize(
    ("name", "is_draft"),
    [
        ("model.layers.2.self_attn.attn", False),
        ("model.layers.3.self_attn.attn", True),  # EAGLE, most MTP
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.eagle_layers.0.self_attn.attn", True),
    ],
)
def test_a_draft_is_known_by_the_names_of_its_layers(name: str, is_draft: bool) -> None:
    assert is_draft_layer(vllm_config(draft=DRAFT), name) == is_draft
    assert not is_draft_layer(vllm_config(), name)  # nobody speculates


DRAFT: dict[str, Any] = {"model": "d", "num_kv_heads": HEADS}
DRAFT_SPEC = replace(SPEC, num_kv_heads=1)


def with_draft(*specs: Any) -> list[LayerGroup]:
    """The groups of layers.0, .1 and a draft's .2; each spec is that of a table of its own."""
    names = [NAMES] if len(specs) == 1 else [["layers.0"], ["layers.1", "layers.2"]]
    return groups_of(tables_of(*zip(names, specs, strict=True)))


def tables_of(*tables: tuple[list[str], Any]) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(*item) for item in tables]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def groups_of(config: KVCacheConfig) -> list[LayerGroup]:
    return attention_groups(config, partial(is_draft_layer, vllm_config(draft=DRAFT, num_layers=2)))


def test_a_draft_is_a_group_of_its_own_behind_the_models() -> None:
    def seen(*specs: Any) -> list[Any]:
        return [
            (group.number, group.table, group.layer_names, group.is_draft)
            for group in with_draft(*specs)
        ]

    assert seen(SPEC) == [(0, 0, ("layers.0", "layers.1"), False), (1, 0, ("layers.2",), True)]
    assert seen(WINDOW, SPEC) == [
        (0, 0, ("layers.0",), False), (1, 1, ("layers.1",), False), (2, 1, ("layers.2",), True),
    ]  # fmt: skip
    kinds: dict[str, Any] = {"layers.0": SPEC, "layers.1": SPEC, "layers.2": DRAFT_SPEC}
    mixed = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=kinds)
    assert [group.spec for group in with_draft(mixed)] == [SPEC, DRAFT_SPEC]


@pytest.mark.parametrize("draft", [WINDOW, CHUNKED])
def test_lost_blocks_are_not_named_where_a_draft_has_a_table_of_its_own(draft: Any) -> None:
    """Also if it is not transferred: vLLM would raise in its scheduler."""
    alone = tables_of((NAMES, SPEC))
    assert can_name_lost_blocks(alone, groups_of(alone))
    beside = tables_of((NAMES[:2], SPEC), (NAMES[2:], draft))
    assert not can_name_lost_blocks(beside, groups_of(beside))


def test_a_draft_of_a_kind_that_is_not_supported_is_left_out() -> None:
    kinds: dict[str, Any] = {"layers.0": SPEC, "layers.1": SPEC, "layers.2": CHUNKED}
    mixed = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=kinds)
    [only] = with_draft(mixed)
    assert only.layer_names == ("layers.0", "layers.1")


def read_with_draft(**changes: Any) -> CacheSpec:
    views = caches_of("LBHNC")[1]
    config = vllm_config(**{"draft": DRAFT, "num_layers": 2, **changes})
    return read_caches(config, with_draft(SPEC), views, BLOCKS, 0)[0]


def test_a_draft_is_described_by_its_own_model() -> None:
    spec, draft = read_with_draft().groups
    assert (spec.layer_cuts, spec.is_draft) == ((0, 2), False)
    assert (draft.layer_cuts, draft.is_draft, draft.number) == ((0, 1), True, 1)
    assert spec.identity != draft.identity
    assert len(draft.page_bytes) == 1


def test_a_draft_that_cannot_be_described_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Its heads on this rank are not as many as sharing them out would give; it has no stages."""
    caplog.set_level("INFO", logger="p2p_engine")
    unlike = {"model": "d", "num_kv_heads": 8 * HEADS}
    for changes in ({"draft": unlike}, {"pp_size": 2}):
        assert len(read_with_draft(**changes).groups) == 1
    assert caplog.text.count("the draft's layers are not transferred") == 2


def test_a_draft_that_shares_the_models_cache_has_none_of_its_own() -> None:
    views = caches_of("LBHNC")[1]
    views["layers.2"] = views["layers.1"]
    config = vllm_config(draft=DRAFT, num_layers=2)
    spec, [only] = read_caches(config, with_draft(SPEC), views, BLOCKS, 0)
    assert len(spec.groups) == 1
    assert len(only.cache.page_bytes) == 2


def test_a_layer_in_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.2 is in no group"):
        read_all(caches_of("LBHNC")[1], NAMES[:2])


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1, 0), (2, 1)])
def test_a_rank_says_which_stage_it_has(rank: int, stage: int) -> None:
    """One of the groups may have all its layers in another stage."""
    _, views = caches_of("LBHNC")
    mine = {name: views[name] for name in (NAMES[:2] if stage == 0 else NAMES[2:])}
    names = [[name for name in mine if name != "layers.1"], [n for n in mine if n == "layers.1"]]
    spec, caches = read_all(mine, *names, rank=rank, tp_size=2, pp_size=2, num_kv_heads=2 * HEADS)
    layers = [(0,), (1,)] if stage == 0 else [(2,), ()]
    assert [item.layers for item in spec.groups] == layers
    assert {(item.layer_cuts, item.rank) for item in spec.groups} == {((0, 2, 3), rank)}
    assert len(caches) == 2 - stage
    other, _ = read_all(views, NAMES[::2], ["layers.1"], num_kv_heads=2 * HEADS, tp_size=2)
    assert obstacles(spec, other) == obstacles(other, spec) == []


def test_stages_need_layers_with_a_place() -> None:
    _, views = caches_of("LBHNC")
    views = {f"odd{index}": view for index, view in enumerate(views.values())}
    assert read_all(views, [*views])[0].layer_cuts == (0, LAYERS)
    with pytest.raises(ConfigError, match="do not tell where layers"):
        read_all(views, [*views], pp_size=2)


def test_peers_must_have_the_same_layers_in_a_group() -> None:
    views = caches_of("LBHNC")[1]
    one, other = read_all(views, NAMES)[0], read_all(views, NAMES[:2], NAMES[2:])[0]
    assert obstacles(one, other) == ["groups of layers: 1 here, 2 there"]
    swapped = read_all(views, NAMES[:1], NAMES[1:])[0]
    assert obstacles(swapped, other) == [
        "layers with a cache: (0,) here, (0, 1) there",
        "layers with a cache: (1, 2) here, (2,) there",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"isa": "amx"}, r"packing: 'cpu columns' here, 'cpu amx' there"),
        ({"model": "other"}, "identity: '[0-9a-f]{32}' here, '[0-9a-f]{32}' there"),
        ({"cache_dtype": "fp8"}, r"packing: 'cpu columns' here, 'cpu columns fp8_e4m3' there"),
        ({"cache_dtype": "fp8_e5m2"}, r"packing: 'cpu columns' here, 'cpu columns fp8_e5m2' there"),
    ],
)
def test_peers_must_agree_on_whatever_changes_the_bytes(change: Any, named: str) -> None:
    _, views = caches_of("LBHNC")
    first = spec_of(read(views, isa="vec"))
    assert not obstacles(first, spec_of(read(views, isa="vec16")))
    [said] = obstacles(first, spec_of(read(views, **{"isa": "vec", **change})))
    assert re.fullmatch(named, said)
