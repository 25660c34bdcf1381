"""Much at once: large bodies, many models, many readers. Nobody's request waits for them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from asyncio.subprocess import Process
from collections import Counter
from typing import Any

import pytest

from proxy.config import DISPATCHES
from proxy.http.deadlines import Deadlines
from proxy.http.memory import FREE_BYTES, LARGE_BYTES, BodyMemory, Keep, Span
from proxy.openai import parsers
from proxy.openai.parser import Parsed
from proxy.routing.router import Router
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED, COMPLETIONS, RunningProxy, fleet, until


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


LARGE = {**ASKED, "prompt": "Zürich\n" * (LARGE_BYTES // 8), "tools": ["t" * LARGE_BYTES]}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were started to parse, the latest last."""
    pids, start = list[int](), parsers._start

    async def noting(file: int) -> Process:
        process = await start(file)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(parsers, "_start", noting)
    return pids


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """The bodies that were given to a parser, the latest last."""
    bodies, ask = list[Span](), parsers._ask

    async def noting(parser: Process, body: Span) -> Parsed:
        bodies.append(body)
        return await ask(parser, body)

    monkeypatch.setattr(parsers, "_ask", noting)
    return bodies


@pytest.mark.parametrize("dispatch", DISPATCHES)
async def test_a_large_body_reaches_both_instances_as_it_was_written(dispatch: str) -> None:
    async with fleet(dispatch=dispatch) as (proxy, [prefill], [decode]):
        for asked in (LARGE, {**LARGE, "kv_transfer_params": {"remote_host": "evil"}}):
            status, body, _ = await proxy.ask(asked)
            assert status == 200, body
            first, second = prefill.received[-1], decode.received[-1]
            for name in LARGE:
                assert second.json[name] == LARGE[name]
            assert {**LARGE, "max_tokens": 1}.items() <= first.json.items()
            assert b"evil" not in first.body + second.body
            assert first.json["kv_transfer_params"]["do_remote_decode"]
            assert second.json["kv_transfer_params"]["do_remote_prefill"]
        assert (await proxy.ask(LARGE, "/tokenize"))[0] == 200
        await until_forgotten(proxy)


async def until_forgotten(proxy: RunningProxy) -> None:
    """Wait until nothing of any body is kept."""
    await proxy.until_idle()

    async def is_forgotten() -> bool:
        return (await proxy.metrics())["p2p_proxy_body_bytes"] == 0

    await until(is_forgotten, "nothing of any body is kept")


async def test_a_large_body_that_is_no_json_is_a_400() -> None:
    async with fleet() as (proxy, _, _):
        for body in (b"{" + b"x" * LARGE_BYTES, b" " * (2 * LARGE_BYTES), b"[" * (2 * LARGE_BYTES)):
            async with proxy.client.post(proxy.url + COMPLETIONS, data=body) as answer:
                assert (answer.status, b"invalid_json" in await answer.read()) == (400, True)
        await until_forgotten(proxy)


async def test_a_parser_that_dies_costs_its_request_only(started: list[int]) -> None:
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(LARGE))[0] == 200
        (pid,) = started
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.ensure_future(proxy.ask(LARGE)) for _ in range(4)]
        await until(lambda: sum(each.done() for each in asked) == 3, "only one waits")
        os.kill(pid, signal.SIGKILL)
        outcomes = [await each for each in asked]
        assert Counter(status for status, _, _ in outcomes) == {200: 3, 503: 1}
        assert any(b"parser_failed" in body for _, body, _ in outcomes)
        assert (await proxy.ask(LARGE))[0] == 200
        assert len(started) <= 3
        await until_forgotten(proxy)


async def test_a_parser_that_is_late_is_replaced(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "NUM_PARSERS", 1)
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(LARGE))[0] == 200
        with monkeypatch.context() as quick:
            quick.setattr(parsers, "SECONDS", 0.2)
            os.kill(started[0], signal.SIGSTOP)
            status, body, headers = await proxy.ask(LARGE)
        assert (status, b"parser_busy" in body, "Retry-After" in headers) == (503, True, True)
        assert (await proxy.ask(LARGE))[0] == 200
        assert len(started) == 2
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)
        await until_forgotten(proxy)


