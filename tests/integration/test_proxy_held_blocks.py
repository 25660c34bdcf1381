"""Requests go to the instance that really holds their prompt, and are served whatever becomes of
the events."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.wire.messages import Heartbeat, Publisher
from proxy.fleet import held_blocks
from proxy.fleet.held_blocks import HeldBlocks
from proxy.fleet.registry import Registry
from proxy.http.client import Unreachable
from tests.doubles.publisher import SIZE, PublisherDouble, removed, stored
from tests.doubles.server import ServerDouble
from tests.rigs.proxies import CHAT, COMPLETIONS, RunningProxy, fleet, until

NUM_BLOCKS = 40
CLEARED = {"type": "AllBlocksCleared"}
POLICIES = {"prefill_policy": "prefix_aware", "decode_policy": "prefix_aware"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(held_blocks, "RESTART_SECONDS", 0.05)
    monkeypatch.setattr(held_blocks, "FIND_SECONDS", 20.0)  # this machine may be busy


def prompt_of(rng: random.Random) -> list[int]:
    """A prompt that nobody has seen, of some whole blocks."""
    return [rng.randrange(50_000) for _ in range(NUM_BLOCKS * SIZE)]


class EventsRig:
    """A proxy, and instances that publish their events; P are the prefill instances."""

    def __init__(self, proxy: RunningProxy, servers: list[ServerDouble]) -> None:
        self.proxy = proxy
        self.servers = servers
        self.publishers: list[PublisherDouble] = []

    async def until_known(self, num_blocks: int) -> None:
        """Wait until the proxy knows so many blocks, over all instances."""

        async def are_known() -> bool:
            return (await self.proxy.metrics())["p2p_proxy_known_kv_blocks"] == num_blocks

        await until(are_known, f"{num_blocks} blocks are known")

    async def ask(self, path: str = COMPLETIONS, **asked: Any) -> ServerDouble:
        """Ask, and return the prefill instance that was chosen."""
        counts = [len(self.completions(server)) for server in self.servers]
        status, _, _ = await self.proxy.ask({"model": "tiny", "max_tokens": 2, **asked}, path)
        assert status == 200
        chosen = [
            server
            for server, count in zip(self.servers, counts, strict=True)
            if len(self.completions(server)) > count and server.kind == "P"
        ]
        assert len(chosen) == 1
        return chosen[0]

    def completions(self, server: ServerDouble) -> list[str]:
        """The requests that an instance has computed."""
        return [each.path for each in server.received if each.path != "/tokenize"]


@asynccontextmanager
async def publishing(num_prefill: int = 3, **settings: Any) -> AsyncIterator[EventsRig]:
    """Run a proxy before prefill instances that publish, and one decode instance that does not."""
    async with AsyncExitStack() as parts:
        proxy, prefills, decodes = await parts.enter_async_context(
            fleet(num_prefill, 1, **POLICIES | settings)
        )
        rig = EventsRig(proxy, [*prefills, *decodes])
        for number, server in enumerate(prefills):
            publisher = await parts.enter_async_context(PublisherDouble())
            rig.publishers.append(publisher)
            server.events, server.epoch = publisher.place, 2 + number  # it starts anew
            await server.beat_once()
        for publisher in rig.publishers:
            await publisher.subscribed()
        await proxy.until_ready(*rig.servers)
        yield rig


async def test_a_prompt_goes_where_its_blocks_lie(rng: random.Random) -> None:
    async with publishing() as rig:
        for number in (0, 2, 1):
            prompt = prompt_of(rng)
            await rig.publishers[number].publish(stored(prompt))
            await rig.until_known(NUM_BLOCKS)
            for _ in range(4):
                assert await rig.ask(prompt=prompt) is rig.servers[number]
            await rig.publishers[number].publish({"type": "AllBlocksCleared"})
            await rig.until_known(0)


async def test_blocks_that_were_evicted_draw_nothing(rng: random.Random) -> None:
    async with publishing() as rig:
        prompts = [prompt_of(rng) for _ in range(4)]
        for prompt in prompts:
            await rig.publishers[0].publish(stored(prompt))
        await rig.until_known(4 * NUM_BLOCKS)
        for prompt in prompts:
            gone = [removed(prompt[:end]) for end in range(len(prompt), SIZE, -SIZE)]
            await rig.publishers[0].publish(*gone)
            await rig.publishers[2].publish(stored(prompt[: len(prompt) // 2]))
        await rig.until_known(4 * (1 + NUM_BLOCKS // 2))
        for prompt in prompts:
            assert await rig.ask(prompt=prompt) is rig.servers[2]


async def test_texts_and_chats_are_tokenised_by_an_instance(rng: random.Random) -> None:
    prompt, words = prompt_of(rng), "once upon a time " * 100
    chat = [{"role": "user", "content": words}]
    async with publishing() as rig:
        for server in rig.servers:
            server.tokenizer = lambda _: prompt
        await rig.publishers[1].publish(stored(prompt))
        await rig.until_known(NUM_BLOCKS)
        headers = {"Authorization": "Bearer of the client"}
        for path, asked in ((COMPLETIONS, {"prompt": words}), (CHAT, {"messages": chat})):
            body = {"model": "tiny", "max_tokens": 2, "temperature": 0.5, **asked}
            assert (await rig.proxy.ask(body, path, headers=headers))[0] == 200
        tokenised = [each for s in rig.servers for each in s.received if each.path == "/tokenize"]
        texts = {"model": "tiny", "prompt": words}, {"model": "tiny", "messages": chat}
        assert sorted(map(str, (each.json for each in tokenised))) == sorted(map(str, texts))
        assert {each.headers["Authorization"] for each in tokenised} == {"Bearer of the client"}
        assert rig.completions(rig.servers[1]) == [COMPLETIONS, CHAT]


async def test_what_was_computed_under_other_keys_draws_nothing(rng: random.Random) -> None:
    plain, salted, adapted = (prompt_of(rng) for _ in range(3))
    async with publishing() as rig:
        salts, adapters = [["s"], *[None] * (NUM_BLOCKS - 1)], [["ada"]] * NUM_BLOCKS
        await rig.publishers[0].publish(stored(salted, extra_keys=salts))
        await rig.publishers[1].publish(stored(adapted, lora_name="ada", extra_keys=adapters))
        await rig.publishers[2].publish(stored(plain))
        await rig.until_known(3 * NUM_BLOCKS)
        assert await rig.ask(prompt=salted, cache_salt="s") is rig.servers[0]
        assert await rig.ask(prompt=adapted, model="ada") is rig.servers[1]
        assert await rig.ask(prompt=plain) is rig.servers[2]
        # Nobody holds these: of three equals, the one that was chosen least recently is next.
        assert await rig.ask(prompt=plain, cache_salt="s") is rig.servers[0]
        assert await rig.ask(prompt=salted) is rig.servers[1]
        assert await rig.ask(prompt=adapted) is rig.servers[2]


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": ["several", "prompts" * 1000]},
        {"prompt": [[1, 2, 3], list(range(1000))]},
        {"prompt": [*range(1000), "x"]},
        {"prompt": [1.5] * 1000},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "w" * 4000},
            {"type": "image_url", "image_url": {"url": "http://x"}},
        ]}]},
        {"prompt": "text without a tokenizer " * 100},
    ],
)  # fmt: skip
async def test_a_prompt_without_known_tokens_is_served_by_the_guess(
    asked: dict[str, Any], rng: random.Random
) -> None:
    async with publishing(2) as rig:
        await rig.publishers[0].publish(stored(prompt_of(rng)))
        await rig.until_known(NUM_BLOCKS)
        path = CHAT if "messages" in asked else COMPLETIONS
        first = await rig.ask(path, **asked)
        assert await rig.ask(path, **asked) is first  # by its text


async def test_prompts_with_one_new_beginning_go_to_one_instance(rng: random.Random) -> None:
    async with publishing(3) as rig:
        await rig.publishers[0].publish(stored(prompt_of(rng)))
        await rig.until_known(NUM_BLOCKS)
        for _ in range(3):
            prompt = prompt_of(rng)
            first = await rig.ask(prompt=prompt)  # of which no event will ever come
            assert [await rig.ask(prompt=[*prompt, n]) for n in range(3)] == [first] * 3


async def test_an_instance_that_leaves_takes_its_blocks_along(rng: random.Random) -> None:
    async with publishing(2) as rig:
        await rig.publishers[0].publish(stored(prompt_of(rng)))
        await rig.publishers[1].publish(stored(prompt_of(rng)[: 3 * SIZE]))
        await rig.until_known(NUM_BLOCKS + 3)
        await rig.servers[0].leave()
        await rig.until_known(3)
        await rig.servers[1].beat_once(epoch=9, events=None)
        await rig.until_known(0)


def _readers() -> list[int]:
    """The processes that hear events for this one."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = [int(number) for path in found for number in path.read_text().split()]
    return [n for n in children if b"event_reader" in Path(f"/proc/{n}/cmdline").read_bytes()]


