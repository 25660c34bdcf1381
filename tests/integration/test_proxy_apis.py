"""`/v1/messages` and `/v1/responses`: two legs as for a chat, and what is refused by name."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from p2p_engine.simulate.answers import answer, stream
from proxy.openai.apis import CLOSED
from tests.doubles.server import Behaviour
from tests.rigs.proxies import MESSAGES, RESPONSES, RunningProxy, fleet, until

MESSAGE: dict[str, Any] = {
    "model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "once upon"}],
    "system": "be brief",
}  # fmt: skip
RESPONSE: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8, "input": "once upon"}
ASKED = {MESSAGES: MESSAGE, RESPONSES: RESPONSE}
BOTH = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SHAPES: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "disabled"}},
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
        {"n": 3},
    ],
    RESPONSES: [
        {},
        {"max_output_tokens": 1},
        {"store": False, "background": None, "previous_response_id": None},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "truncation": "disabled"},
        {"tools": [FUNCTION, {"type": "custom", "name": "c"}], "tool_choice": "auto"},
        {"enable_response_messages": True, "instructions": "be brief"},
    ],
}
NOT_FOR_PREFILL = {"include", "top_logprobs", "enable_response_messages"}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@BOTH
async def test_a_prompt_is_prefilled_for_one_token_and_decoded(path: str, is_stream: bool) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        for shape in SHAPES[path]:
            asked = {**ASKED[path], **shape, "stream": is_stream}
            status, body, _ = await proxy.ask(asked, path)
            assert status == 200
            if is_stream:
                assert body == b"".join(stream(path, asked))
            else:
                assert json.loads(body) == json.loads(json.dumps(answer(path, asked)))
            first, second = prefill.received[-1].json, decode.received[-1].json
            params = first.pop("kv_transfer_params"), second.pop("kv_transfer_params")
            assert (params[0]["do_remote_decode"], params[1]["do_remote_prefill"]) == (True, True)
            assert params[0]["transfer_id"] == params[1]["transfer_id"]
            assert params[1]["remote_request_id"] == "cmpl-of-the-engine"  # prefill's answer
            said = {"store": False} if path == RESPONSES else {}
            assert second == {**said, **asked}
            limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
            assert (first[limit], first["stream"]) == (1, False)
            assert not NOT_FOR_PREFILL & set(first)
            assert first.get("thinking", {}).get("type") != "enabled"
            assert first.get("store", False) is False
        assert len(prefill.received) == len(decode.received) == len(SHAPES[path])
        await proxy.until_idle()
        counted = await proxy.metrics()
        name = f'p2p_proxy_requests_total{{outcome="ok",route="{path}",status="200"}}'
        assert counted[name] == len(SHAPES[path])


@BOTH
@pytest.mark.parametrize(
    "mine",
    ['"kv_transfer_params": {"remote_host": "evil"}',
     '"kv_transfer_params": {"a": "evil"}, "kv_transfer_params": {"b": "evil"}',
     '"\\u006bv_transfer_params": {"remote_host": "evil"}',
     '"vllm_xargs": {"kv_transfer_params": "evil"}',
     '"request_id": "evil"', '"ec_transfer_params": {"x": "evil"}'],
    ids=["plain", "twice", "escaped", "nested", "request id", "encoder's"],
)  # fmt: skip
async def test_a_clients_own_parameters_never_pass(path: str, mine: str) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        body = json.dumps(ASKED[path])[:-1] + f", {mine}}}"
        headers = {"content-type": "application/json"}
        async with proxy.client.post(proxy.url + path, data=body, headers=headers) as said:
            assert said.status == 200
        for received in (prefill.received[-1], decode.received[-1]):
            assert b"evil" not in received.body
            assert "transfer_id" in received.json["kv_transfer_params"]


@pytest.mark.parametrize("value", [True, 1, "true", "x" * 20_000])
@pytest.mark.parametrize("name", ["background", "previous_response_id", "store"])
async def test_what_one_instance_would_keep_is_refused_by_name(name: str, value: Any) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        status, body, _ = await proxy.ask({**RESPONSE, name: value}, RESPONSES)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (400, "kept_by_one_instance", name)
        assert name in error["message"]
        assert error["type"] == "invalid_request_error"
        assert not prefill.received + decode.received


async def status_of(proxy: RunningProxy, asked: dict[str, Any]) -> int:
    """Ask for a response with a large body."""
    data, headers = io.BytesIO(json.dumps(asked).encode()), {"content-type": "application/json"}
    async with proxy.client.post(proxy.url + RESPONSES, data=data, headers=headers) as said:
        await said.read()
        return said.status


async def test_a_large_body_is_checked_as_a_small_one() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        large = {**RESPONSE, "input": "x" * (1 << 20)}
        assert await status_of(proxy, large) == 200
        assert decode.received[-1].json["store"] is False
        assert decode.received[-1].json["input"] == large["input"]
        num_tools = 20_000
        for tools, expected in (
            ([FUNCTION] * num_tools, 200),
            ([FUNCTION] * num_tools + [{"type": "mcp"}], 400),
            ([FUNCTION] * num_tools * 3, 400),
        ):
            assert await status_of(proxy, {**large, "tools": tools}) == expected
        assert len(prefill.received) == len(decode.received) == 2


@pytest.mark.parametrize(
    "tool",
    [{"type": "web_search_preview"}, {"type": "code_interpreter", "container": {"type": "auto"}},
     {"type": "mcp", "server_label": "x"}, {"type": "container"}, {"name": "f"}, 7],
)  # fmt: skip
async def test_tools_that_an_instance_runs_are_refused(tool: Any) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        status, body, _ = await proxy.ask({**RESPONSE, "tools": [FUNCTION, tool]}, RESPONSES)
        assert (status, json.loads(body)["error"]["code"]) == (400, "builtin_tool")
        assert not prefill.received + decode.received


@pytest.mark.parametrize("path", sorted(CLOSED))
async def test_a_door_that_is_closed_says_what_to_do_instead(path: str) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        status, body, _ = await proxy.ask({**MESSAGE, "kv_transfer_params": {}}, path)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "not_served")
        assert error["message"] == f"{path} is not served here: {CLOSED[path]}"
        assert not prefill.received + decode.received


async def test_a_response_cannot_be_looked_up() -> None:
    async with fleet() as (proxy, _, _):
        for method, path in (("GET", "/resp_1"), ("POST", "/resp_1/cancel")):
            async with proxy.client.request(method, proxy.url + RESPONSES + path) as said:
                error = (await said.json())["error"]
                assert (said.status, error["code"]) == (400, "kept_by_one_instance")
                assert "resp_1" in error["message"]


@pytest.mark.parametrize(
    ("path", "shape"),
    [(RESPONSES, {"truncation": "auto"}), (RESPONSES, {"truncation": None}),
     (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}],
                 "tool_choice": {"type": "tool", "name": "f"}})],
)  # fmt: skip
async def test_what_prefill_would_compute_otherwise_is_computed_by_decode(
    path: str, shape: dict[str, Any]
) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        assert (await proxy.ask({**ASKED[path], **shape}, path))[0] == 200
        told = decode.received[-1].json["kv_transfer_params"]
        assert told == {"do_remote_prefill": False, "do_remote_decode": False}
        assert not prefill.received


async def test_errors_of_messages_have_anthropics_form() -> None:
    async with fleet(0, 1) as (proxy, _, _):
        status, body, headers = await proxy.ask(MESSAGE, MESSAGES)
        said = json.loads(body)
        assert (status, said["type"], headers["retry-after"]) == (503, "error", "3")
        assert said["error"]["type"] == "overloaded_error"
        assert said["error"]["code"] == "no_instance"
        async with proxy.client.post(proxy.url + MESSAGES, data=b"[]") as answered:
            said = await answered.json()
        assert (answered.status, said["error"]["type"]) == (400, "invalid_request_error")
        async with proxy.client.get(proxy.url + MESSAGES) as answered:
            assert (answered.status, (await answered.json())["type"]) == (405, "error")


@BOTH
async def test_a_stream_that_breaks_ends_in_an_error_event(path: str) -> None:
    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(cut_after=3)
        status, body, _ = await proxy.ask({**ASKED[path], "stream": True}, path)
        event, data = body.decode().strip().split("\n\n")[-1].split("\n")
        assert (status, event) == (200, "event: error")
        said = json.loads(data.removeprefix("data: "))
        assert (said["type"], said["error"]["code"]) == ("error", "decode_failed")


@BOTH
async def test_a_prefill_without_parameters_or_that_fails_is_as_for_a_chat(path: str) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        plain = json.dumps(answer(path, ASKED[path])).encode()
        prefill.behaviour = Behaviour(body=plain)
        assert (await proxy.ask(ASKED[path], path))[0] == 200
        assert decode.received[-1].json["kv_transfer_params"]["do_remote_prefill"] is True
        prefill.behaviour = Behaviour(body=b'{"choices": [{}]}')
        assert (await proxy.ask(ASKED[path], path))[0] == 502
        aborted = plain.replace(b'"output_tokens": 8', b'"output_tokens": 0')
        prefill.behaviour = Behaviour(body=aborted)
        status, body, _ = await proxy.ask(ASKED[path], path)
        assert (status, json.loads(body)["error"]["code"]) == (503, "prefill_stopping")
        prefill.behaviour = Behaviour(status=400, body=b'{"error": "mine"}')
        assert (await proxy.ask(ASKED[path], path))[:2] == (400, b'{"error": "mine"}')
        await proxy.until_idle()


# By prefill, by decode, and as the client sees it.
USAGE: dict[str, tuple[dict[str, Any], ...]] = {
    MESSAGES: (
        {"input_tokens": 90, "output_tokens": 1, "cache_read_input_tokens": 10},
        {"input_tokens": 1, "output_tokens": 5, "cache_read_input_tokens": 99},
        {"input_tokens": 90, "output_tokens": 5, "cache_read_input_tokens": 10},
    ),
    RESPONSES: (
        {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 1},
        {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 99}, "output_tokens": 5},
        {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 5},
    ),
}


def with_usage(path: str, usage: dict[str, Any]) -> bytes:
    return json.dumps({**answer(path, ASKED[path]), "usage": usage}, separators=(",", ":")).encode()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@BOTH
async def test_usage_is_prefills_and_a_session_goes_on(path: str, is_stream: bool) -> None:
    at_prefill, at_decode, seen = USAGE[path]
    async with fleet() as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=with_usage(path, at_prefill))
        asked = {**ASKED[path], "stream": is_stream}
        last = b"event: last\ndata: %b\n\n" % with_usage(path, at_decode)
        events = [*stream(path, asked)[:-1], last[:-90], last[-90:]]
        decode.behaviour = Behaviour(body=None if is_stream else with_usage(path, at_decode))
        decode.behaviour.pieces = events if is_stream else None
        for turn in range(2):
            _, body, _ = await proxy.ask(asked, path, headers={"X-Session-Id": "a"})
            assert json.loads(body.rpartition(b"data: ")[2])["usage"] == seen
            params = prefill.received[-1].json["kv_transfer_params"]
            if turn:  # a stream is counted by its events, of which some bring no token
                num_known = params["remote_has_tokens"]
                assert num_known in range(100 + 2, 100 + 8) if is_stream else num_known == 104


async def test_a_users_id_in_metadata_is_a_session() -> None:
    async with fleet(1, 4, decode_policy="session_affinity") as (proxy, _, decodes):
        asked = {**MESSAGE, "metadata": {"user_id": "alice"}}
        for _ in range(8):
            assert (await proxy.ask(asked, MESSAGES))[0] == 200
        assert sorted(len(decode.received) for decode in decodes) == [0, 0, 0, 8]


async def test_system_prompts_tell_conversations_apart_and_bind_them() -> None:
    async with fleet(4, 1, prefill_policy="prefix_aware") as (proxy, prefills, _):
        messages = [{"role": "user", "content": "once upon a time " * 200}]
        for _ in range(4):
            for system in ("a" * 2000, "b" * 2000):
                asked = {**MESSAGE, "messages": messages, "system": system}
                assert (await proxy.ask(asked, MESSAGES))[0] == 200
        busy = [{r.json["system"][0] for r in p.received} for p in prefills if p.received]
        assert sorted(map(sorted, busy)) == [["a"], ["b"]]


async def test_kv_that_nobody_will_use_is_let_go() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        asked = {**MESSAGE, "max_tokens": 2000}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        prefill.behaviour = Behaviour(
            body=json.dumps(answer(MESSAGES, asked)).encode() + b" " * (5 << 20)
        )
        assert (await proxy.ask(asked, MESSAGES))[0] == 502
        await until(lambda: decode.received, "the release")
        released = decode.received[-1].json
        assert (released["max_tokens"], "thinking" in released) == (1, False)
        assert released["kv_transfer_params"]["do_remote_prefill"] is True


async def test_tokens_of_messages_are_counted_by_any_instance() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        asked = {"model": "tiny", "messages": MESSAGE["messages"]}
        for _ in range(2):
            status, body, _ = await proxy.ask(asked, f"{MESSAGES}/count_tokens")
            assert (status, json.loads(body)["path"]) == (200, f"{MESSAGES}/count_tokens")
        assert len(prefill.received) == len(decode.received) == 1


@BOTH
async def test_both_legs_may_run_at_once(path: str) -> None:
    async with fleet(dispatch="concurrent") as (proxy, [prefill], [decode]):
        status, body, _ = await proxy.ask(ASKED[path], path)
        assert (status, json.loads(body)) == (
            200,
            json.loads(json.dumps(answer(path, ASKED[path]))),
        )
        sent = [each.received[-1].json["kv_transfer_params"] for each in (prefill, decode)]
        assert sent[0]["transfer_id"] == sent[1]["transfer_id"]
