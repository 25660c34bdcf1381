"""The arrangement of bytes in a group's blocks, and its name.

vLLM's views are [block, head slot, token, content]. The attention backend defines the content: it
may keep K and V in separate slots, reorder a slot's bytes, or put scales beside the values. Only
known arrangements are described. Other blocks move whole, between equal instances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from p2p_engine.wire.messages import PageShape, Plane

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COLUMN_ISAS = ("vec", "vec16")  # both lay keys out column by column
# Backends whose content is the head's K and then its V, or one latent row for all heads.
ROWS = frozenset({
    "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "HPC_ATTN", "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV", "ROCM_AITER_UNIFIED_ATTN",
    "AITER_TRITON_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE_FA4", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120", "FLASHMLA", "FLASHMLA_SPARSE",
    "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "TOKENSPEED_MLA", "TRITON_MLA", "XPU_MLA_SPARSE",
})  # fmt: skip
# One slot for the K of all heads and one for their V, head after head in each token's row.
SLOTS = frozenset({"B12X"})
# The values of a block's tokens, and behind them their scales: only whole blocks can be moved.
INDEXERS = frozenset({"DEEPSEEK_V32_INDEXER"})
PACKED_BY_ISA = frozenset({"CPU_ATTN", "AMX_MLA"})


@dataclass(frozen=True)
class Inside:
    """The facts that define the arrangement of a group's blocks, beside their shape and dtype."""

    platform: str
    quantization: str  # of the values, beyond their dtype; "" if there is none
    isa: str = ""  # instruction sets by which the CPU backends pack blocks
    backends: frozenset[str] = frozenset()
    has_slots: bool = False  # content is not simply a head's K and V
    is_indexer: bool = False
    marks: tuple[str, ...] = ()

    @property
    def packing(self) -> str:
        """The name by which peers compare arrangements."""
        kind = "columns" if self.isa in COLUMN_ISAS else self.isa
        named = sorted(self.backends - ROWS - (PACKED_BY_ISA if self.isa else frozenset()))
        slots = ("slots",) if self.has_slots else ()
        words = (self.platform, kind, self.quantization, *named, *slots, *self.marks)
        return " ".join(word for word in words if word)

    @property
    def is_known(self) -> bool:
        """Whether the content of a slot is a token's row, or packed by a known instruction set."""
        if self.isa:
            return self.backends <= PACKED_BY_ISA
        return self.backends <= (SLOTS if self.has_slots else ROWS)


def inside_of(vllm_config: VllmConfig, spec: AttentionSpec, names: Iterable[str]) -> Inside:
    """Read the facts from these layers."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [context[name] for name in names if name in context]
    backends = frozenset(_backend_of(layer) for layer in layers) - {""}
    isas = {str(getattr(layer, "isa", "")) for layer in layers}
    isas |= {name for name in backends if "AMX" in name}  # MLA's, which does not say it otherwise
    is_mla = isinstance(spec, MLAAttentionSpec)
    is_indexer = bool(backends & INDEXERS) or _role_of(spec) == "indexer"
    is_packed = getattr(spec, "state_content_bytes", None) is not None and not is_mla
    return Inside(
        current_platform.device_name,
        _quantization(vllm_config, spec, layers),
        " ".join(sorted(isas - {""})),
        backends,
        has_slots=is_packed or getattr(spec, "num_head_slots", None) is not None,
        is_indexer=is_indexer,
        marks=_marks(layers),
    )


def shape_of(spec: AttentionSpec, tensors: list[torch.Tensor], inside: Inside) -> PageShape | None:
    """How a block is arranged inside; None: it can only move as it is, between equal instances.

    vLLM's CPU backend fills the memory of a head in a block as it likes: keys column by column,
    then values row by row ("vec", "vec16"), or otherwise.
    """
    first = tensors[0].unsqueeze(1) if tensors[0].dim() == 3 else tensors[0]
    geometries = {(tensor.shape[1:], tensor.stride()[1:], tensor.dtype) for tensor in tensors}
    if len(geometries) > 1 or first.stride(-1) != 1 or first.shape[1] != spec.num_heads:
        return None
    if isinstance(spec, MLAAttentionSpec) and getattr(spec, "max_tp_shards", 1) != 1:
        return None  # the ranks are not replicas of each other
    if inside.is_indexer:
        return _whole(spec, first) if inside.backends <= INDEXERS else None
    if not inside.is_known:
        return None
    if inside.isa:
        return _packed(spec, first, inside.isa)
    if inside.has_slots:
        return _slots(spec, first) if inside.backends else None
    size = 0 if isinstance(spec, MLAAttentionSpec) else spec.head_size
    return _rows(first, size)


def _rows(first: torch.Tensor, size: int) -> PageShape:
    """A token's K of `size` elements and then its V; or one row, without a size."""
    tokens, width = first.shape[2:]
    item, step = first.element_size(), _stride(first, 2)
    sizes = [(0, size), (size, width - size)] if 0 < size < width else [(0, width)]
    planes = tuple(Plane(start * item, step, part * item) for start, part in sizes)
    return PageShape(tokens, _stride(first, 1), planes)


