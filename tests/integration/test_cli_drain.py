"""`p2p-engine drain` before a real proxy."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from p2p_engine.cli.drain import run_drain
from p2p_engine.wire.addresses import join_address
from proxy import ProxyConfig
from tests.doubles.server import DECODE, PREFILL, Behaviour, ServerDouble
from tests.rigs.certificates import made_certificate, needs_openssl
from tests.rigs.proxies import STREAMED, fleet, running_proxy, serving

KEY = "open sesame"


@pytest.fixture
def admin_key(tmp_path: Path) -> str:
    """A file with the proxy's admin key."""
    path = tmp_path / "admin.key"
    path.touch(0o600)
    path.write_text(KEY)
    return str(path)


async def drain(names: str, instance: str, seconds: float, key: str = KEY) -> tuple[int, str]:
    """Return the exit code, and what was said of the one proxy."""
    said = io.StringIO()
    told = (names, instance, key, seconds, Console(file=said, width=200))
    code = await asyncio.to_thread(run_drain, *told)
    return code, said.getvalue().partition(": ")[2].strip()


async def test_an_instance_is_drained_when_its_last_request_has_ended(admin_key: str) -> None:
    release = asyncio.Event()
    async with fleet(1, 1, admin_key_file=admin_key) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hold_after=(1, release))
        told = (f"127.0.0.1:{proxy.port}", decode.http_address)
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            code, said = await drain(*told, 30.0, key="wrong")
            assert code == 1
            assert said.startswith("HTTP 401")
            assert (await proxy.states())[decode.http_address] == "ready"
            assert await drain(*told, 0.1) == (1, "1 requests still run there")
            waiting = asyncio.create_task(drain(*told, 30.0))
            release.set()
            await response.read()
        assert await waiting == (0, "drained")
        assert await drain(*told, 30.0) == (0, "drained")


async def test_a_drain_whose_time_was_over_earlier_is_none(admin_key: str) -> None:
    release = asyncio.Event()
    async with fleet(1, 1, admin_key_file=admin_key) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hold_after=(1, release))
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            order = {"instance": decode.http_address, "timeout_seconds": 0}
            async with proxy.post(order, "/instances/remove", headers={"X-Api-Key": KEY}):
                await proxy.until_state(decode, "drained")
            told = (f"127.0.0.1:{proxy.port}", decode.http_address)
            assert await drain(*told, 0.1) == (1, "1 requests still run there")
            release.set()
            await response.read()


@pytest.mark.parametrize("rank", ["", "#1"])
async def test_ranks_are_drained_together_or_alone(admin_key: str, rank: str) -> None:
    async with (
        ServerDouble(PREFILL) as prefill,
        ServerDouble(DECODE, dp_size=2) as decode,
        running_proxy(admin_key_file=admin_key) as proxy,
    ):
        for double in (prefill, decode):
            double.beat(proxy.registration_address)
        await proxy.until_ready(prefill, decode)
        told = (f"127.0.0.1:{proxy.port}", decode.http_address + rank)
        assert await drain(*told, 30.0) == (0, "drained")
        states = {item["name"]: item["state"] for item in (await proxy.status())["instances"]}
        assert states[f"{decode.http_address}#1"] == "drained"
        assert states[f"{decode.http_address}#0"] == ("ready" if rank else "drained")


@needs_openssl
async def test_a_proxy_with_tls_is_asked_by_tls(
    admin_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = cast("dict[str, Any]", made_certificate(tmp_path, "one"))
    config = ProxyConfig(
        host="127.0.0.1", port=0, registration_host="127.0.0.1", registration_port=0,
        prefill="127.0.0.1:9", admin_key_file=admin_key, **certificate,
    )  # fmt: skip
    async with serving(config) as server:
        name = join_address(*server.servers[0].sockets[0].getsockname())
        # By no TLS; with a certificate that is not trusted.
        refusals = (name, "connection"), (f"https://{name}", "no TLS with it: CERTIFICATE")
        for given, why in refusals:
            code, said = await drain(given, "127.0.0.1:9", 0.1)
            assert code == 1
            assert why in said
        monkeypatch.setenv("SSL_CERT_FILE", certificate["tls_cert"])
        code, said = await drain(f"https://{name}", "127.0.0.1:9", 30.0)
        assert (code, said) == (0, "does not know it")  # any more: it sent no heartbeats
