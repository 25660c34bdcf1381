"""WeightsFleet: a proxy and stand-ins of vLLM with doors, and what is ordered there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.doubles.server import DECODE, PREFILL, ServerDouble
from tests.doubles.weights import NEW, DoorsDouble
from tests.rigs.proxies import RunningProxy, running_proxy, until

KEY = "open sesame"
LABEL = "step-2"
CALL = {"method": "reload_weights", "kwargs": {"weights_path": NEW}}
UPDATE = {
    "label": LABEL,
    "calls": [{"path": "/collective_rpc", "body": CALL}],
    "drain_seconds": 20.0,
    "call_seconds": 10.0,
}


class WeightsFleet:
    """A proxy, and instances with doors."""

    def __init__(self, proxy: RunningProxy, prefills: list[Any], decodes: list[Any]) -> None:
        self.proxy = proxy
        self.prefills = prefills
        self.decodes = decodes

    @property
    def all(self) -> list[ServerDouble]:
        return [*self.prefills, *self.decodes]

    @property
    def listed(self) -> dict[str, str]:
        """Settings for another proxy of the same instances."""
        kinds = {"prefill": self.prefills, "decode": self.decodes}
        return {kind: ",".join(d.http_address for d in kinds[kind]) for kind in kinds}

    async def order(self, path: str, asked: Any, key: str = KEY) -> tuple[int, dict[str, Any]]:
        """Give an order; return the status and what is said."""
        headers = {"X-Api-Key": key}
        status, said, _ = await self.proxy.ask(asked, f"/weights/{path}", headers=headers)
        return status, json.loads(said)

    async def until_over(self) -> dict[str, Any]:
        """Wait until the last order is over; return what `/status` says of it."""

        async def order() -> Any:
            shown = (await self.proxy.status())["weights"]["order"]
            return shown if shown and shown["state"] == "done" else None

        shown: dict[str, Any] = await until(order, "the order is over")
        return shown

    async def update(self, **changed: Any) -> dict[str, Any]:
        """Give an order, and wait for its end."""
        status, said = await self.order("update", {**UPDATE, **changed})
        assert status == 200, said
        return await self.until_over()


@asynccontextmanager
async def weights_fleet(
    admin_key: str, num_prefill: int = 1, num_decode: int = 1, **settings: Any
) -> AsyncIterator[WeightsFleet]:
    kinds = [PREFILL] * num_prefill + [DECODE] * num_decode
    doubles = [ServerDouble(kind, doors=DoorsDouble()) for kind in kinds]
    async with AsyncExitStack() as parts:
        for double in doubles:
            await parts.enter_async_context(double)
        given = {"admin_key_file": admin_key, **settings}
        proxy = await parts.enter_async_context(running_proxy(**given))
        for double in doubles:
            double.beat(proxy.registration_address)
        await proxy.until_ready(*doubles)
        yield WeightsFleet(proxy, doubles[:num_prefill], doubles[num_prefill:])


def doors_of(double: ServerDouble) -> DoorsDouble:
    assert double.doors is not None
    return double.doors


async def until_asked(doors: DoorsDouble, path: str) -> None:
    """Wait until a door has been asked."""
    await until(lambda: path in doors.asked, f"{path} is asked")


async def until_queued(proxy: RunningProxy) -> None:
    """Wait until a request is in the queue."""

    async def is_queued() -> bool:
        return bool((await proxy.status())["requests_queued"])

    await until(is_queued, "a request waits")


async def breakers_of(proxy: RunningProxy) -> set[str]:
    """The states of all breakers."""
    shown = (await proxy.status())["instances"]
    return {state for each in shown for state in each["breaker"].values()}
