"""Pictures of the status page for the documents: `make screenshots`.

A simulated fleet at work, one instance of it draining, in headless Chromium: wide and narrow, light
and dark.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.simulate import SimulatedFleet
from tests.page.chromium import chromium_page
from tests.scale.load import StreamLoad

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"wide": (1200, 1200), "narrow": (390, 1750)}
SCHEMES = {"light": False, "dark": True}
COSTS = ("--prefill-tokens-per-second=10000", "--token-ms=60", "--kv-bytes-per-token=4096")
RATE = 4.0
READY_SECONDS = 120.0


async def take(fleet: SimulatedFleet, folder: Path) -> None:
    """Let the fleet work for a while and take all pictures."""
    assert fleet.proxy is not None
    is_over = asyncio.Event()
    load = StreamLoad(fleet.proxy.url, "simulated", RATE, random.Random(1))
    loading = asyncio.ensure_future(load.run(is_over))
    await asyncio.sleep(5.0)
    await asyncio.to_thread(fleet.order, "remove", fleet.find("decode-3"))
    async with chromium_page(folder / "profile") as page:
        for size, (width, height) in SIZES.items():
            for scheme, is_dark in SCHEMES.items():
                await page.look(width=width, height=height, is_dark=is_dark)
                await page.open(f"{fleet.proxy.url}/")
                await asyncio.sleep(3.0)  # two pictures of it at least: rates are differences
                picture = await page.picture()
                path = DOCS / f"status-{size}-{scheme}.png"
                await asyncio.to_thread(path.write_bytes, picture)
    is_over.set()
    await loading
    assert not load.outcomes.failures, load.outcomes.failures[:3]


def main() -> None:
    """Start the fleet, take the pictures, stop it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SimulatedFleet(vllm_args=COSTS, log_dir=Path(folder)) as fleet,
    ):
        fleet.start_proxy()
        for role in (*[MemberRole.PREFILL] * 2, *[MemberRole.DECODE] * 3):
            fleet.start(role)
        fleet.wait_ready(timeout=READY_SECONDS)
        asyncio.run(take(fleet, Path(folder)))


if __name__ == "__main__":
    main()
