"""What goes through the proxy is what the two instances were meant to get, and said."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from itertools import pairwise
from typing import Any

import pytest

from p2p_engine.simulate.answers import completion, events
from proxy.request.models import _merge
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import ASKED, CHAT, COMPLETIONS, STREAMED, fleet, until
from tests.support import SeededRandom

pytestmark = pytest.mark.usefixtures("crowd")

CHAT_ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2}
PROXY_ID = re.compile(r"___prefill_addr_(.+)___decode_addr_(.+)_([0-9a-f]{32})")


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_answers_are_the_decode_instances_own(dispatch: str, path: str) -> None:
    async with fleet(dispatch=dispatch) as (proxy, _, _):
        for asked in (ASKED, CHAT_ASKED, {**ASKED, "max_tokens": 1}):
            status, body, headers = await proxy.ask(asked, path)
            assert (status, json.loads(body)) == (200, completion(asked, None))
            assert headers["Content-Type"] == "application/json"
            status, body, headers = await proxy.ask({**asked, "stream": True}, path)
            assert (status, body) == (200, b"".join(events(asked)))
            assert headers["Content-Type"] == "text/event-stream"
        await proxy.until_idle()


async def test_each_leg_is_told_what_it_must_know() -> None:
    asked = {**STREAMED, "min_tokens": 3, "max_completion_tokens": 9, "n": 2, "seed": 1 << 70}
    async with fleet() as (proxy, [prefill], [decode]):
        theirs = {"X-Request-Id": "mine___decode_addr_evil:1", "Authorization": "Bearer key"}
        _, _, headers = await proxy.ask(asked, headers=theirs)
        [first], [second] = prefill.received, decode.received
        match = PROXY_ID.fullmatch(first.headers["X-Request-Id"])
        assert match is not None
        assert match.groups()[:2] == (prefill.zmq_address, decode.zmq_address)
        transfer_id = match[3]

        assert headers["X-Request-Id"] == theirs["X-Request-Id"]
        assert second.headers["X-Request-Id"] == first.headers["X-Request-Id"]
        assert first.headers["Authorization"] == second.headers["Authorization"] == "Bearer key"
        assert first.json == {
            **{
                key: value
                for key, value in asked.items()
                if key not in ("min_tokens", "stream_options")
            },
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
                "remote_host": "127.0.0.1",
                "remote_port": int(decode.zmq_address.rpartition(":")[2]),
                "remote_request_id": None,
                "remote_block_ids": None,
                "remote_engine_id": None,
            },
        }
        answered = prefill.answer_params(first.json)
    told = {**(answered or {}), "stash": False}  # it is of no session
    assert second.json == {**asked, "kv_transfer_params": told}


async def test_a_client_cannot_direct_the_transfer() -> None:
    evil = {"do_remote_decode": True, "remote_host": "evil", "remote_port": 1}
    async with fleet() as (proxy, [prefill], [decode]):
        status, _, _ = await proxy.ask({**ASKED, "kv_transfer_params": evil})
        assert status == 200
        for received in (prefill.received[0], decode.received[0]):
            assert received.json["kv_transfer_params"]["remote_host"] == "127.0.0.1"
            assert b"evil" not in received.body


async def test_old_instances_are_coordinated_by_the_id_alone() -> None:
    async with fleet(protocol=None) as (proxy, [prefill], [decode]):
        asked = {**ASKED, "kv_transfer_params": {"remote_host": "evil"}}
        status, _, _ = await proxy.ask(asked)
        assert status == 200
        assert PROXY_ID.fullmatch(decode.received[0].headers["X-Request-Id"])
        assert "kv_transfer_params" not in prefill.received[0].json
        assert decode.received[0].json == ASKED


async def test_a_prefill_that_answers_no_parameters_leaves_ours() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=b'{"choices": [{}], "kv_transfer_params": null}')
        await proxy.ask()
        params = decode.received[0].json["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert f"{params['remote_host']}:{params['remote_port']}" == prefill.zmq_address


async def test_events_split_at_random_arrive_byte_for_byte(rng: SeededRandom) -> None:
    async with fleet() as (proxy, _, [decode]):
        for _ in range(20):
            whole = b"".join(events({**ASKED, "max_tokens": rng.randint(1, 50)}))
            cuts = sorted(rng.sample(range(1, len(whole)), rng.randint(0, 30)))
            edges = [0, *cuts, len(whole)]
            decode.behaviour = Behaviour(pieces=[whole[a:b] for a, b in pairwise(edges)])
            _, body, _ = await proxy.ask(STREAMED)
            assert body == whole


async def test_a_piece_passes_before_the_next_exists() -> None:
    release = asyncio.Event()
    async with fleet() as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(hold_after=(1, release))
        async with proxy.post(STREAMED) as response:
            first = await response.content.readany()
            assert first == events(STREAMED)[0]
            assert await proxy.in_flight(decode) == {"prefill": 0, "decode": 1}
            assert await proxy.in_flight(prefill) == {"prefill": 0, "decode": 0}
            release.set()
            assert first + await response.read() == b"".join(events(STREAMED))
        await proxy.until_idle()


async def test_what_decode_refuses_reaches_the_client_as_it_is() -> None:
    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(status=404, body=b'{"error": 1}', headers={"X-Own": "yes"})
        status, body, headers = await proxy.ask()
        assert (status, body, headers["X-Own"]) == (404, b'{"error": 1}', "yes")
        await proxy.until_idle()


async def test_a_compressed_answer_stays_as_it_is() -> None:
    plain = b'{"choices": [{"text": "x"}]}'
    async with fleet() as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(
            body=gzip.compress(plain), headers={"Content-Encoding": "gzip"}
        )
        status, body, headers = await proxy.ask(headers={"Accept-Encoding": "gzip"})
        assert (status, body, headers["Content-Encoding"]) == (200, plain, "gzip")
        assert decode.received[0].headers["Accept-Encoding"] == "gzip"
        assert "Accept-Encoding" not in prefill.received[0].headers  # we read that answer


async def test_two_hundred_streams_at_once_share_the_load() -> None:
    release = asyncio.Event()
    async with fleet(2, 4) as (proxy, prefills, decodes):
        for double in decodes:
            double.behaviour = Behaviour(hold_after=(1, release))
        asked: list[dict[str, Any]] = [{**STREAMED, "prompt": f"prompt {i}"} for i in range(200)]
        answers = [asyncio.ensure_future(proxy.ask(one)) for one in asked]

        def all_stream() -> bool:
            return sum(r.pieces_sent > 0 for double in decodes for r in double.received) == 200

        await until(all_stream, "200 streams are open")
        counts = [(await proxy.in_flight(double))["decode"] for double in decodes]
        assert counts == [50] * 4
        # A prefill may end before the last request begins, so it is nearly even.
        shares = [len(double.received) for double in prefills]
        assert (sum(shares), max(shares) <= 104) == (200, True)
        release.set()
        for one, answer in zip(asked, answers, strict=True):
            assert (await answer)[:2] == (200, b"".join(events(one)))
        await proxy.until_idle()


async def test_models_are_merged_from_all_fleets() -> None:
    async with ServerDouble("PD", model="other") as other, fleet() as (proxy, [prefill], [decode]):
        other.beat(proxy.registration_address)
        await proxy.until_ready(prefill, decode, other)
        async with proxy.client.get(f"{proxy.url}/v1/models") as response:
            listed = await response.json()
        assert listed["object"] == "list"
        assert {model["id"]: model["max_model_len"] for model in listed["data"]} == {
            "tiny": 4096,
            "other": 4096,
        }


@pytest.mark.parametrize("bad", [b'{"data":[{"id":"\xff"}]}', b'{"data":[' + b"[" * 200_000])
def test_models_of_others_are_listed_beside_an_answer_that_is_no_json(bad: bytes) -> None:
    assert list(_merge([bad, b'{"data":[{"id":"tiny"}]}'])) == ["tiny"]


async def test_a_prompt_that_needs_no_prefill_goes_to_decode_alone() -> None:
    """Its id names no other instance, a client's parameters do not get through, and those of the
    proxy say that nothing is to be transferred."""
    async with fleet(bypass_tokens=1000) as (proxy, [prefill], [decode]):
        evil = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
        for asked in (ASKED, STREAMED, {**ASKED, "kv_transfer_params": evil}):
            status, _, headers = await proxy.ask(asked)
            assert status == 200
            received = decode.received[-1]
            nothing = {"do_remote_prefill": False, "do_remote_decode": False}
            assert received.json == {**asked, "kv_transfer_params": nothing}
            assert re.fullmatch("[0-9a-f]{32}", received.headers["X-Request-Id"])
            assert headers["X-Request-Id"] == received.headers["X-Request-Id"]
        assert prefill.received == []
        await proxy.until_idle()


async def test_an_old_instance_gets_the_clients_request_if_it_computes_alone() -> None:
    async with fleet(protocol=None, bypass_tokens=1000) as (proxy, _, [decode]):
        assert (await proxy.ask())[0] == 200
        assert decode.received[0].json == ASKED


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True}])
async def test_what_only_a_whole_prompt_can_answer_is_not_split(more: dict[str, Any]) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        assert (await proxy.ask({**ASKED, **more}))[0] == 200
        assert (len(prefill.received), len(decode.received)) == (0, 1)