async def test_a_parser_that_hangs_is_replaced_also_if_its_client_has_left(
    started: list[int], begun: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "NUM_PARSERS", 1)
    monkeypatch.setattr(parsers, "SECONDS", 30.0)  # this machine may be busy
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(LARGE))[0] == 200
        monkeypatch.setattr(parsers, "SECONDS", 1.0)
        os.kill(started[0], signal.SIGSTOP)
        leaving = asyncio.ensure_future(proxy.ask(LARGE))
        await until(lambda: len(begun) == 2, "the parser has it")
        leaving.cancel()
        await proxy.until_idle()
        monkeypatch.setattr(parsers, "SECONDS", 30.0)
        assert (await proxy.ask(LARGE))[0] == 200
        assert len(started) == 2
        await until_forgotten(proxy)


async def test_too_many_bodies_that_wait_for_a_parser_are_refused(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "MAX_WAITING", 2)
    monkeypatch.setattr(parsers, "NUM_PARSERS", 1)
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(LARGE))[0] == 200
        os.kill(started[0], signal.SIGSTOP)
        asked = [asyncio.ensure_future(proxy.ask(LARGE)) for _ in range(6)]
        await until(lambda: sum(each.done() for each in asked) == 3, "three are refused")
        os.kill(started[0], signal.SIGCONT)
        assert Counter([(await each)[0] for each in asked]) == {200: 3, 503: 3}
        await until_forgotten(proxy)


async def test_who_leaves_while_a_body_is_parsed_leaves_nothing_behind(
    started: list[int], begun: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "NUM_PARSERS", 1)
    async with fleet() as (proxy, _, [decode]):
        assert (await proxy.ask(LARGE))[0] == 200
        os.kill(started[0], signal.SIGSTOP)
        leaving = [asyncio.ensure_future(proxy.ask(LARGE)) for _ in range(4)]

        async def have_come() -> bool:
            status = await proxy.status()
            return status["requests_in_flight"] == 4 and len(begun) == 2

        await until(have_come, "all have come, and a parser has one")
        for each in leaving:
            each.cancel()
        await proxy.until_idle()
        os.kill(started[0], signal.SIGCONT)
        assert (await proxy.ask(LARGE))[0] == 200
        assert decode.received[-1].json["prompt"] == LARGE["prompt"]
        assert len(started) == 1
        await until_forgotten(proxy)


async def test_a_body_that_is_parsed_takes_no_memory_after_it_was_freed(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "NUM_PARSERS", 1)
    memory, parser = BodyMemory(1 << 30), parsers.Parsers(Deadlines())
    for is_first in (True, False):
        keep = Keep.new(memory, 2 * LARGE_BYTES)
        assert keep.add(b'{"prompt":"%b"}' % (b"x" * LARGE_BYTES))
        body = keep.content()
        assert not isinstance(body, bytes)
        asked = asyncio.ensure_future(parser.parse(body))
        if is_first:
            await asked
        else:
            os.kill(started[0], signal.SIGSTOP)
            await asyncio.wait([asked], timeout=0.05)
            asked.cancel()
            await asyncio.wait([asked])
        keep.free()
    os.kill(started[0], signal.SIGCONT)
    await asyncio.gather(*parser._jobs)
    await until(lambda: memory.num_bytes == 0, "both are freed")
    assert os.fstat(memory.file).st_blocks == 0
    await parser.close()
    memory.close()


async def test_a_parser_that_somebody_killed_costs_no_request(started: list[int]) -> None:
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(LARGE))[0] == 200
        os.kill(started[0], signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await proxy.ask(LARGE))[0] == 200


async def test_a_large_request_goes_to_another_instance_if_one_breaks() -> None:
    async with fleet(2) as (proxy, prefills, [decode]):
        for prefill in prefills:
            prefill.behaviour = Behaviour(status=502)
        assert (await proxy.ask(LARGE))[0] == 502
        prefills[0].behaviour = prefills[1].behaviour = Behaviour()
        decode.behaviour = Behaviour(status=400)
        assert (await proxy.ask(LARGE))[0] == 400
        decode.behaviour = Behaviour()
        assert (await proxy.ask(LARGE))[0] == 200
        await until_forgotten(proxy)