async def test_without_the_process_requests_are_served_and_it_comes_back(
    rng: random.Random,
) -> None:
    prompt = prompt_of(rng)
    async with publishing(2) as rig:
        await rig.publishers[1].publish(stored(prompt))
        await rig.until_known(NUM_BLOCKS)
        (reader,) = _readers()
        os.kill(reader, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(held_blocks, "FIND_SECONDS", 0.01)
            await rig.ask(prompt=prompt)
        os.kill(reader, signal.SIGKILL)
        await rig.until_known(0)
        await rig.ask(prompt=prompt)
        await rig.until_known(NUM_BLOCKS)
        assert await rig.ask(prompt=prompt) is rig.servers[1]
    assert not _readers()


async def test_a_process_that_hangs_is_replaced(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(rng)
    async with publishing(2) as rig:
        await rig.publishers[1].publish(stored(prompt))
        await rig.until_known(NUM_BLOCKS)
        (hung,) = _readers()
        monkeypatch.setattr(held_blocks, "SILENCE_SECONDS", 0.5)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: "has ended: TimeoutError" in caplog.text, "it is told")
        monkeypatch.setattr(held_blocks, "SILENCE_SECONDS", 20.0)  # this machine may be busy
        await until(lambda: len(_readers()) == 1 and hung not in _readers(), "another runs")
        await rig.until_known(NUM_BLOCKS)
        assert await rig.ask(prompt=prompt) is rig.servers[1]


async def test_no_process_where_nobody_weighs_prefixes() -> None:
    async with fleet(1, 1) as (proxy, (prefill, *_), _):
        prefill.events, prefill.epoch = Publisher(1, 2), 2
        await prefill.beat_once()
        await proxy.until_ready(prefill)
        assert not _readers()


async def test_only_the_instances_own_host_is_dialled_and_only_if_it_may_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    class RefusingNames:
        async def addresses(self, address: str) -> tuple[str, ...]:
            asked.append(address)
            raise Unreachable("it is a metadata service")

    registry = Registry()
    events = Publisher(5557, 5558)
    beat = Heartbeat("P", "10.0.0.1:80", "[fd00::7]:9", protocol=8, epoch=1, events=events)
    instance, _ = registry.observe(beat, 0.0)
    held = HeldBlocks(registry, RefusingNames())
    try:
        held.watch(instance)
        await until(lambda: len(asked) > 1, "it is tried again")
        assert set(asked) == {"[fd00::7]:5557"}
        assert "metadata" in caplog.text
        assert not held._watched
    finally:
        await held.close()
    assert not _readers()


async def test_prefill_is_told_what_decode_really_has(rng: random.Random) -> None:
    """Without a session, and as long as decode has it."""
    async with publishing(1) as rig, PublisherDouble() as publisher:
        prefill, decode = rig.servers
        decode.events, decode.epoch = publisher.place, 9
        await decode.beat_once()
        await publisher.subscribed()
        await rig.proxy.until_ready(*rig.servers)
        prompt = prompt_of(rng)
        for has_it in (True, False):
            await publisher.publish(stored(prompt[: 20 * SIZE]) if has_it else CLEARED)
            await rig.until_known(20 if has_it else 0)
            await rig.ask(prompt=prompt)
            params = prefill.received[-1].json["kv_transfer_params"]
            assert params.get("remote_has_tokens", 0) == (20 * SIZE if has_it else 0)
