"""`p2p-engine simulate`: stand-ins that move real KV, and notice any that is not theirs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from p2p_engine.cli.ports import PortPlan
from p2p_engine.config import EngineConfig
from p2p_engine.control.fleet_key import write_key_file
from p2p_engine.engine import P2pNcclEngine
from p2p_engine.simulate.answers import tokens
from p2p_engine.simulate.cost import CostModel
from p2p_engine.simulate.instance import StandIn
from p2p_engine.simulate.prompts import MadeUpModel, SimulatedPrompt, read_prompts
from p2p_engine.wire.request_ids import ProxyId, new_transfer_id
from tests.rigs.proxies import CHAT, COMPLETIONS, RunningProxy, running_proxy, until
from tests.scale.load import StreamLoad
from tests.support import SeededRandom, eventually

HOST = "127.0.0.1"
MODEL = MadeUpModel("simulated", kv_bytes_per_token=64)
ASKED = {"model": "simulated", "prompt": "once upon a time " * 20, "max_tokens": 3}


class SimulatedPair:
    """A prefill and a decode stand-in behind a proxy, all in this event loop."""

    def __init__(
        self,
        proxy: RunningProxy,
        http: dict[str, str],
        kv: dict[str, str],
        instances: dict[str, StandIn],
    ) -> None:
        self.proxy = proxy
        self.instances = instances
        self.http = http
        self.kv = kv

    async def stats(self, role: str) -> dict[str, Any]:
        async with self.proxy.client.get(f"http://{self.http[role]}/stats") as response:
            content: dict[str, Any] = await response.json()
            return content

    async def until_idle(self) -> None:
        """Wait until neither engine holds or moves anything."""

        async def are_idle() -> bool:
            for stats in [await self.stats(role) for role in self.http]:
                engine = stats["engine"]
                if stats["open"] or engine["live_bytes"] or engine["open_transfers"]:
                    return False
            return True

        await until(are_idle, "both engines are idle")

    async def ask(self, role: str, asked: Any, request_id: str) -> tuple[int, str]:
        """Ask one of them, past the proxy."""
        url = f"http://{self.http[role]}{COMPLETIONS}"
        headers = {"X-Request-Id": request_id}
        async with self.proxy.client.post(url, json=asked, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def pair(send_type: str = "PUT_ASYNC", **settings: Any) -> AsyncIterator[SimulatedPair]:
    """Run two stand-ins that take no time, and a proxy."""
    async with AsyncExitStack() as parts, running_proxy(**settings) as proxy:
        # Which is the first to end: one that still dials may be let in as an instance closes.
        proxy_ip, _, proxy_port = proxy.registration_address.rpartition(":")
        ports = parts.enter_context(PortPlan(HOST))
        http, kv, instances = {}, {}, {}
        for role in "PD":
            http_port, kv_port = ports.take(), ports.take()
            config = EngineConfig(
                host=HOST, send_type=send_type, kv_buffer_size=1 << 22, mem_pool_size_gb=0.004,  # type: ignore[arg-type]
                proxy_ip=proxy_ip, proxy_port=int(proxy_port), http_port=http_port,
                connect_timeout_seconds=20, peer_timeout_seconds=20,
            )  # fmt: skip
            instance = StandIn(config, role, kv_port, MODEL, CostModel(0, 0, 0))
            await instance.start(HOST, http_port)
            parts.push_async_callback(instance.leave, 0)
            instances[role] = instance
            http[role], kv[role] = f"{HOST}:{http_port}", f"{HOST}:{kv_port}"

        async def are_ready() -> bool:
            states = await proxy.states()
            return [states.get(address) for address in http.values()] == ["ready"] * 2

        await until(are_ready, "both are ready")
        yield SimulatedPair(proxy, http, kv, instances)


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_kv_is_moved_and_compared(send_type: str, dispatch: str) -> None:
    shapes: dict[str, tuple[str, dict[str, Any], int]] = {
        "text": (COMPLETIONS, {}, 1),
        "stream": (COMPLETIONS, {"stream": True}, 1),
        "token ids": (COMPLETIONS, {"prompt": list(range(100))}, 1),
        "several": (COMPLETIONS, {"prompt": ["one", "another"], "n": 2}, 4),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, 1),
    }
    async with pair(send_type, dispatch=dispatch) as running:
        num_verified = 0
        for name, (path, changes, num_transfers) in shapes.items():
            asked = {**ASKED, **changes}
            status, body, _ = await running.proxy.ask(asked, path)
            assert status == 200, (name, body)
            assert tokens(asked)[0].removesuffix("é") in body.decode(), name
            num_verified += num_transfers
            assert (await running.stats("D"))["verified"] == num_verified, name
        await running.until_idle()
        assert (await running.stats("D"))["wrong"] == 0


async def test_the_kv_of_another_prompt_is_noticed() -> None:
    """As long as the right one, under the right name, whole: only its words are others."""
    async with pair() as running:
        request_id = str(ProxyId(running.kv["P"], running.kv["D"], new_transfer_id()))
        other = {**ASKED, "prompt": str(ASKED["prompt"]).replace("time", "tide")}
        assert (await running.ask("P", other, request_id))[0] == 200
        status, text = await running.ask("D", ASKED, request_id)
        assert status == 500
        assert json.loads(text)["error"]["message"].startswith("WrongKv")
        assert (await running.stats("D"))["wrong"] == 1
        await running.until_idle()


async def test_no_request_waits_for_an_engine_that_nobody_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: P2pNcclEngine) -> None:
        raise OSError("no step")

    async with pair() as running:
        monkeypatch.setattr(P2pNcclEngine, "poll", fail)
        for _ in range(2):  # the second begins when there are no steps any more
            request_id = str(ProxyId(running.kv["P"], running.kv["D"], new_transfer_id()))
            status, text = await running.ask("D", ASKED, request_id)
            assert status == 500
            assert "not polled any more" in text
        with pytest.raises(OSError, match="no step"):
            await running.instances["D"].broken()


async def test_a_client_that_leaves_ends_its_transfer() -> None:
    async with pair() as running:
        request_id = str(ProxyId(running.kv["P"], running.kv["D"], new_transfer_id()))
        waiting = asyncio.ensure_future(running.ask("D", ASKED, request_id))

        async def waits() -> bool:
            return bool((await running.stats("D"))["open"])

        await until(waits, "decode waits for KV that nobody has sent")
        waiting.cancel()
        await running.until_idle()


def test_every_word_depends_on_all_tokens_before_it() -> None:
    [prompt] = read_prompts(ASKED)
    computed = MODEL.compute(prompt)
    changed = SimulatedPrompt(b"X" + prompt.content[1:])
    assert (MODEL.compute(changed) != computed).all()
    longer = MODEL.compute(SimulatedPrompt(prompt.content + b"."))
    num_full = len(prompt.content) // 64
    assert (longer[:, :num_full] == computed[:, :num_full]).all()
    assert (longer[:, num_full:] != computed[:, num_full:]).all()


@pytest.mark.parametrize("wrong", [None, 3, [], {}, [None]])
def test_what_is_no_prompt_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="neither a text"):
        read_prompts({"prompt": wrong})


@pytest.mark.timeout(600)
async def test_the_command_obeys_and_stops(tmp_path: Path) -> None:
    write_key_file(tmp_path / "fleet.key")
    (tmp_path / "admin.key").touch(0o600)
    (tmp_path / "admin.key").write_text(f"{'a' * 48}\n")
    proxy_args = f"--admin-key-file {tmp_path / 'admin.key'}"
    keys = ("--key-file", str(tmp_path / "fleet.key"), "--proxy-args", proxy_args)
    options = (*keys, "--", "--token-ms", "0")
    async with simulated(tmp_path, *options) as running:
        proxy, output = running.proxy, running.output
        assert (await proxy.status())["authenticated"] is True
        assert (await proxy.ask(ASKED))[0] == 200
        for order, answer in (
            ("add decode", "decode-2 "),
            ("drain decode-1", "done: drain"),
            ("list now", "kill NAME"),
            ("add foo", "add foo: not add ROLE [COUNT]; ROLE is prefill, decode, both"),
            ("add decode all", "add decode all: not add ROLE"),
            ("stop", "stop which? one of prefill-1, decode-1, decode-2"),
            ("stop decode-9", "'decode-9' is not here: prefill-1, decode-1, decode-2"),
        ):
            running.tell(order)
            running.until_said(answer)
        assert sorted((await proxy.states()).values()) == ["drained", "ready", "ready"]
        assert (await proxy.ask(ASKED))[0] == 200
        killed = int(re.findall(r"decode-1 .* (\d+) +\S$", output.read_text(), re.M)[-1])
        os.kill(killed, signal.SIGKILL)
        running.until_said("decode-1 was killed by SIGKILL")
        assert (await proxy.ask(ASKED))[0] == 200


@pytest.mark.timeout(600)
async def test_a_fleet_follows_its_load_and_no_request_fails(
    tmp_path: Path, rng: SeededRandom
) -> None:
    """One prefill instance computes ten prompts a second: twelve want two."""
    limits = ("--autoscale", "prefill=1:2:1,decode=1:2:2", "--autoscale-interval", "0.5")
    costs = ("--prefill-tokens-per-second", "5120", "--token-ms", "50")
    options = (*limits, "--autoscale-window", "3", "--", *costs)
    async with simulated(tmp_path, *options) as running:
        load, is_over = StreamLoad(running.proxy.url, "simulated", 12.0, rng), asyncio.Event()
        loading = asyncio.ensure_future(load.run(is_over))

        async def are_ready() -> bool:
            return list((await running.proxy.states()).values()) == ["ready"] * 4

        await until(are_ready, "there is one more of each role", timeout=240)
        load.rate = 1.0
        for role in ("prefill", "decode"):
            await asyncio.to_thread(running.until_said, f"stopped {role}-")
        is_over.set()
        await loading
        assert load.outcomes.failures == []
        assert load.outcomes.num_ok > 20
        for role in ("prefill", "decode"):
            acts = re.findall(rf"^(adds|drains) {role}-\d+:", running.output.read_text(), re.M)
            sizes = itertools.accumulate((1 if act == "adds" else -1 for act in acts), initial=1)
            assert set(sizes) == {1, 2}, acts
    assert "was killed" not in running.output.read_text()


@dataclass(frozen=True)
class RunningCommand:
    """`p2p-engine simulate` in a process of its own."""

    process: subprocess.Popen[bytes]
    output: Path
    proxy: RunningProxy

    def tell(self, order: str) -> None:
        """Give it a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n".encode())
        self.process.stdin.flush()

    def until_said(self, text: str) -> None:
        """Wait until it has printed something."""
        output = self.output
        eventually(lambda: text in output.read_text(), 120, f"{text!r} in {output.read_text()}")


@asynccontextmanager
async def simulated(folder: Path, *options: str) -> AsyncIterator[RunningCommand]:
    """Run the command with one stand-in of each role, and tell it to quit in the end."""
    with PortPlan(HOST) as ports:
        port, registration_port = ports.take(), ports.take()
    command = [sys.executable, "-c", "from p2p_engine.cli import main; main()", "simulate"]
    command += ["--prefill", "1", "--decode", "1", "--log-dir", str(folder)]
    command += ["--port", str(port), "--registration-port", str(registration_port), *options]
    command += ["--kv-bytes-per-token", "64"]
    output = folder / "output"
    async with aiohttp.ClientSession() as client:
        process = start(command, output)
        running = RunningCommand(process, output, RunningProxy(f"http://{HOST}:{port}", client))
        try:
            running.until_said("type `help`")
            yield running
            running.tell("quit")
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait(10)
            assert process.stdin is not None
            process.stdin.close()


def start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Start the command; what it prints goes to a file."""
    with output.open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
