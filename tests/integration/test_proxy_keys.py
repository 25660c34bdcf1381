"""A proxy with a key: members register and other proxies are told; nobody else is heard."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq
import zmq.asyncio

from p2p_engine.config import EngineConfig
from p2p_engine.control.auth import Curve
from p2p_engine.control.fleet_key import read_key_file, write_key_file
from p2p_engine.errors import ConfigError
from p2p_engine.peers.directory import Directory, RankAddress
from proxy.config import ProxyConfig
from proxy.main import make_server
from tests.doubles.server import ServerDouble
from tests.rigs.proxies import RunningProxy, running_proxy, until

BEAT = {"type": "P", "http_address": "127.0.0.1:1", "zmq_address": "127.0.0.1:2", "protocol": 2}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    """Return the key files of two fleets."""
    paths = tmp_path / "fleet.key", tmp_path / "other.key"
    for path in paths:
        write_key_file(path)
    return str(paths[0]), str(paths[1])


def directory(proxy: RunningProxy, key_file: str, http_address: str) -> Directory:
    """Start an instance's directory, which sends its heartbeats."""
    host, port = proxy.registration_address.split(":")
    config = EngineConfig(
        proxy_ip=host,
        proxy_port=int(port),
        http_port=int(http_address.split(":")[1]),
        key_file=key_file,
    )
    return Directory(config, [RankAddress(0, "127.0.0.1:1", 1)], kv_port=0, role="P")


async def metric(proxy: RunningProxy, name: str) -> float:
    return (await proxy.metrics()).get(f"p2p_proxy_{name}", 0.0)


async def test_members_register_and_other_proxies_are_told(keys: tuple[str, str]) -> None:
    async with ServerDouble("P") as prefill, running_proxy(key_file=keys[0]) as other:
        address = other.registration_address
        async with running_proxy(key_file=keys[0], peers=address) as proxy:
            with directory(proxy, keys[0], prefill.http_address):
                await proxy.until_ready(prefill)
                await other.until_ready(prefill)
            status = await proxy.status()
            assert (status["authenticated"], status["warning"]) == (True, "")
            assert await metric(proxy, "authenticated") == 1


@pytest.mark.parametrize("case", ["another key", "no key"])
async def test_strangers_do_not_register_and_their_log_says_why(
    keys: tuple[str, str], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    key_file = keys[1] if case == "another key" else ""
    async with running_proxy(key_file=keys[0]) as proxy:
        with directory(proxy, key_file, "127.0.0.1:9"):
            told = f"not registered: proxy {proxy.registration_address}"
            await until(lambda: told in caplog.text, "the instance says why")
            await until_refused(proxy)
        assert (await proxy.status())["instances"] == []
        accepted = await metric(proxy, 'heartbeats_total{result="accepted"}')
        assert accepted == 0


async def test_a_proxy_without_a_key_is_not_told(
    keys: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with ServerDouble("P") as prefill, running_proxy() as other:
        address = other.registration_address
        async with running_proxy(key_file=keys[0], peers=address) as proxy:
            with directory(proxy, keys[0], prefill.http_address):
                await proxy.until_ready(prefill)
                told = f"not passed on: proxy {address}: it "
                await until(lambda: told in caplog.text, "it says why")
            assert (await other.status())["instances"] == []


async def test_old_heartbeats_and_a_key_exclude_each_other(
    keys: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The old connector has no key; and who has one does not beat in its form."""
    async with ServerDouble("P", protocol=None) as old, running_proxy(key_file=keys[0]) as proxy:
        old.beat(proxy.registration_address)
        await until_refused(proxy)
        assert "the old connector has none and cannot join it" in caplog.text
        with zmq.Context() as context, context.socket(zmq.DEALER) as member:
            Curve(read_key_file(keys[0])).dial(member)
            member.connect(f"tcp://{proxy.registration_address}")
            member.send(msgpack.packb({**BEAT, "protocol": None}))

            async def is_refused() -> bool:
                return await metric(proxy, 'heartbeats_total{result="old_form"}') > 0

            await until(is_refused, "the old form is refused")
            member.close(0)
        assert "exclude each other" in caplog.text
        assert (await proxy.status())["instances"] == []


async def test_a_flood_without_a_key_costs_the_members_nothing(keys: tuple[str, str]) -> None:
    """Many bare connections that send heartbeats as fast as they can."""
    async with ServerDouble("P") as prefill, running_proxy(key_file=keys[0]) as proxy:
        with zmq.Context() as context:
            dealers = [context.socket(zmq.DEALER) for _ in range(50)]
            for dealer in dealers:
                dealer.connect(f"tcp://{proxy.registration_address}")
                # libzmq gives a connection up whose handshake was refused, and would then wait.
                with contextlib.suppress(zmq.Again):
                    for _ in range(100):
                        dealer.send(msgpack.packb(BEAT), zmq.NOBLOCK)
            with directory(proxy, keys[0], prefill.http_address):
                await proxy.until_ready(prefill)
                assert list(await proxy.states()) == [prefill.http_address]
            for dealer in dealers:
                dealer.close(0)


async def test_listening_for_everybody_without_a_key_is_said_where_people_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_proxy(registration_host="0.0.0.0") as proxy:
            assert "NOT AUTHENTICATED" in (await proxy.status())["warning"]
            assert await metric(proxy, "authenticated") == 0
    assert "NOT AUTHENTICATED: anyone who can reach 0.0.0.0" in caplog.text


def test_a_key_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key_file"):
        make_server(ProxyConfig(key_file=str(tmp_path / "none.key")))


async def until_refused(proxy: RunningProxy) -> None:
    """Wait until the proxy has ended a connection."""

    async def is_refused() -> bool:
        return await metric(proxy, "refused_connections") > 0

    await until(is_refused, "a connection was refused")
