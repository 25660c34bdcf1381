"""A registration port where nothing happens costs nothing, and hears at once what comes.

Its ticks are an hour apart here, so that only what wakes it can be the cause of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, Counter

from p2p_engine.wire.messages import MAX_FRAME_BYTES
from proxy.config import ProxyConfig
from proxy.fleet import discovery
from proxy.fleet.discovery import Discovery
from proxy.fleet.registry import Registry
from tests.hostile.strangers import MORE, flood, long_frame, stranger
from tests.rigs.proxies import until

HOUR = 3600.0
GIB = 1 << 30
REST = 10.0  # a tick that is farther away than this is no usual one


@pytest_asyncio.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Discovery]:
    monkeypatch.setattr(discovery, "REST_SECONDS", HOUR)
    config = ProxyConfig(registration_host="127.0.0.1", registration_port=0)
    loop = asyncio.get_running_loop()
    made = Discovery(
        config,
        Registry(),
        Counter("heartbeats", "of a test", ["result"], registry=CollectorRegistry()),
        lambda instance: None,
        loop.time,
    )
    made.start()
    yield made
    made.close()


def next_tick(port: Discovery) -> float:
    """Return the seconds until the next tick."""
    assert port._timer is not None
    return port._timer.when() - asyncio.get_running_loop().time()


async def falls_asleep(port: Discovery) -> None:
    async def is_resting() -> bool:
        return next_tick(port) > REST

    await until(is_resting, "a rest")


async def test_bytes_that_keep_coming_end_the_rest_each_time(port: Discovery) -> None:
    with stranger(port.address) as connection:
        for _ in range(3):
            await falls_asleep(port)

            async def is_awake() -> bool:
                connection.sendall(long_frame(300, MORE))  # libzmq may read some before epoll looks
                return next_tick(port) < REST

            await until(is_awake, "a tick")


async def test_a_message_that_does_not_end_is_cut_after_a_rest(port: Discovery) -> None:
    with stranger(port.address) as connection:
        await falls_asleep(port)
        sent = await asyncio.to_thread(flood, connection, long_frame(MAX_FRAME_BYTES, MORE), GIB)
    assert sent < GIB


async def test_ticks_go_on_after_one_that_raised(
    port: Discovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, ticks = list[object](), list[float]()

    def tick(now: float) -> None:
        ticks.append(now)
        if len(ticks) == 1:
            raise ValueError("of a test")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    assert port._names is not None
    monkeypatch.setattr(port._names, "tick", tick)
    await until(lambda: len(ticks) > 1, "another tick")
    assert [str(each) for each in raised] == ["of a test"]


async def test_a_tick_that_raises_holds_up_no_other(
    port: Discovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(now: float) -> None:
        raise ValueError("of a test")

    ticked = list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    assert port._names is not None
    assert port._reach is not None
    assert port._sockets is not None
    monkeypatch.setattr(port._names, "tick", fail)
    for name, part in (("reach", port._reach), ("sockets", port._sockets)):
        monkeypatch.setattr(part, "tick", lambda now, name=name: ticked.append(name))
    await until(lambda: len(ticked) >= 4, "the others tick")
    assert ticked[:4] == ["reach", "sockets"] * 2
