"""A proxy before two instances that record what arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.doubles.recorder import RecordingInstance
from tests.rigs.proxies import RunningProxy, running_proxy, until


@asynccontextmanager
async def recorded(
    **settings: Any,
) -> AsyncIterator[tuple[RunningProxy, RecordingInstance, RecordingInstance]]:
    """Run a proxy before two instances that record what arrives."""
    async with RecordingInstance() as prefill, RecordingInstance() as decode:
        listed = {"prefill": prefill.address, "decode": decode.address, **settings}
        async with running_proxy(**listed) as proxy:

            async def is_ready() -> bool:
                states = await proxy.states()
                return {states.get(each.address) for each in (prefill, decode)} == {"ready"}

            await until(is_ready, "both are ready")
            yield proxy, prefill, decode
