"""The fifteen promises of the proxy. Where another file keeps one already, it is named here.

 1 no decode without its prefill    test_proxy_failures.py: test_no_decode_without_its_prefill
 2 no orphan KV                     below; test_proxy_recovery.py: test_kv_that_decode_refuses_...
 3 exact accounting                 below; test_proxy_streaming.py: test_a_piece_passes_before_...
 4 the id's contract                below
 5 expiry, readiness, incarnation   below; test_proxy_discovery.py; unit/test_proxy_registry.py
 6 retry before the first byte      below; test_proxy_recovery.py
 7 breaker                          below; test_proxy_recovery.py; unit/test_proxy_breaker.py
 8 streaming fidelity               test_proxy_streaming.py: test_events_split_at_random_...
                                    test_proxy_failures.py: test_a_slow_but_steady_stream_...
                                    test_proxy_clients.py: test_a_client_that_takes_nothing_...
 9 OpenAI across the split          test_proxy_openai.py; tests/vllm with real instances
10 cancel reaches both engines      below (between the legs); test_proxy_clients.py;
                                    test_proxy_recovery.py: test_leaving_the_queue_...
11 radix tree and load              below; property/test_prefix_tree.py
12 overload                         below; unit/test_proxy_admission.py
13 scale in and out                 below; test_proxy_instances.py
14 idle connections                 below; the overhead itself is measured, not tested
15 observability and survival       below; unit/test_proxy_metrics.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import resource
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from p2p_engine.simulate.answers import completion, events
from p2p_engine.wire.request_ids import ProxyId
from proxy.fleet.instances import Role
from proxy.fleet.upstream import Upstream
from proxy.observe import request_log
from proxy.openai import payload
from proxy.openai.prompt import BLOCK_BYTES, Prompt
from proxy.routing.prefix_tree import PrefixTree
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import ASKED, STREAMED, RunningProxy, fleet, running_proxy, until
from tests.rigs.routing import RoutingFleet
from tests.support import records_of

if TYPE_CHECKING:
    from tests.support import SeededRandom

NUM_CANCELLED = 2000
# How other connectors of this protocol read the addresses out of an id.
FOREIGN_PARSERS = (
    re.compile(r"___decode_addr_(.*):(\d+)"),
    re.compile(r"___prefill_addr_(.*):(\d+)___"),
)


async def come_and_go(proxy: RunningProxy, rng: SeededRandom, longest: float) -> None:
    """Ask, and leave at any moment."""
    answer = asyncio.ensure_future(proxy.ask(rng.choice([ASKED, STREAMED])))
    await asyncio.wait([answer], timeout=rng.uniform(0.0, longest))
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)


@pytest.mark.timeout(300)
async def test_02_no_kv_is_left_behind(rng: SeededRandom, caplog: pytest.LogCaptureFixture) -> None:
    """Only of a prefill whose answer nobody took can KV stay, until the engine's lease ends it."""
    caplog.set_level(logging.INFO, logger="proxy.access")
    async with fleet(2, 2) as (proxy, prefills, decodes):
        for double in decodes:
            double.behaviour = Behaviour(pace=0.002)
        for _ in range(NUM_CANCELLED // 40):
            await asyncio.gather(*(come_and_go(proxy, rng, 0.15) for _ in range(40)))
        await proxy.until_idle()
        everyone = (*prefills, *decodes)
        await until(lambda: all(r.ended for m in everyone for r in m.received), "all legs ended")
        samples = await proxy.metrics()
        ended = sum(
            n for name, n in samples.items() if name.startswith("p2p_proxy_requests_total{")
        )

        def lines_of_all() -> list[Any]:
            told = records_of(request_log.logger, caplog)
            texts = [line for record in told for line in record.message.splitlines()]
            return [json.loads(text) for text in texts] if len(texts) == ended else []

        lines = await until(lines_of_all, "every request has its line in the log")
        untold = {line["transfer_id"] for line in lines if line["prefill_ms"] is None}
        await until(lambda: set.union(*(m.kv for m in decodes)) <= untold, "KV is let go of")
        assert len(lines) > NUM_CANCELLED // 10  # the rest left before they had asked
        assert len(untold) < len(lines)


@pytest.mark.timeout(300)
async def test_03_every_count_returns_to_zero(rng: SeededRandom) -> None:
    """Whatever fails, is tried again, waits or is given up."""
    hows = [
        Behaviour(), Behaviour(), Behaviour(pace=0.002), Behaviour(reset=True),
        Behaviour(status=503), Behaviour(status=400, body=b"{}"), Behaviour(cut_after=1),
    ]  # fmt: skip
    limits: dict[str, Any] = {"max_in_flight_per_instance": 8, "breaker_seconds": 0.05}
    async with fleet(2, 2, **limits) as (proxy, prefills, decodes):
        for _ in range(15):
            for double in (*prefills, *decodes):
                double.behaviour = rng.choice(hows)
            await asyncio.gather(*(come_and_go(proxy, rng, 0.2) for _ in range(40)))
        await proxy.until_idle()
        samples = await proxy.metrics()
        assert samples["p2p_proxy_running"] == samples["p2p_proxy_queued"] == 0
        status = await proxy.status()
        assert all(i["tokens_in_flight"] == 0 for i in status["instances"])


def test_04_no_client_can_touch_the_id(rng: SeededRandom) -> None:
    """Nothing of a client's is in it, and every reader finds the registered addresses."""
    alphabet = "abc.-_:[]0123456789ABCDEF"
    for _ in range(100_000):
        host = "".join(rng.choices("abc-.0123456789", k=rng.randint(1, 12))).strip("-.") or "h"
        hosts = (host, "10.0.0.1", "[fe80::1]", "gpu-7.rack.example")
        prefill, decode = (f"{rng.choice(hosts)}:{rng.randint(1, 65535)}" for _ in range(2))
        identifier = str(ProxyId(prefill, decode, f"{rng.getrandbits(128):032x}"))
        assert set(identifier) <= set(alphabet + "defghijklmnopqrstuvwxyz")
        found = [parser.search(identifier) for parser in FOREIGN_PARSERS]
        assert [":".join(match.groups()) for match in found if match] == [decode, prefill]


async def test_04_what_a_client_calls_its_request_stays_here(rng: SeededRandom) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        for _ in range(50):
            theirs = "".join(rng.choices("ab_:-.1/ %\"'<>", k=40)).strip() + "___decode_addr_e:1"
            _, _, headers = await proxy.ask(headers={"X-Request-Id": theirs})
            assert headers["X-Request-Id"] == theirs
        for received in (*prefill.received, *decode.received):
            assert "addr_e:1" not in str(received.headers)


async def test_05_the_wall_clock_means_nothing() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        now = time.time()
        for shift in (3600.0, -3600.0):
            with patch("time.time", lambda shift=shift: now + shift):
                await decode.beat_once()
                assert (await proxy.ask())[0] == 200
                assert set((await proxy.states()).values()) == {"ready"}
        assert len(prefill.received) == 2


async def test_06_one_bad_prefill_of_four_costs_no_client_anything() -> None:
    async with fleet(4, 2, breaker_seconds=0.1) as (proxy, [bad, *_], _):
        bad.behaviour = Behaviour(reset=True)
        for _ in range(20):
            answers = await asyncio.gather(*(proxy.ask() for _ in range(50)))
            assert all(status == 200 for status, _, _ in answers)
            assert all(json.loads(body) == completion(ASKED, None) for _, body, _ in answers)
        assert bad.received


async def test_07_a_thousand_client_errors_open_no_breaker() -> None:
    async with fleet() as (proxy, [prefill], _):
        prefill.behaviour = Behaviour(status=400, body=b"{}")
        for _ in range(20):
            answers = await asyncio.gather(*(proxy.ask() for _ in range(50)))
            assert {status for status, _, _ in answers} == {400}
        for shown in (await proxy.status())["instances"]:
            assert set(shown["breaker"].values()) == {"closed"}


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
async def test_10_leaving_between_the_legs_lets_the_kv_go(asked: dict[str, object]) -> None:
    """Prefill has sent it, decode has not heard of it: decode is asked to take it for nobody."""
    original, reached = Upstream.post, asyncio.Event()

    async def held(self: Upstream, instance: Any, role: Role, *rest: Any, **more: Any) -> Any:
        if role is Role.DECODE and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return await original(self, instance, role, *rest, **more)

    async with fleet() as (proxy, [prefill], [decode]):
        with patch.object(Upstream, "post", held):
            answer = asyncio.ensure_future(proxy.ask(asked))
            await asyncio.wait_for(reached.wait(), 20)
            assert len(decode.kv) == 1
            answer.cancel()
            await until(lambda: not decode.kv, "the KV is let go of")
        await proxy.until_idle()
        assert len(prefill.received) == len(decode.received) == 1
        assert decode.received[0].json["max_tokens"] == 1
        await until(lambda: decode.received[0].ended, "nobody waits for the rest")


def test_11_a_million_prompts_fit_into_the_same_memory() -> None:
    tree: PrefixTree[str] = PrefixTree(50_000)
    peaks = []
    for number in range(1_000_000):
        tree.insert((number % 100, number, -number), "abcd"[number % 4])
        if number % 2_500 == 0:  # as often as the proxy would, or less
            for _ in tree.tidy(lambda _: True):
                pass
        if number in (100_000, 999_999):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    tree.check()
    assert peaks[1] <= peaks[0] * 1.1


def test_11_shared_prompts_meet_their_kv_and_the_load_stays_even() -> None:
    rng, fleet = random.Random(4), RoutingFleet(prefill_policy="prefix_aware")
    prefills = [fleet.add("P") for _ in range(4)]
    fleet.add("D")
    shared = [rng.randbytes(BLOCK_BYTES * 16) for _ in range(48)]
    holds: set[tuple[object, int]] = set()
    running: deque[Any] = deque()
    hits, work, num_requests = 0, Counter[object](), 4000
    for _ in range(num_requests):
        group = rng.randrange(len(shared))
        pair = fleet.pair(Prompt(text=shared[group] + rng.randbytes(BLOCK_BYTES)))
        hits += (pair.prefill, group) in holds
        holds.add((pair.prefill, group))
        assert pair.prefill is not None
        running.append(fleet.registry.take_leg(pair.prefill, Role.PREFILL, pair.prefill_tokens))
        if len(running) > 16:
            running.popleft().release()
        work.update({prefill: prefill.in_flight[Role.PREFILL] for prefill in prefills})
    assert hits >= 0.9 * (num_requests - len(shared))
    assert max(work.values()) <= 1.5 * sum(work.values()) / len(prefills)


async def test_12_ten_times_too_much_is_refused_and_the_rest_is_served() -> None:
    release = asyncio.Event()
    limits: dict[str, Any] = {"max_in_flight_per_instance": 8, "max_queued": 8}
    async with fleet(**limits) as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(hold=release)
        answers = [asyncio.ensure_future(proxy.ask(STREAMED)) for _ in range(160)]
        refused = 160 - 16
        await until(lambda: sum(a.done() for a in answers) == refused, "the rest is refused")
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 200
        assert (await proxy.metrics())["p2p_proxy_queued"] == 8
        assert len(prefill.received) == 8
        release.set()
        outcomes = Counter([(await answer)[0] for answer in answers])
        assert outcomes == {200: 16, 429: refused}
        whole = b"".join(events(STREAMED))
        assert sum(answer.result()[1] == whole for answer in answers) == 16
        assert all("Retry-After" in a.result()[2] for a in answers if a.result()[0] == 429)
        await proxy.until_idle()


async def test_13_coming_and_going_under_load_costs_no_request(tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    key.chmod(0o600)
    async with (
        ServerDouble("P") as more_prefill,
        ServerDouble("D") as more_decode,
        fleet(2, 2, admin_key_file=str(key)) as (proxy, prefills, decodes),
    ):
        is_over, outcomes = asyncio.Event(), Counter[int]()

        async def load() -> None:
            while not is_over.is_set():
                status, body, _ = await proxy.ask(STREAMED)
                outcomes[status if body == b"".join(events(STREAMED)) else 0] += 1

        async def order(verb: str, **body: str) -> None:
            url = f"{proxy.url}/instances/{verb}"
            async with proxy.client.post(url, json=body, headers={"X-Api-Key": "k"}) as response:
                assert response.status == 200

        async def has_served(double: ServerDouble, count: int) -> bool:
            return len(double.received) >= count

        workers = [asyncio.ensure_future(load()) for _ in range(8)]
        added = {"prefill": more_prefill, "decode": more_decode}
        for (kind, double), leaving in zip(added.items(), (prefills[0], decodes[0]), strict=True):
            await order(
                "add", type=kind, instance=double.http_address, zmq_address=double.zmq_address
            )
            await until(partial(has_served, double, 5), "the new one serves")
            await order("remove", instance=leaving.http_address)
            await proxy.until_state(leaving, "drained")
            num_received = len(leaving.received)
            await until(partial(has_served, double, len(double.received) + 5), "the others go on")
            assert len(leaving.received) == num_received
        is_over.set()
        await asyncio.gather(*workers)
        assert set(outcomes) == {200}
        await proxy.until_idle()


async def test_14_idle_connections_that_all_close_fail_no_request() -> None:
    """All of them carried a request before, and break as the next one comes."""
    async with fleet() as (proxy, [prefill], [decode]):
        release = asyncio.Event()
        decode.behaviour = prefill.behaviour = Behaviour(hold=release)
        first = [asyncio.ensure_future(proxy.ask()) for _ in range(100)]
        await until(lambda: len(prefill.received) == 100, "a hundred connections are in use")
        release.set()
        assert [(await answer)[0] for answer in first] == [200] * 100
        decode.behaviour = prefill.behaviour = Behaviour(reset_reused=True)
        with patch("proxy.fleet.upstream.RACE_SECONDS", 20.0):
            answers = await asyncio.gather(*(proxy.ask() for _ in range(100)))
        assert [status for status, _, _ in answers] == [200] * 100


async def test_15_a_proxy_can_die_and_come_back() -> None:
    """Its neighbour serves on, and it knows the fleet again as soon as that has beaten once."""
    async with ServerDouble("P") as prefill, ServerDouble("D") as decode, running_proxy() as other:
        async with running_proxy(peers=other.registration_address) as first:
            for double in (prefill, decode):
                double.beat(first.registration_address)
            await first.until_ready(prefill, decode)
            await other.until_ready(prefill, decode)
            port = int(first.registration_address.rpartition(":")[2])
        for _ in range(5):
            assert (await other.ask())[0] == 200
        async with running_proxy(registration_port=port) as again:
            for double in (prefill, decode):
                await double.beat_once()
            await again.until_ready(prefill, decode)
            assert (await again.ask())[0] == 200


async def test_kv_of_a_prefill_whose_answer_is_too_long_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(max_retries=0) as (proxy, _, [decode]):
        monkeypatch.setattr(payload, "MAX_PREFILL_BYTES", 10)
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "prefill_bad_answer")
        await until(lambda: decode.received, "decode is asked to let go of it")
        await until(lambda: not decode.kv, "the KV is let go of")
        assert decode.received[0].json["max_tokens"] == 1
        metrics = await proxy.metrics()
        assert metrics['p2p_proxy_releases_total{result="done"}'] == 1