def _slots(spec: AttentionSpec, first: torch.Tensor) -> PageShape | None:
    """K of all heads in the first slot, V in the second."""
    row = spec.head_size * first.element_size()
    if first.shape[1] != 2 or first.shape[3] != spec.num_kv_heads * spec.head_size:
        return None
    planes = tuple(Plane(slot * _stride(first, 1), _stride(first, 2), row) for slot in range(2))
    return PageShape(first.shape[2], row, planes)


def _packed(spec: AttentionSpec, first: torch.Tensor, isa: str) -> PageShape | None:
    tokens, width = first.shape[2:]
    item = first.element_size()
    size = 0 if isinstance(spec, MLAAttentionSpec) else spec.head_size
    if isa not in COLUMN_ISAS or width != 2 * size:
        return _whole(spec, first)
    if first.stride(2) != width:
        return None
    keys = Plane(0, item, item, size, tokens * item)
    values = Plane(tokens * size * item, size * item, size * item)
    return PageShape(tokens, _stride(first, 1), (keys, values))


def _whole(spec: AttentionSpec, first: torch.Tensor) -> PageShape | None:
    """A head's bytes of a block as one row, or as many as the smaller blocks that a backend has
    made of it: those of another size are arranged otherwise."""
    tokens, width = first.shape[2:]
    if first.stride(2) != width:
        return None
    nbytes, num_pieces = tokens * width * first.element_size(), spec.block_size // tokens
    row_stride = _stride(first, 0) if num_pieces > 1 else 0
    plane = Plane(0, 0, nbytes, num_pieces, row_stride)
    return PageShape(1, _stride(first, 1), (plane,))


def _stride(tensor: torch.Tensor, axis: int) -> int:
    """In bytes."""
    return tensor.stride(axis) * tensor.element_size()


def _backend_of(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    return str(backend.get_name()) if backend is not None else ""


def _role_of(spec: AttentionSpec) -> str:
    role = getattr(spec, "cache_role", "")
    return str(getattr(role, "value", role))


def _quantization(vllm_config: VllmConfig, spec: AttentionSpec, layers: list[Any]) -> str:
    """Return how the layers quantise what they keep; some may be exempt. Where values are kept as
    they are, the spec's dtype says all, whatever vLLM calls it."""
    found = {str(getattr(layer, "kv_cache_dtype", "")) for layer in layers} - {""}
    words = found or {str(vllm_config.cache_config.cache_dtype)}
    named = {"fp8_e4m3" if word == "fp8" else word for word in words}
    plain = {word for word in named if getattr(torch, word, None) == spec.dtype} | {"auto"}
    return "+".join(sorted(named - plain))


def _marks(layers: list[Any]) -> tuple[str, ...]:
    """Return other facts in which machines with equal settings may differ."""
    is_shuffled = any(getattr(layer, "uses_shuffled_layout", False) for layer in layers)
    kind = str(current_platform.fp8_dtype()).removeprefix("torch.")
    unusual = (kind,) if kind != "float8_e4m3fn" else ()  # AMD's MI300 counts exponents otherwise
    return (*unusual, *(("shuffled",) if is_shuffled else ()))
