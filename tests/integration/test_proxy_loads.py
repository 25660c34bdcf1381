"""Much at once: large bodies, many models, many readers. Nobody's request waits for them."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from typing import Any

import pytest

from proxy.http.memory import FREE_BYTES
from proxy.routing.router import Router
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED, fleet, until


async def test_memory_for_bodies_is_bounded_and_small_requests_need_none() -> None:
    release = asyncio.Event()
    large = {**ASKED, "prompt": "x" * (3 * FREE_BYTES)}
    async with fleet(max_body_memory_bytes=5 * FREE_BYTES) as (proxy, [prefill], _):
        prefill.behaviour = Behaviour(hold=release)
        kept = [asyncio.ensure_future(proxy.ask(large)) for _ in range(2)]
        await until(lambda: len(prefill.received) == 2, "two are kept")
        status, body, headers = await proxy.ask(large)
        assert (status, b"memory_full" in body, "Retry-After" in headers) == (503, True, True)
        small = asyncio.ensure_future(proxy.ask())
        await until(lambda: len(prefill.received) == 3, "a small one is taken")
        release.set()
        assert [(await answer)[0] for answer in (*kept, small)] == [200] * 3
        await proxy.until_idle()
        assert (await proxy.metrics())["p2p_proxy_body_bytes"] == 0
        assert (await proxy.ask(large))[0] == 200


async def test_memory_is_free_again_when_the_answer_begins() -> None:
    large = {**ASKED, "prompt": "x" * (3 * FREE_BYTES), "stream": True}
    async with fleet(max_body_memory_bytes=5 * FREE_BYTES) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hang_after=1)
        async with proxy.post(large) as one, proxy.post(large) as two, proxy.post(large) as three:
            assert {one.status, two.status, three.status} == {200}
            assert (await proxy.metrics())["p2p_proxy_body_bytes"] == 0
            decode.behaviour = Behaviour()


async def test_who_has_no_descriptor_left_does_not_blame_an_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_short = False
    create = asyncio.BaseEventLoop.create_connection

    async def failing(
        loop: Any, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        if is_short and host is not None:  # the test's own client gives a socket
            raise OSError(errno.EMFILE, "too many open files")
        return await create(loop, factory, host, port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", failing)
    async with fleet(breaker_failures=1, probe_interval_seconds=0.01) as (proxy, _, [decode]):
        is_short = True
        probed = decode.health_count
        for _ in range(5):
            status, body, _ = await proxy.ask()
            assert (status, b"no_connection" in body) == (503, True)
        assert set((await proxy.states()).values()) == {"ready"}
        is_short = False
        assert (await proxy.ask())[0] == 200
        await until(lambda: decode.health_count > probed, "it is probed again")
        await proxy.until_idle()


async def test_a_model_that_nobody_serves_has_no_queue_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that ends wakes the head of each queue, and each head looks at every instance."""
    num_choices = 0
    choose = Router.choose

    def counted(*arguments: object) -> object:
        nonlocal num_choices
        num_choices += 1
        return choose(*arguments)  # type: ignore[arg-type]

    release = asyncio.Event()
    async with fleet(max_in_flight_per_instance=1) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hold=release)
        first = asyncio.ensure_future(proxy.ask())
        await until(lambda: decode.received, "the only place is taken")
        monkeypatch.setattr(Router, "choose", counted)
        queued = [
            asyncio.ensure_future(proxy.ask({**ASKED, "model": f"model {number}"}))
            for number in range(200)
        ]

        async def are_queued() -> bool:
            return (await proxy.metrics())["p2p_proxy_queued"] == 200

        await until(are_queued, "all are queued")
        release.set()
        outcomes = Counter([(await answer)[0] for answer in (first, *queued)])
        assert outcomes == {200: 201}
        # Each end is two releases of a leg, the end of a request, and the next head's own turn.
        assert num_choices < 10 * 200
        await proxy.until_idle()
