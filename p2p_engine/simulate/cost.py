"""CostModel: how long a made-up model takes for its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class CostModel:
    """Prompts are computed one after the other. A decoding step takes longer if more requests take
    part. All values are seconds; with 0 everywhere, the model takes no time."""

    prefill_tokens_per_second: float = 20_000.0
    step_seconds: float = 0.02
    step_seconds_per_request: float = 0.0005
    num_decoding: int = 0
    _prefill: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prefill(self, num_tokens: int) -> None:
        """Wait as long as a prompt of this length takes, behind earlier prompts."""
        if self.prefill_tokens_per_second:
            async with self._prefill:
                await asyncio.sleep(num_tokens / self.prefill_tokens_per_second)

    async def step(self) -> None:
        """Wait as long as one more token of one request takes."""
        seconds = self.step_seconds + self.step_seconds_per_request * (self.num_decoding - 1)
        if seconds > 0:
            await asyncio.sleep(seconds)
