"""Instances so light that a router before them is what is measured: HTTP, heartbeats, no model.

Run as a process: `python -m benchmarks.light_instance PORT...`, half of the ports prefill, half
decode. An answer is a constant; a stream has `max_tokens` events, one every TICK_SECONDS for each
stream, as the steps of an engine make them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Any

import httptools
import uvloop
import zmq

from p2p_engine.wire.messages import PROTOCOL_VERSION, Heartbeat, encode_heartbeat

HOST = "127.0.0.1"
MODEL = "light"
TICK_SECONDS = 0.01
BEAT_SECONDS = 1.0
TEXT = b" the quick brown fox"
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","model":"light",'
    b'"choices":[{"index":0,"text":"%b"}]}\n\n' % TEXT
)
LAST_EVENTS = b"data: [DONE]\n\n"
_ANSWER = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"light","choices":[{"index":0,'
    b'"text":"%b","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":512,'
    b'"completion_tokens":8,"total_tokens":520},"kv_transfer_params":null}' % (TEXT * 8)
)
_CHUNK = b"%x\r\n%b\r\n"
_MODELS = b'{"object":"list","data":[{"id":"light","object":"model","owned_by":"x"}]}'
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_WHOLE_ANSWER = _whole(_ANSWER)
_WHOLE_MODELS = _whole(_MODELS)
_HEALTHY = _whole(b"{}")


class Ticker:
    """Gives every stream its next event, tick by tick."""

    def __init__(self) -> None:
        self.streams: dict[HttpConnection, int] = {}

    async def run(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        event = _CHUNK % (len(EVENT), EVENT)
        end = _CHUNK % (len(LAST_EVENTS), LAST_EVENTS) + b"0\r\n\r\n"
        while True:
            due += TICK_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))
            for connection, num_left in list(self.streams.items()):
                if num_left:
                    self.streams[connection] = num_left - 1
                    connection.transport.write(event)
                else:
                    del self.streams[connection]
                    connection.end(end)


class HttpConnection(asyncio.Protocol):
    """One connection of a client."""

    transport: Any

    def __init__(self, engine: Ticker) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._is_kept = True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self._engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        self._is_kept = self._parser.should_keep_alive()
        if self._path.endswith(b"completions"):
            if _STREAM.search(body):
                found = _MAX_TOKENS.search(body)
                self._engine.streams[self] = int(found[1]) if found else 8
                self.transport.write(_STREAM_HEAD)
            else:
                self.end(_WHOLE_ANSWER)
        elif self._path.endswith(b"models"):
            self.end(_WHOLE_MODELS)
        else:
            self.end(_HEALTHY)

    def end(self, last: bytes) -> None:
        """Write the last bytes of an answer."""
        self.transport.write(last)
        if not self._is_kept:
            self.transport.close()


async def serve(ports: list[int], registration_ports: list[int]) -> None:
    """Serve and beat until killed; the first half of the ports is prefill."""
    loop = asyncio.get_running_loop()
    engine = Ticker()
    for port in ports:
        await loop.create_server(lambda: HttpConnection(engine), HOST, port, backlog=1024)
    ticking = asyncio.ensure_future(engine.run())
    with zmq.Context() as context:
        context.linger = 0
        proxies = [context.socket(zmq.DEALER) for _ in registration_ports]
        for proxy, port in zip(proxies, registration_ports, strict=True):
            proxy.connect(f"tcp://{HOST}:{port}")
        while not ticking.done():
            for number, port in enumerate(ports):
                role = "P" if number < len(ports) // 2 else "D"
                address = f"{HOST}:{port}"
                beat = Heartbeat(
                    role, address, f"{HOST}:{port % 60000 + 1}", protocol=PROTOCOL_VERSION,
                    epoch=1, model=MODEL, interval=BEAT_SECONDS,
                )  # fmt: skip
                for proxy in proxies:
                    proxy.send(encode_heartbeat(beat), zmq.NOBLOCK)
            await asyncio.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--registration-ports", type=int, nargs="*", default=[])
    options = parser.parse_args()
    uvloop.run(serve(options.ports, options.registration_ports))
