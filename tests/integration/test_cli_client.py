"""The demo's client, against a small real server: streams, errors, endings that come too early."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from p2p_engine.cli.client import send_all
from p2p_engine.cli.workload import CHAT, COMPLETIONS, Request

PIECES = [
    {"choices": [{"index": 0, "prompt_token_ids": [5, 6], "token_ids": [1]}]},
    {"choices": [{"index": 1, "prompt_token_ids": [5, 6], "token_ids": [9]}]},
    {"choices": [{"index": 0, "token_ids": [2, 3], "finish_reason": "length"}]},
    {"choices": [{"index": 1, "token_ids": [], "finish_reason": "stop"}]},
    {"choices": [], "usage": {}},
]
CHAT_ANSWER = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [{"index": 0, "token_ids": [8], "finish_reason": "stop", "message": {}}],
}


class CompletionServer:
    """Answers as vLLM does; the prompt says what goes wrong."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.most_in_flight = 0
        self.wanted_in_flight = 1  # nothing is answered before so many were
        self._were_so_many = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            await asyncio.sleep(0.01)
            if self.most_in_flight >= self.wanted_in_flight:
                self._were_so_many.set()
            await self._were_so_many.wait()
            if body.get("prompt") == "refuse":
                return web.Response(status=503, text="no instance")
            if body.get("stream"):
                return await self._stream(request, str(body["prompt"]))
            return web.json_response(CHAT_ANSWER)
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, prompt: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        if prompt == "fail late":
            await response.write(b'data: {"error": {"message": "KV lost"}}\n\n')
        if prompt != "end early":
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server(no_leaks: None) -> Iterator[tuple[CompletionServer, str]]:
    """Serve from a thread, as another process would."""
    server, addresses, loop = CompletionServer(), list[str](), asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    yield server, addresses[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def stream(prompt: str) -> Request:
    return Request("streamed", COMPLETIONS, {"prompt": prompt, "stream": True}, num_sequences=2)


def test_a_stream_of_two_sequences(server: tuple[CompletionServer, str]) -> None:
    (answer,) = send_all(server[1], [stream("go")], concurrency=1)
    assert answer.tokens == {0: [1, 2, 3], 1: [9]}
    assert answer.prompts == {0: [5, 6], 1: [5, 6]}
    assert answer.endings == {0: "length", 1: "stop"}
    assert answer.seconds_to_first is not None
    assert answer.error == ""


def test_a_chat_names_its_prompt_once(server: tuple[CompletionServer, str]) -> None:
    (answer,) = send_all(server[1], [Request("chat", CHAT, {"messages": []})], concurrency=1)
    assert (answer.tokens, answer.prompts) == ({0: [8]}, {0: [5, 6, 7]})
    assert answer.seconds_to_first is None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("refuse", "HTTP 503: no instance"), ("fail late", "KV lost"), ("end early", "ended early")],
)
def test_whatever_goes_wrong_is_an_error(
    server: tuple[CompletionServer, str], prompt: str, words: str
) -> None:
    good, bad = send_all(server[1], [stream("go"), stream(prompt)], concurrency=2)
    assert words in bad.error
    assert good.error == ""


def test_a_server_that_is_not_there(free_port: int) -> None:
    (answer,) = send_all(f"http://127.0.0.1:{free_port}", [stream("go")], concurrency=1)
    assert answer.error


def test_as_many_at_once_as_asked(server: tuple[CompletionServer, str]) -> None:
    answered: list[None] = []
    requests = [stream("go")] * 12
    server[0].wanted_in_flight = 3
    answers = send_all(server[1], requests, concurrency=3, on_answer=lambda: answered.append(None))
    assert len(answers) == len(answered) == 12
    assert server[0].most_in_flight == 3
