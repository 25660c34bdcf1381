"""A load generator on bare sockets, so that it is never what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import httptools

Result = TypeVar("Result")

PATH = b"/v1/completions"
# The time limit of an answer; each of the instances' answers takes milliseconds.
ANSWER_SECONDS = 10.0


class Wrong(Exception):
    """An answer that is not the one that was to come."""


class Asker(asyncio.Protocol):
    """One connection that is kept; one request at a time."""

    transport: Any

    def __init__(self) -> None:
        self._parser: Any = None
        self._ended: asyncio.Future[None] | None = None
        self.num_events = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(Wrong(f"the connection broke: {error!r}"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self.num_events += piece.count(b"\n\n")

    def on_message_complete(self) -> None:
        assert self._ended is not None
        status = self._parser.get_status_code()
        if status != 200:
            self._ended.set_exception(Wrong(f"status {status}"))
        else:
            self._ended.set_result(None)

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the result is there when its answer is complete."""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._ended


def request_bytes(body: bytes, address: str) -> bytes:
    """Return a whole request."""
    head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"  # noqa: E501
    return head % (PATH, address.encode(), len(body)) + body


class Client:
    """Asks one after the other of `addresses` for one answer: a proxy, or prefill and decode."""

    def __init__(self, addresses: Sequence[str], bodies: Sequence[bytes]) -> None:
        self._legs = [
            (address, request_bytes(body, address))
            for address, body in zip(addresses, bodies, strict=True)
        ]
        self._idle: list[list[Asker]] = []
        self._all: list[list[Asker]] = []

    async def connect(self, count: int) -> None:
        """Open as many connections as can be in use at a time."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            legs = []
            for address, _request in self._legs:
                host, _, port = address.rpartition(":")
                _, asker = await loop.create_connection(Asker, host, int(port))
                legs.append(asker)
            self._idle.append(legs)
            self._all.append(legs)

    def close(self) -> None:
        """Close all connections."""
        for legs in self._all:
            for asker in legs:
                asker.transport.close()

    @property
    def num_events(self) -> int:
        """Events of streams that came."""
        return sum(asker.num_events for legs in self._all for asker in legs)

    async def ask(self) -> float:
        """Ask once and return how long it took, in seconds."""
        legs = self._idle.pop()
        began = time.perf_counter()
        for asker, (_, request) in zip(legs, self._legs, strict=True):
            await asker.ask(request)
        took = time.perf_counter() - began
        self._idle.append(legs)
        return took


async def keep_asking(client: Client, concurrency: int, seconds: float) -> list[float]:
    """Ask without a pause, `concurrency` at a time; return all latencies."""
    await client.connect(concurrency)
    deadline = time.perf_counter() + seconds
    latencies: list[float] = []

    async def one() -> None:
        while time.perf_counter() < deadline:
            latencies.append(await client.ask())

    await _finish([asyncio.ensure_future(one()) for _ in range(concurrency)], seconds)
    return latencies


async def ask_at_rate(client: Client, rate: float, seconds: float) -> list[float]:
    """Ask `rate` times a second, whatever comes back; a latency counts from when it was due."""
    await client.connect(64)
    free = asyncio.Semaphore(64)  # a router that cannot keep up makes its clients wait for others
    clock = time.perf_counter  # the loop's own is only as fine as milliseconds
    began = clock()
    tasks: list[asyncio.Task[float]] = []

    async def one(due: float) -> float:
        async with free:
            await client.ask()
        return clock() - due

    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - clock()))
        tasks.append(asyncio.ensure_future(one(due)))
    return await _finish(tasks)


async def stream(client: Client, num_streams: int, seconds: float) -> float:
    """Keep so many streams open; return the events per second that came."""
    await client.connect(num_streams)
    stopped = False

    async def one() -> None:
        while not stopped:
            await client.ask()

    tasks = [asyncio.ensure_future(one()) for _ in range(num_streams)]
    await asyncio.sleep(1.0)  # all are open
    began, before = time.perf_counter(), client.num_events
    await asyncio.sleep(seconds)
    rate = (client.num_events - before) / (time.perf_counter() - began)
    stopped = True
    await _finish(tasks)
    return rate


async def _finish(tasks: list[asyncio.Task[Result]], seconds: float = 0.0) -> list[Result]:
    """Return what all of them return, if they do within `seconds` and the time of one answer."""
    _, late = await asyncio.wait(tasks, timeout=seconds + ANSWER_SECONDS)
    for task in late:
        task.cancel()
    if late:
        raise Wrong(f"{len(late)} of {len(tasks)} not answered within {ANSWER_SECONDS:g} s")
    return await asyncio.gather(*tasks)
