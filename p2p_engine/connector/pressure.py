"""Block pressure: selects held GET requests to spill when vLLM lacks blocks.

A held request keeps vLLM's blocks until it is pulled, and vLLM cannot take them back. When vLLM has
too few free blocks, the oldest held requests are copied into the engines' own memory.
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
    """All held requests, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool: BlockPool | None = None
        self._held: dict[str, _Held] = {}
        self._orders: list[str] = []

    def bind(self, pool: BlockPool) -> None:
        """Use this pool to count free blocks."""
        self._pool = pool

    def hold(self, request_id: str, num_blocks: int) -> None:
        """Record that a finished request keeps its blocks."""
        self._held[request_id] = _Held(num_blocks)

    def release(self, request_id: str) -> None:
        """Record that its blocks are free."""
        self._held.pop(request_id, None)

    def want(self, num_blocks: int | None = None) -> None:
        """Order spills until `num_blocks` are free (None: one more than are free now)."""
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
        """Tell whether ordered spills will free blocks soon; False once a spill is overdue."""
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
