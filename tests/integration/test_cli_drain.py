"""`p2p-engine drain` before a real proxy."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from rich.console import Console

from p2p_engine.cli.drain import addresses_of, run_drain
from tests.doubles.server import Behaviour
from tests.rigs.proxies import STREAMED, fleet

KEY = "open sesame"


async def test_an_instance_is_drained_when_its_last_request_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text(KEY)
    release, said = asyncio.Event(), io.StringIO()
    async with fleet(1, 1, admin_key_file=str(path)) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hold_after=(1, release))
        proxies = addresses_of(f"localhost:{proxy.port},127.0.0.1:1")  # nobody is at the second

        async def drain(key: str, seconds: float) -> int:
            console = Console(file=said, width=200)
            told = (proxies, decode.http_address, key, seconds, console)
            return await asyncio.to_thread(run_drain, *told)

        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            assert await drain("wrong", 30.0) == 1
            assert (await proxy.states())[decode.http_address] == "ready"
            assert await drain(KEY, 0.1) == 1
            waiting = asyncio.create_task(drain(KEY, 30.0))
            release.set()
            await response.read()
        assert await waiting == 0
        assert await drain(KEY, 30.0) == 0
    lines = [line.removeprefix(f"127.0.0.1:{proxy.port}: ") for line in said.getvalue().split("\n")]
    problems = [line for line in lines if not line.startswith(("127.0.0.1:1:", "[::1]:"))]
    assert problems[0].startswith("HTTP 401")
    assert problems[1:4] == ["requests still run after 0.1 s", "drained", "drained"]
