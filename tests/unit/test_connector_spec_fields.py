"""Which fields of vLLM's specs decide what bytes mean: each is told to peers, or refused."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from p2p_engine.connector import page_shape, states
from p2p_engine.connector.cache_spec import read_cache
from p2p_engine.connector.groups import SUPPORTED, attention_groups
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.connector.page_shape import ROWS, shape_of
from p2p_engine.connector.spec_fields import ONLY, PLACED, TOLD, UNSEEN, check_fields, kind_of
from p2p_engine.errors import ConfigError
from p2p_engine.memory.plan import obstacles
from p2p_engine.wire.messages import CacheSpec
from tests.rigs.vllm_caches import DEPTH, FUTURE, HEADS, MLA, TOKENS, config_of, vllm_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache.md"
BLOCKS = 6
FULL = FullAttentionSpec(
    block_size=TOKENS, num_kv_heads=HEADS, head_size=DEPTH, dtype=torch.bfloat16
)
WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=HEADS, head_size=DEPTH, dtype=torch.bfloat16, sliding_window=32
)
INDEXER = replace(MLA, dtype=torch.uint8, head_size=DEPTH + 4, cache_role=SparseCacheRole.INDEXER)
# What B12X's `customize_spec` makes of it.
B12X = replace(FULL, num_head_slots=2, state_content_bytes=HEADS * DEPTH * 2)


STATE = MambaSpec(
    shapes=((3, 8), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32), block_size=TOKENS,
    page_size_padded=512,
)  # fmt: skip


def views_of(spec: KVCacheSpec, layout: str = "LBHNC", kernel: int | None = None) -> Any:
    """A layer's view, as vLLM itself makes it."""
    page = int(spec.page_size_bytes)
    placed = KVCacheTensor(
        size=page * BLOCKS, layers=["layers.0"], layer_stride=page * BLOCKS, block_stride=page
    )
    raw = torch.zeros(placed.size, dtype=torch.int8)
    [view] = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], placed, kernel)
    return view


def described(
    spec: AttentionSpec | MambaSpec,
    backend: str = "",
    *,
    layout: str = "LBHNC",
    kernel: int | None = None,
    tp_size: int = 1,
    num_kv_heads: int = HEADS,
    **layer: Any,
) -> CacheSpec:
    """What a rank with one such layer tells its peers."""
    config = vllm_config(layout=layout, tp_size=tp_size, num_kv_heads=num_kv_heads, num_layers=1)
    if backend:
        layer["attn_backend"] = SimpleNamespace(get_name=lambda: backend)
    config.compilation_config.static_forward_context = {"layers.0": SimpleNamespace(**layer)}
    [group] = attention_groups(config_of(spec)) if kernel is None else [None]
    group = LayerGroup(
        0, ("layers.0",), spec, group.window if group else 0, is_state=isinstance(spec, MambaSpec)
    )
    views = {"layers.0": views_of(spec, layout, kernel)}
    cache = read_cache(config, group, views, BLOCKS, 0)
    assert cache.spec is not None
    return cache.spec


# Every field


def fields_of_vllm() -> set[str]:
    kinds = (*SUPPORTED, UniformTypeKVCacheSpecs, KVCacheGroupSpec)
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def test_every_field_of_this_vllm_is_known() -> None:
    """A release with a new one fails here: find out what it decides, and say so in the table."""
    assert fields_of_vllm() - (TOLD.keys() | ONLY.keys() | PLACED | UNSEEN) == set()


def test_the_document_lists_the_fields_as_they_are_treated() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [\d., ]+ \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    fates = dict(rows)
    assert len(fates) == len(rows)
    assert fates.keys() == TOLD.keys() | ONLY.keys() | PLACED | UNSEEN
    for name, fate in fates.items():
        assert fate.startswith(f"told: `{TOLD.get(name)}`") == (name in TOLD), name
        assert fate.startswith("placement only") == (name in PLACED), name
        assert fate.startswith("refused") == (name in ONLY), name


def test_the_document_names_the_backends_that_are_not_plain_rows() -> None:
    text = DOCUMENT.read_text()
    special = page_shape.SLOTS | page_shape.INDEXERS | page_shape.PACKED_BY_ISA
    assert [name for name in special if f"`{name}`" not in text] == []


def test_a_field_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"this vLLM's FutureSpec\.swizzle is not known"):
        check_fields(FUTURE)


