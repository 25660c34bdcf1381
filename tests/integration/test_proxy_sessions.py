"""Turns of a session: the proxy tells prefill where the last turn has left its KV."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.wire.request_ids import ProxyId
from proxy.fleet import last_turns
from proxy.fleet.last_turns import LastTurn, LastTurns
from proxy.http.memory import BodyMemory, Keep, Span
from proxy.openai.prompt import COMPARED_BYTES, Prompt
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import ASKED, STREAMED, RunningProxy, fleet, until


def params_of(instance: ServerDouble) -> dict[str, Any]:
    params: dict[str, Any] = instance.received[-1].json["kv_transfer_params"]
    return params


async def ask(proxy: RunningProxy, session: str | None, asked: Any = ASKED) -> None:
    headers = {} if session is None else {"X-Session-Id": session}
    status, _, _ = await proxy.ask(asked, headers=headers)
    assert status == 200


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
async def test_the_next_turn_names_the_last(asked: dict[str, Any]) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        await ask(proxy, "a", asked)
        assert params_of(decode)["stash"] is True
        assert "stashed_as" not in params_of(prefill)
        name = params_of(prefill)["transfer_id"]
        host, _, port = decode.zmq_address.rpartition(":")
        for session in ("b", None):
            await ask(proxy, session, asked)
            assert "stashed_as" not in params_of(prefill)
        assert params_of(decode)["stash"] is False  # nobody will ask for it
        await ask(proxy, "a", asked)
        told = params_of(prefill)
        assert (told["stashed_as"], told["stashed_host"], told["stashed_port"]) == (
            name, host, int(port)
        )  # fmt: skip
        await ask(proxy, None, {**asked, "user": "a"})
        assert params_of(prefill)["stashed_as"] == told["transfer_id"]


async def test_a_turn_that_fails_is_not_named() -> None:
    async with fleet(max_retries=1) as (proxy, [prefill], [decode]):
        await ask(proxy, "a")
        name = params_of(prefill)["transfer_id"]
        decode.fails_if = lambda body: True
        status, _, _ = await proxy.ask(ASKED, headers={"X-Session-Id": "a"})
        assert status == 500
        decode.fails_if = lambda body: False
        await ask(proxy, "a")
        assert params_of(prefill)["stashed_as"] == name


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_turns, "MAX_SESSIONS", 3)
    beginning = Prompt().beginning()
    turns, turn = LastTurns(), LastTurn(ProxyId("p:1", "d:1", "name"), 1, beginning)
    for number in range(9):
        turns.put("", f"{number}" * 10_000, "m", turn)
    turns.put("", "unknown", "m", LastTurn(ProxyId("p:1", "", "name"), 1, beginning))
    assert len(turns) == 3
    assert [bool(turns.find("", f"{n}" * 10_000, "m")) for n in (0, 5, 6, 8)] == [0, 0, 1, 1]
    assert turns.find("", "8" * 10_000, "another") is None
    assert turns.find("", "", "m") is None
    assert turns.find("alice", "8" * 10_000, "m") is None


async def test_a_session_is_its_clients_own(tmp_path: Path) -> None:
    keys = {name: name * 8 for name in ("alice", "bobby")}
    path = tmp_path / "clients"
    path.touch(mode=0o600)
    path.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    async with fleet(client_keys_file=str(path)) as (proxy, [prefill], _):
        names = dict[str, Any]()
        for client in ("alice", "bobby", "alice", "bobby"):
            headers = {"X-Session-Id": "a", "Authorization": f"Bearer {keys[client]}"}
            assert (await proxy.ask(headers=headers))[0] == 200
            assert params_of(prefill).get("stashed_as") == names.get(client)
            names[client] = params_of(prefill)["transfer_id"]


def chat(*said: str, **style: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in said]
    return json.dumps(messages, **style).encode()


@pytest.mark.parametrize("num_bytes", [1, 300, COMPARED_BYTES - 40, COMPARED_BYTES, 1 << 20])
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":")}], ids=str)
async def test_a_prompt_goes_on_with_another_or_does_not(
    num_bytes: int, style: dict[str, Any]
) -> None:
    text = "x" * num_bytes
    first = Prompt(text=chat("system", text, **style)).beginning()
    for goes_on, said in (
        (True, ("system", text)), (True, ("system", text, "and then")),
        (False, ("system", text + "x")), (False, ("System", text, "and then")),
        (False, (text,)), (False, ("system",)),
    ):  # fmt: skip
        body = chat(*said, **style)
        assert Prompt(text=memoryview(body)).goes_on_with(first) is goes_on
        keep = Keep.new(BodyMemory(1 << 24), 1 << 24, "")
        assert keep.add(body.ljust(1 << 20))
        span = keep.content()
        assert isinstance(span, Span)
        assert Prompt(text=span.part(0, len(body))).goes_on_with(first) is goes_on
        keep.free()


async def test_another_chat_of_the_same_user_is_not_its_next_turn() -> None:
    """Decode has the KV of the chat before, so nothing of this one is to be kept back for it."""
    async with fleet() as (proxy, [prefill], _):
        prefill.behaviour = Behaviour(body=completion(1))
        asked = {**ASKED, "user": "a"}
        await ask(proxy, None, {**asked, "prompt": "the first chat"})
        await ask(proxy, None, {**asked, "prompt": "another chat, longer than that"})
        assert not {"stashed_as", "remote_has_tokens"} & params_of(prefill).keys()
        await ask(proxy, None, {**asked, "prompt": "another chat, longer than that, goes on"})
        assert {"stashed_as", "remote_has_tokens"} <= params_of(prefill).keys()
        goes_on = {**asked, "prompt": "another chat, longer than that, goes on and on"}
        await ask(proxy, None, {**goes_on, "cache_salt": "another"})
        assert not {"stashed_as", "remote_has_tokens"} & params_of(prefill).keys()


async def test_a_stream_keeps_no_prompt() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=completion(1))
        decode.behaviour = Behaviour(pieces=EVENTS, hang_after=1)
        prompt = "a prompt that is long " * 1000
        task = asyncio.ensure_future(proxy.ask({**STREAMED, "prompt": prompt}))
        await until(lambda: bool(decode.received), "decode has been asked")

        def texts() -> list[int]:
            return [len(each.text) for each in gc.get_objects() if type(each) is Prompt]

        try:
            await until(lambda: not any(size >= len(prompt) for size in texts()), "it is free")
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


PROMPT_TOKENS = 100


def completion(num_answered: int) -> bytes:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_answered}
    text = {"text": '"completion_tokens": 5'}
    return json.dumps({"choices": [text], "usage": usage}).encode()


EVENTS = [b"data: %d\n\n" % number for number in range(9)]


@pytest.mark.parametrize(
    ("asked", "behaviour", "num_answered"),
    [(ASKED, Behaviour(body=completion(7)), 6), (STREAMED, Behaviour(pieces=EVENTS), 5),
     ({**ASKED, "n": 2}, Behaviour(body=completion(14)), 0)],
    ids=["whole", "stream", "choices"],
)  # fmt: skip
async def test_prefill_is_told_what_decode_should_have(
    asked: dict[str, Any], behaviour: Behaviour, num_answered: int
) -> None:
    """The KV of an answer's last token is not computed, and some events of a stream bring none."""
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour, decode.behaviour = Behaviour(body=completion(1)), behaviour
        await ask(proxy, "a", asked)
        assert "remote_has_tokens" not in params_of(prefill)
        for _ in range(2):  # the last turn counts, not their sum
            await ask(proxy, "a", asked)
            assert params_of(prefill)["remote_has_tokens"] == PROMPT_TOKENS + num_answered
        await ask(proxy, "b", asked)
        assert "remote_has_tokens" not in params_of(prefill)


