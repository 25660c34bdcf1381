"""Block pressure: which of the requests that are held for GET are spilled when vLLM lacks blocks.

A held request keeps vLLM's blocks until it is pulled; vLLM cannot take them back. When it finds too
few, the oldest held ones are ordered into the engines' own memory, as many as it lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

SPILL_SECONDS = 1.0  # far more than a copy takes; after that vLLM preempts, as it would without us


@dataclass
class _Held:
    """A request whose blocks wait to be pulled."""

    num_blocks: int
    ordered_until: float | None = None  # when its spill is given up for counting; None: not ordered


class Pressure:
    """All requests that are held, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool: BlockPool | None = None
        self._held: dict[str, _Held] = {}
        self._orders: list[str] = []

    def bind(self, pool: BlockPool) -> None:
        """Look here for free blocks."""
        self._pool = pool

    def hold(self, request_id: str, num_blocks: int) -> None:
        """Note that a finished request keeps its blocks."""
        self._held[request_id] = _Held(num_blocks)

    def release(self, request_id: str) -> None:
        """Note that its blocks are free."""
        self._held.pop(request_id, None)

    def want(self, num_blocks: int | None = None) -> None:
        """Order what is needed for so many blocks (None: for one more than are free)."""
        free = self._pool.get_num_free_blocks() if self._pool is not None else 0
        lacking = 1 if num_blocks is None else num_blocks - free
        lacking -= sum(held.num_blocks for held in self._coming())
        for request_id, held in self._held.items():
            if lacking <= 0:
                return
            if held.ordered_until is None:
                held.ordered_until = self._clock() + SPILL_SECONDS
                self._orders.append(request_id)
                lacking -= held.num_blocks

    @property
    def is_easing(self) -> bool:
        """Whether blocks will be free soon; not to be hoped for, once a spill was overdue."""
        return 0 < len(self._coming()) == len(self._ordered)

    def take_orders(self) -> list[str]:
        """Return the requests to spill; each once."""
        orders, self._orders = self._orders, []
        return orders

    @property
    def _ordered(self) -> list[_Held]:
        return [held for held in self._held.values() if held.ordered_until is not None]

    def _coming(self) -> list[_Held]:
        now = self._clock()
        return [held for held in self._ordered if now < (held.ordered_until or 0.0)]
