"""CostModel: how long a made-up model takes for its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class CostModel:
    """Prompts are computed one after the other; a decoding step takes longer the more take part.

    Seconds; 0 everywhere is a model that takes no time at all.
    """

    prefill_tokens_per_second: float = 20_000.0
    step_seconds: float = 0.02
    step_seconds_per_request: float = 0.0005
    num_decoding: int = 0
    _prefill: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prefill(self, num_tokens: int) -> None:
        """Take as long as a prompt of this length, behind those that came before."""
        if self.prefill_tokens_per_second:
            async with self._prefill:
                await asyncio.sleep(num_tokens / self.prefill_tokens_per_second)

    async def step(self) -> None:
        """Take as long as one more token of one request."""
        seconds = self.step_seconds + self.step_seconds_per_request * (self.num_decoding - 1)
        if seconds > 0:
            await asyncio.sleep(seconds)