async def test_what_prefill_holds_is_what_decode_is_told() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        body = json.loads(completion(1))
        body["kv_transfer_params"] = {"remote_held_tokens": 64}
        prefill.behaviour = Behaviour(body=json.dumps(body).encode())
        await ask(proxy, "a")
        assert params_of(decode)["remote_held_tokens"] == 64


async def test_nobody_holds_back_what_decode_cannot_be_told_of() -> None:
    """With both legs at once, decode has its parameters before prefill has answered."""
    async with fleet(dispatch="concurrent") as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=completion(1))
        for _ in range(2):
            await ask(proxy, "a")
            assert "remote_has_tokens" not in params_of(prefill)
            assert "remote_held_tokens" not in params_of(decode)


async def test_who_has_no_prefix_cache_should_have_nothing() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=completion(1))
        decode.has_prefix_cache = False
        await decode.beat_once()
        await ask(proxy, "a")  # of a first turn, nobody has anything

        async def has_nothing() -> bool:
            await ask(proxy, "a")
            return "remote_has_tokens" not in params_of(prefill)

        await until(has_nothing, "the heartbeat has come")
        assert await has_nothing()


async def test_another_decode_instance_should_have_nothing() -> None:
    async with fleet(num_decode=2, decode_policy="round_robin") as (proxy, [prefill], decodes):
        prefill.behaviour = Behaviour(body=completion(1))
        for _ in range(3):
            await ask(proxy, "a")
            assert "remote_has_tokens" not in params_of(prefill)
        assert {len(decode.received) for decode in decodes} == {1, 2}