def test_a_field_of_a_group_that_is_not_known_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_engine.connector.spec_fields.UNSEEN", UNSEEN - {"is_eagle_group"})
    with pytest.raises(ConfigError, match=r"KVCacheGroupSpec\.is_eagle_group is not known"):
        attention_groups(config_of(FULL))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (replace(MLA, tokens_per_state=4), "MLAAttentionSpec.tokens_per_state=4"),
        (replace(MLA, model_version="deepseek_v4"), "MLAAttentionSpec.model_version='deepseek_v4'"),
        (replace(FULL, kv_quant_mode=KVQuantMode.NVFP4), "quantised as NVFP4"),
        (replace(FULL, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4), "as TURBOQUANT_K8V4"),
        (replace(STATE, num_speculative_blocks=3), "MambaSpec.num_speculative_blocks=3"),
        (replace(STATE, mamba_cache_mode="all"), "MambaSpec.mamba_cache_mode='all'"),
        (replace(STATE, tp_replicated=True), "MambaSpec.tp_replicated=True"),
        (replace(STATE, num_heads=2), "MambaSpec.num_heads=2"),
        (replace(STATE, mamba_type=Kind.LINEAR), "a state of kind LINEAR is not supported"),
        (replace(STATE, mamba_type=Kind.GDN_ATTN, num_speculative_blocks=3), "_blocks=3"),
        (replace(STATE, mamba_type=Kind.SHORT_CONV), "a state of kind SHORT_CONV with 2 parts"),
        # As vLLM's ReplaySSM extends it.
        (replace(STATE, shapes=STATE.shapes * 2, dtypes=STATE.dtypes * 2), "MAMBA2 with 4 parts"),
    ],
)
def test_a_value_that_cannot_be_transferred_is_refused_by_name(spec: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        attention_groups(config_of(spec))


def other_kinds() -> list[type[KVCacheSpec]]:
    """All of this vLLM's, whatever a later release adds."""
    found = [item for item in vars(kv_cache_interface).values() if isinstance(item, type)]
    kinds = [item for item in found if issubclass(item, KVCacheSpec)]
    return [item for item in kinds if item not in (*SUPPORTED, UniformTypeKVCacheSpecs)]


@pytest.mark.parametrize("kind", other_kinds(), ids=lambda kind: kind.__name__)
def test_every_other_kind_is_refused_by_name(kind: type[KVCacheSpec]) -> None:
    """Sinks, cross-attention, latents with a window: also what looks like one of ours."""
    spec = object.__new__(kind)
    for name in ("sliding_window", "extra_retained_tokens"):
        object.__setattr__(spec, name, 0)
    with pytest.raises(ConfigError, match=f"of kind {kind.__name__} is not supported"):
        attention_groups(config_of(spec))


@pytest.mark.parametrize("change", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_a_group_that_is_not_vllms_blocks_is_refused_by_name(change: dict[str, Any]) -> None:
    [name] = change
    with pytest.raises(ConfigError, match=rf"KVCacheGroupSpec\.{name}"):
        check_fields(KVCacheGroupSpec(["layers.0"], FULL, **change))


# What a peer compares. `num_kv_heads` and `max_tp_shards` need more than one rank: see below.
CHANGED: dict[str, tuple[AttentionSpec | MambaSpec, Any]] = {
    "head_size": (FULL, 2 * DEPTH),
    "head_size_v": (FULL, 2 * DEPTH),
    "dtype": (FULL, torch.float16),
    "block_size": (WINDOW, 2 * TOKENS),
    "sliding_window": (WINDOW, 48),
    "extra_retained_tokens": (WINDOW, 3),
    "cache_role": (replace(INDEXER, cache_role=SparseCacheRole.SPARSE), SparseCacheRole.INDEXER),
    "state_content_bytes": (MLA, 656),
    "num_head_slots": (replace(B12X, num_head_slots=None, state_content_bytes=None), 2),
    "shapes": (STATE, ((8, 3), (2, 4, 4))),
    "dtypes": (STATE, (torch.float16, torch.float32)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_two_caches_that_differ_in_what_is_told_refuse_each_other(name: str) -> None:
    spec, value = CHANGED[name]
    other = replace(spec, **{name: value})
    if name == "num_head_slots":
        other = B12X
    if name == "head_size":
        other = replace(other, head_size_v=value)
    for one, two in ((spec, other), (other, spec)):
        assert obstacles(described(one), described(two)), name


@pytest.mark.parametrize("name", ["kv_quant_mode", "cache_dtype_str"])
def test_caches_of_another_dtype_refuse_each_other(name: str) -> None:
    """vLLM keeps FP8 of either kind in bytes; the layer says which it is."""
    spec = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    kinds = [described(spec, kv_cache_dtype=kind) for kind in ("fp8_e4m3", "fp8_e5m2")]
    [reason] = obstacles(*kinds)
    assert reason.startswith("packing: 'cpu fp8_e4m3' here")


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "float16", "half"),
        (torch.uint8, "fp8", "fp8_e4m3"),  # vLLM resolves a checkpoint of ModelOpt's to the latter
    ],
)
def test_one_format_by_two_names_of_vllms_is_one(dtype: torch.dtype, one: str, other: str) -> None:
    spec = replace(FULL, dtype=dtype)
    kinds = [described(spec, kv_cache_dtype=kind) for kind in (one, other)]
    assert obstacles(*kinds) == []


UNCHANGED: dict[str, tuple[AttentionSpec | MambaSpec, Any]] = {
    "page_size_padded": (FULL, FULL.page_size_bytes + 512),
    "block_stride_alignment": (FULL, 512),
    "attention_chunk_size": (FULL, 64),
    "non_causal": (FULL, True),
    "non_causal_multi_token_decode": (MLA, True),
    "is_index_group_leader": (MLA, True),
    "dcp_sharded": (FULL, False),
    "num_prefill_checkpoint_blocks": (STATE, 1),
    "prefill_checkpoint_alignment": (STATE, 16),
    "mamba_cache_mode": (STATE, "align"),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_is_not_told_changes_nothing_that_is(name: str) -> None:
    spec, value = UNCHANGED[name]
    other = replace(spec, **{name: value})
    assert obstacles(described(spec), described(other)) == []
    assert described(spec).shape == described(other).shape


def test_a_states_bytes_are_all_that_its_layer_keeps() -> None:
    """Convolution and recurrence lie side by side at a page's start; padding does not move."""
    one, other = described(STATE), described(replace(STATE, block_size=4 * TOKENS))
    assert one.page_bytes == [3 * 8 * 2 + 2 * 4 * 4 * 4]
    assert obstacles(one, other) == []  # how far apart vLLM may cache states is its own affair
    assert "3x8:bfloat16 2x4x4:float32" in one.packing


# What vLLM's layers keep: of heads, of their sizes, and of four tokens of a convolution.
KEPT = {
    "Mamba1": (Kind.MAMBA1, Shapes.mamba1_state_shape(1, 32, 4, 4)),
    "Mamba2": (Kind.MAMBA2, Shapes.mamba2_state_shape(1, 32, 1, 4, 8, 8, 4)),
    "GDN": (Kind.GDN_ATTN, Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 8, 4)),
    "KDA": (Kind.GDN_ATTN, Shapes.kda_state_shape(1, 4, 8)),
    "short convolutions": (Kind.SHORT_CONV, Shapes.short_conv_state_shape(1, 32, 4)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_state_is_read_where_its_layer_keeps_it(name: str) -> None:
    """As vLLM's layers unpack a page: nothing of a state lies elsewhere."""
    kind, shapes = KEPT[name]
    dtypes = (torch.bfloat16, torch.float32)[: len(shapes)]
    spec = replace(STATE, shapes=shapes, dtypes=dtypes, mamba_type=kind, page_size_padded=4096)
    [group] = attention_groups(config_of(spec))
    view, layer = views_of(spec), SimpleNamespace()
    layer.get_state_shape, layer.get_state_dtype = lambda: shapes, lambda: dtypes
    MambaBase.bind_kv_cache(layer, view)  # type: ignore[arg-type]
    for part in layer.kv_cache:
        part[3] = torch.randn(part[3].shape)
    group = replace(group, layer_names=("layers.0",))
    cache = read_cache(vllm_config(num_layers=1), group, {"layers.0": view}, BLOCKS, 0)
    address = int(cache.layer_addresses[0] + 3 * cache.block_strides[0])
    parts = [part[3].contiguous().view(torch.uint8).numpy().tobytes() for part in layer.kv_cache]
    assert ctypes.string_at(address, int(cache.page_bytes[0])) == b"".join(parts)


@pytest.mark.parametrize("release", ["0.30.0", "0.31.2rc1"])
def test_delta_nets_of_an_older_vllm_are_refused(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins a cut prompt of one token with another request's state."""
    kind, shapes = KEPT["GDN"]
    spec = replace(STATE, shapes=shapes, mamba_type=kind)
    check_fields(spec)
    monkeypatch.setattr("vllm.__version__", release)
    with pytest.raises(ConfigError, match=r"GDN_ATTN needs vLLM 0\.32"):
        check_fields(spec)
    check_fields(STATE)


def test_a_state_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the shapes do not show it."""
    square = replace(STATE, shapes=((8, 8), (2, 4, 4)))
    monkeypatch.setattr(states, "get_conv_state_layout", lambda: "DS")
    one = described(square)
    monkeypatch.setattr(states, "get_conv_state_layout", lambda: "SD")
    assert obstacles(one, described(square))


def test_a_states_share_of_a_rank_is_refused_elsewhere() -> None:
    half = replace(STATE, shapes=((3, 4), (1, 4, 4)))
    [reason] = obstacles(described(STATE), described(half, tp_size=2))
    assert reason.startswith("packing: 'cpu state mamba2")


def test_beside_states_blocks_move_only_as_they_are() -> None:
    assert {group.is_whole for group in attention_groups(config_of(FULL, STATE))} == {True}
    assert {group.is_whole for group in attention_groups(config_of(FULL, WINDOW))} == {False}


# Layouts that were, or might be, taken for one


def test_two_head_slots_are_not_two_heads() -> None:
    """B12X with two KV heads has a view of the same shape and strides as anybody else's."""
    first, second = views_of(FULL), views_of(B12X)
    assert (first.shape, first.stride()) == (second.shape, second.stride())
    one, two = described(FULL, "FLASH_ATTN"), described(B12X, "B12X")
    assert one.shape != two.shape
    assert obstacles(one, two) == ["packing: 'cpu' here, 'cpu B12X slots' there"]


def test_rows_in_slots_are_where_the_backend_writes_them() -> None:
    """As `B12xPagedAttentionImpl` splits its view; vLLM's own operation then writes row by row."""
    view = views_of(B12X)
    keys, values = (side.unflatten(-1, (HEADS, DEPTH)) for side in view.unbind(1))
    keys.copy_(torch.randn(keys.shape))
    values.copy_(torch.randn(values.shape))
    shape = described(B12X, "B12X").shape
    assert shape is not None
    memory = view.view(torch.int16).as_strided((view.numel(),), (1,))
    for block, token, head in ((0, 0, 0), (3, 7, 1), (BLOCKS - 1, TOKENS - 1, 1)):
        for plane, side in zip(shape.planes, (keys, values), strict=True):
            at = block * view.stride(0) * 2 + plane.offset
            at += head * shape.head_stride + token * plane.token_stride
            found = memory[at // 2 : (at + plane.row_bytes) // 2]
            assert torch.equal(found, side[block, token, head].view(torch.int16))


def test_ranks_share_out_the_heads_in_slots() -> None:
    half = replace(B12X, num_kv_heads=1, state_content_bytes=DEPTH * 2)
    one, two = described(B12X, "B12X"), described(half, "B12X", tp_size=2)
    assert obstacles(one, two) == obstacles(two, one) == []


@pytest.mark.parametrize("backend", ["ROCM_ATTN", "ROCM_AITER_FA", "MINIMAX_M3_SPARSE"])
def test_slots_of_another_backend_move_as_they_are(backend: str) -> None:
    """Their keys are reordered inside a slot, and nothing that we can read says how."""
    spec = described(B12X, backend)
    assert (spec.shape, obstacles(spec, spec)) == (None, [])
    half = replace(B12X, num_kv_heads=1, state_content_bytes=DEPTH * 2)
    [reason] = obstacles(spec, described(half, backend, tp_size=2))
    assert reason.startswith("tp_size: 1 here, 2 there")
    assert obstacles(spec, described(B12X, "B12X"))


@pytest.mark.parametrize("backend", ["STEP5_DSA", "A_PLUGINS_OWN", "ROCM_AITER_FA", "CPU_ATTN"])
def test_a_backend_that_is_not_known_moves_as_it_is(backend: str) -> None:
    """Also vLLM's on a CPU, where it does not say by which instructions it packs."""
    spec = described(FULL, backend)
    assert (spec.shape, obstacles(spec, spec)) == (None, [])
    assert obstacles(spec, described(FULL, "FLASH_ATTN")) == [
        f"packing: 'cpu {backend}' here, 'cpu' there"
    ]


def test_known_backends_are_mapped_whatever_is_first() -> None:
    one = described(FULL, "FLASHINFER", layout="LBHNC")
    two = described(FULL, "TRITON_ATTN", layout="LBNHC")
    assert obstacles(one, two) == obstacles(two, one) == []
    assert one.shape != two.shape


def test_latents_with_scales_inside_differ_by_their_dtype() -> None:
    """Also where the bytes of a token happen to be as many."""
    kept = replace(MLA, dtype=torch.uint8, state_content_bytes=656)
    kinds = [described(kept, "FLASHMLA_SPARSE", kv_cache_dtype=kind)
             for kind in ("fp8_ds_mla", "nvfp4_ds_mla", "fp8")]  # fmt: skip
    for one in kinds:
        assert [bool(obstacles(one, two)) for two in kinds].count(False) == 1


def test_an_indexers_blocks_are_cut_by_nobody() -> None:
    """In each kernel block the scales lie behind all values: other blocks hold them elsewhere."""
    one = described(INDEXER, "DEEPSEEK_V32_INDEXER")
    assert obstacles(one, described(INDEXER, "DEEPSEEK_V32_INDEXER", tp_size=4)) == []
    double = replace(INDEXER, block_size=2 * TOKENS)
    [reason] = obstacles(one, described(double, "DEEPSEEK_V32_INDEXER"))
    assert reason.startswith("rows of a token")
    pieces = described(double, "DEEPSEEK_V32_INDEXER", kernel=TOKENS)
    for other in (one, described(double, "DEEPSEEK_V32_INDEXER")):
        [reason] = obstacles(pieces, other)
        assert reason.startswith("rows of a token")
    assert obstacles(pieces, pieces) == []
    shuffled = described(INDEXER, "DEEPSEEK_V32_INDEXER", uses_shuffled_layout=True)
    assert obstacles(one, shuffled)


def test_latents_that_are_not_the_same_on_all_ranks_move_as_they_are() -> None:
    spec = described(replace(MLA, max_tp_shards=None))
    assert (spec.shape, obstacles(spec, spec)) == (None, [])
    assert obstacles(spec, described(replace(MLA, max_tp_shards=None), tp_size=2))


def test_the_other_fp8_of_amd_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = described(FULL, "TRITON_ATTN")
    platform = SimpleNamespace(device_name="cpu", fp8_dtype=lambda: torch.float8_e4m3fnuz)
    monkeypatch.setattr(page_shape, "current_platform", platform)
    [reason] = obstacles(one, described(FULL, "TRITON_ATTN"))
    assert reason.endswith("'cpu float8_e4m3fnuz' there")


def test_every_backend_that_is_taken_for_rows_of_k_and_v_is_one_of_vllms() -> None:
    known = {item.name for item in AttentionBackendEnum}
    unlisted = {"AITER_TRITON_MLA", "FLASH_ATTN_MLA_SPARSE_FA4"}  # kinds of a listed one; 0.33
    of_a_gpu = {"FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120"}
    assert ROWS - known <= unlisted | of_a_gpu


def test_a_table_of_unlike_layers_is_parted_by_kind() -> None:
    """Alike on every rank, whichever of the layers it has and in whatever order."""
    specs: dict[str, Any] = {"layers.0.k": INDEXER, "layers.0": MLA, "layers.1.k": INDEXER}
    mixed = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    config = config_of(mixed)
    for names in (
        ["layers.0", "layers.0.k", "layers.1.k"],
        ["layers.1.k", "layers.0.k", "layers.0"],
    ):
        config.kv_cache_groups[0].layer_names = names
        latent, indexer = attention_groups(config)
        assert (latent.number, latent.table, latent.layer_names) == (0, 0, ("layers.0",))
        assert (indexer.number, indexer.table, sorted(indexer.layer_names)) == (
            1, 0, ["layers.0.k", "layers.1.k"],
        )  # fmt: skip
        assert (latent.spec, indexer.spec) == (MLA, INDEXER)
    assert kind_of(replace(MLA, block_stride_alignment=576)) == kind_of(MLA)


def test_a_shape_needs_the_heads_that_the_spec_has() -> None:
    inside = page_shape.Inside("cpu", "auto")
    assert shape_of(replace(FULL, num_kv_heads=4), [views_of(FULL)], inside) is None
