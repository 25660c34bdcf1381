"""`p2p-engine size`: computes the memory for KV transfer of a model, and the settings for it.

Each figure is shown with its formula in words; docs/sizing.md explains them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2p_engine.cli.model_shape import ModelShape
from p2p_engine.config import GIB, EngineConfig, SendMode
from p2p_engine.memory.arena import (
    MIN_BLOCK_BYTES,
    RESERVED_PART,
    SHARE,
    SHARE_OF_LANDING,
)
from p2p_engine.sizing import MIB, DeviceMemory, Room, device_memory, has_landing_memory
from p2p_engine.transfer_config import CONNECTOR, EXTRA, TransferConfig, merge_configs

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_WAITING = (
    f"all prompts x {SHARE + 1}/{SHARE} (one sender gets {SHARE}/{SHARE + 1} of it) "
    f"x {RESERVED_PART}/{RESERVED_PART - 1} (1/{RESERVED_PART} is kept for what is asked for)"
)
_SPILLED = "all prompts, if vLLM needs the blocks of each while it is held"
_MOVING = f"{SHARE_OF_LANDING} chunks of each prompt: the most that is on its way at a time"


@dataclass(frozen=True)
class Demand:
    """The load of an instance: `num_prompts` of `num_tokens` each wait at a time."""

    num_tokens: int
    num_prompts: int
    tp_size: int = 1
    block_size: int = 16


@dataclass(frozen=True)
class Figure:
    """One value as it is shown, and its formula in words."""

    name: str
    value: str
    how: str


@dataclass(frozen=True)
class RankSize:
    """The needs of one rank of a role: its settings, its landing memory, and the reason."""

    settings: EngineConfig
    landing_bytes: int
    why: str


class Sizing:
    """The figures of one model under one demand; `settings` are those that are given already."""

    def __init__(self, model: ModelShape, demand: Demand, settings: EngineConfig) -> None:
        """Check that the model can be shared out.

        Raises:
            ConfigError: its KV heads cannot be.
        """
        model.check_ranks(demand.tp_size)
        self.model, self.demand, self.settings = model, demand, settings
        self.prompt_bytes = model.prompt_bytes(demand.num_tokens, demand.block_size, demand.tp_size)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of all layers on one rank, the smallest chunk if they are one
        group."""
        return self.demand.block_size * self.model.token_bytes(self.demand.tp_size)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the largest chunk."""
        whole = max(1, self.settings.chunk_bytes // self.block_bytes)
        return min(whole * self.block_bytes, max(self.block_bytes, self.prompt_bytes))

    def rank(self, kv_role: str) -> RankSize:
        """Compute the settings of one rank of this role."""
        needed, why = self._landing(kv_role)
        if not needed:
            return RankSize(self.settings, 0, why)
        least = SHARE_OF_LANDING * self.chunk_bytes
        if needed < least:
            needed, why = least, f"{SHARE_OF_LANDING} chunks: with less, chunks are smaller"
        given = self.settings.kv_buffer_size
        buffer = min(max(given, least), _up(needed, MIB))
        pool = max(0, needed - buffer)
        return RankSize(self._with(buffer, pool), needed, why)

    def _with(self, buffer_bytes: int, pool_bytes: int) -> EngineConfig:
        pool_gib = math.ceil(pool_bytes / GIB * 100) / 100
        return dataclasses.replace(
            self.settings, kv_buffer_size=buffer_bytes, mem_pool_size_gb=pool_gib
        )

    def _landing(self, kv_role: str) -> tuple[int, str]:
        """Return the bytes of buffer and pool together, and their purpose."""
        mode = self.settings.send_type
        if not has_landing_memory(kv_role, mode):
            return 0, "none: it receives nothing, and PUT and PUT_ASYNC hold nothing"
        count, prompt = self.demand.num_prompts, self._landed(self.prompt_bytes)
        if mode is not SendMode.GET:  # plus one chunk: the buffer's end may be too small for one
            waiting = count * prompt + self.chunk_bytes
            total = waiting * (SHARE + 1) * RESERVED_PART / (SHARE * (RESERVED_PART - 1))
            return math.ceil(total), _WAITING
        spilled = count * prompt + self.chunk_bytes
        moving = count * min(prompt, self._landed(SHARE_OF_LANDING * self.chunk_bytes))
        if kv_role == "kv_producer":
            return spilled, _SPILLED
        if kv_role == "kv_consumer":
            return moving, _MOVING
        total = math.ceil(spilled * RESERVED_PART / (RESERVED_PART - 1)) + moving
        kept = f"x {RESERVED_PART}/{RESERVED_PART - 1} (1/{RESERVED_PART} takes no spill)"
        return total, f"{_SPILLED}, {kept}; and {_MOVING}"

    def _landed(self, nbytes: int) -> int:
        """Return the landing memory of `nbytes`: each chunk takes its own pages."""
        return nbytes + math.ceil(nbytes / self.chunk_bytes) * MIN_BLOCK_BYTES


def run_size(
    sizing: Sizing,
    kv_roles: tuple[str, ...],
    room: Room | None,
    console: Console,
    given: TransferConfig | None = None,
) -> int:
    """Print the figures of the model and of each role; return the exit code, 1 if they cannot fit.

    `room` is the memory that vLLM leaves on each GPU; None if the size of the GPU is unknown.
    """
    model, demand = sizing.model, sizing.demand
    ranks = f"{demand.tp_size} ranks" if demand.tp_size > 1 else "1 rank"
    console.print(f"{model.name}: {_layers(model)}; KV cache in {model.dtype}; {ranks}")
    _show(of_model(sizing), console)
    can_fit = True
    for kv_role in kv_roles:
        console.print(f"\n{kv_role}, {sizing.settings.send_type.value}, each rank")
        size = sizing.rank(kv_role)
        figures, fits = of_role(sizing, kv_role, size, room)
        _show(figures, console)
        can_fit = can_fit and fits
        text = f"  --kv-transfer-config '{_config(given or {}, kv_role, size.settings)}'"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not can_fit)


def of_model(sizing: Sizing) -> Iterator[Figure]:
    """Return the KV of a token and of a prompt on one rank."""
    model, demand = sizing.model, sizing.demand
    for kind in model.kinds:
        heads = f"{kind.heads(demand.tp_size)} of {kind.num_kv_heads} heads x "
        yield Figure(
            f"KV of a token, {kind.name}",
            f"{kind.token_bytes(demand.tp_size):,} B",
            f"{kind.num_layers} layers x {heads if kind.num_kv_heads > 1 else ''}{kind.row}",
        )
    counts = (
        f"{kind.num_blocks(demand.num_tokens, demand.block_size):,} blocks ({kind.name})"
        for kind in model.kinds
    )
    yield Figure(
        "KV of a prompt", _size(sizing.prompt_bytes),
        f"{demand.num_tokens:,} tokens in blocks of {demand.block_size}: {', '.join(counts)}",
    )  # fmt: skip
    yield Figure(
        "KV of all prompts", _size(demand.num_prompts * sizing.prompt_bytes),
        f"x {demand.num_prompts} that wait at a time",
    )  # fmt: skip
    yield Figure(
        "chunk", _size(sizing.chunk_bytes),
        "whole blocks of all layers, up to chunk_bytes, one block at least",
    )  # fmt: skip


def of_role(
    sizing: Sizing, kv_role: str, size: RankSize, room: Room | None
) -> tuple[list[Figure], bool]:
    """Return the needs of one rank of this role, and whether a GPU has room for them."""
    settings = size.settings
    figures = [Figure("landing memory", _size(size.landing_bytes), size.why)]
    if size.landing_bytes:
        figures += _on_host(settings, sizing.demand.tp_size)
    if settings.device == "cpu":
        return figures, True
    needed = device_memory(settings, receives=has_landing_memory(kv_role, settings.send_type))
    figures += _on_gpu(settings, needed)
    if room is None:
        unknown = Figure("--gpu-memory-utilization", "not known", "give --gpu-memory GIB")
        return [*figures, unknown], True
    return [*figures, *_of_room(room, needed)], bool(room.remedies(needed))


def _on_host(settings: EngineConfig, num_ranks: int) -> Iterator[Figure]:
    buffer, pool = settings.kv_buffer_size, settings.pool_bytes
    yield Figure(
        "kv_buffer_size",
        f"{buffer}",
        f"as given, else the default; at least {SHARE_OF_LANDING} chunks",
    )
    yield Figure("mem_pool_size_gb", f"{settings.mem_pool_size_gb:g}", "the rest, in host memory")
    is_host = settings.device == "cpu"
    what = "buffer and pool" if is_host else "pool, page-locked"
    nbytes = buffer + pool if is_host else pool
    yield Figure("host memory", _size(nbytes * num_ranks), f"{what}; x {num_ranks} ranks")


def _on_gpu(settings: EngineConfig, needed: DeviceMemory) -> Iterator[Figure]:
    yield Figure(
        "GPU: slabs",
        _size(needed.slab_bytes),
        "to send from, to pack in, and on the way to the pool",
    )
    yield Figure(
        "GPU: groups", _size(needed.group_bytes),
        f"nccl_max_groups {settings.nccl_max_groups} of {settings.nccl_num_channels} channels",
    )  # fmt: skip
    yield Figure("GPU: engine", _size(needed.at_most), "buffer, slabs and groups: vLLM counts none")


def _of_room(room: Room, needed: DeviceMemory) -> Iterator[Figure]:
    why = f"at most: {_size(needed.at_most)} of {_size(room.total_bytes)} must be left"
    remedies = room.remedies(needed)
    for remedy in remedies:
        name, value = remedy.split()
        yield Figure(name, value, why)
    if not remedies:
        yield Figure("--gpu-memory-utilization", "none", room.advice(needed))


def _config(given: TransferConfig, kv_role: str, settings: EngineConfig) -> str:
    """The given value, or a new one, with these sizes."""
    extra: dict[str, object] = {"send_type": settings.send_type.value}
    if has_landing_memory(kv_role, settings.send_type):
        extra["kv_buffer_size"] = settings.kv_buffer_size
        extra["mem_pool_size_gb"] = settings.mem_pool_size_gb
    ours = {"kv_connector": CONNECTOR, "kv_role": kv_role, EXTRA: extra}
    return json.dumps(merge_configs(given, ours))


def _layers(model: ModelShape) -> str:
    return ", ".join(f"{kind.num_layers} layers of {kind.name}" for kind in model.kinds)


def _show(figures: Iterator[Figure] | list[Figure], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    for figure in figures:
        table.add_row(figure.name, Text(figure.value, justify="right"), Text(figure.how))
    console.print(table)


def _size(nbytes: int) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / MIB:,.1f} MiB"


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
