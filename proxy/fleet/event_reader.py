"""A process that hears the KV events of all instances and looks prompts up:
`python -m proxy.fleet.event_reader MAX_DATA_BYTES`.

A batch of events may be large, and a prompt long: here neither holds up the proxy's event loop. On
standard input come orders, on standard output go answers, each in MessagePack behind its length in
4 bytes. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec
from async_timeout import timeout

from proxy.fleet.block_index import PROMISE_SECONDS, BlockIndex, Keys, read_events
from proxy.fleet.zmtp import ZmtpConnection, ZmtpError, zmtp_connection

LENGTH = struct.Struct("<I")
NICE = 5  # the event loop goes first
RETRY_SECONDS = 2.0  # between two connections to a publisher
REPLAY_SECONDS = 10.0  # for an answer of its ROUTER to begin
REPLAY_PART_SECONDS = 1.0  # between two parts of it; the last may be lost as any other
REPLAY_REST_SECONDS = 0.05
MAX_REPLAYS = 64  # in a row; vLLM drops what a subscriber does not take in time
COUNT_SECONDS = 1.0  # between two signs of life
MAX_REASON = 300
SLICE_SECONDS = 0.01  # in which events are applied at once
REST = 2.0  # after a slice, its publisher waits for so many times what that took
LEAST_REST_SECONDS = 0.001  # after each message, also one that says nothing new
MAX_RECENT_KEYS = 1 << 20  # of prompts that were looked up and may be promised
_SEQ = struct.Struct(">q")
_END = -1


class Follow(msgspec.Struct, tag=True):
    """Hear the events of an instance, which has a number of its own; `host` is an IP address."""

    instance: int
    host: str
    port: int
    replay_port: int | None
    topic: str


class Unfollow(msgspec.Struct, tag=True):
    """Forget an instance and its blocks."""

    instance: int


class Find(msgspec.Struct, tag=True):
    """Look a prompt up. `tokens` is JSON: a list of ids, or an answer of `/tokenize`."""

    number: int
    tokens: bytes
    lora: str
    salt: str


class Promise(msgspec.Struct, tag=True):
    """These instances will soon hold the prompt of an earlier `Find`."""

    number: int
    instances: list[int]


class Found(msgspec.Struct, tag=True):
    """How many leading tokens of a prompt each instance holds; 0 tokens: it cannot be read. Those
    of `partial` may hold more."""

    number: int
    num_tokens: int
    held: dict[int, int]
    partial: list[int] = []


class Counted(msgspec.Struct, tag=True):
    """How many blocks are known of each instance whose events are heard."""

    blocks: dict[int, int]


class Troubled(msgspec.Struct, tag=True):
    """The events of an instance cannot be heard at the moment; nothing is known of it."""

    instance: int
    reason: str


Order: TypeAlias = Follow | Unfollow | Find | Promise
Report: TypeAlias = Found | Counted | Troubled


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class Restarted(ZmtpError):
    """The publisher counts anew."""


class Follower:
    """Keeps the picture of one instance: its events in their order, or none of them."""

    def __init__(
        self, watch: Follow, index: BlockIndex, on_trouble: Callable[[Troubled], None]
    ) -> None:
        self._watch = watch
        self._index = index
        self._on_trouble = on_trouble
        self._next = 0  # the number of the batch that follows what was applied
        self._running: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self) -> None:
        """Follow the publisher until `stop`."""
        self._running = asyncio.ensure_future(self.run())

    def stop(self) -> None:
        """Follow it no longer, and forget the picture."""
        self._is_over = True  # Python 3.10 may lose a cancellation that meets a timeout
        if self._running is not None:
            self._running.cancel()
        self._index.end(self._watch.instance)

    async def run(self) -> None:
        """Follow the publisher until cancelled. Each connection begins with an empty picture."""
        while not self._is_over:
            try:
                await self._follow()
            except Exception as error:  # noqa: BLE001  # whatever a publisher sends
                self._index.end(self._watch.instance)
                self._on_trouble(Troubled(self._watch.instance, repr(error)[:MAX_REASON]))
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        watch, last = self._watch, -1
        async with zmtp_connection(watch.host, watch.port, b"SUB") as publisher:
            publisher.send(b"\x01" + watch.topic.encode())
            self._next = 0
            self._index.begin(watch.instance, is_whole=watch.replay_port is not None)
            if watch.replay_port is not None:
                await self._catch_up(watch.replay_port)
            while True:
                number, payload = _read(await publisher.receive())
                if number <= last:
                    raise Restarted(f"batch {number} after batch {last}")
                last = number
                if number > self._next and watch.replay_port is not None:
                    await self._catch_up(watch.replay_port)
                if number >= self._next:
                    await self._take(number, payload)
                else:  # it came by the replay, too
                    await asyncio.sleep(LEAST_REST_SECONDS)

    async def _catch_up(self, port: int) -> None:
        """Ask for all batches from the next one on, until the publisher has no more of them."""
        for _ in range(MAX_REPLAYS):
            await asyncio.sleep(REPLAY_REST_SECONDS)
            async with zmtp_connection(self._watch.host, port, b"DEALER") as replay:
                if await self._replay(replay):
                    return
        raise ZmtpError(f"{MAX_REPLAYS} replays in a row have gaps")

    async def _replay(self, replay: ZmtpConnection) -> bool:
        """Take one replay; False if something was lost within it."""
        replay.send(b"", _SEQ.pack(self._next))
        is_first = True
        while True:
            try:
                async with timeout(REPLAY_SECONDS if is_first else REPLAY_PART_SECONDS):
                    empty, *parts = await replay.receive()
            except asyncio.TimeoutError:
                if is_first:
                    raise
                return False
            number, payload = _read(parts)
            if empty:
                raise ZmtpError("no answer of a ROUTER")
            if number == _END:
                return True
            if number < self._next:
                raise ZmtpError(f"batch {number} where {self._next} or a later one was asked for")
            if number > self._next and not is_first:
                return False
            await self._take(number, payload)
            is_first = False

    async def _take(self, number: int, payload: bytes) -> None:
        """Apply a batch, in slices. If some before it are lost for good, all that was believed
        is."""
        instance, began = self._watch.instance, time.monotonic()
        if number > self._next:
            self._index.begin(instance, is_whole=False)
        for event in read_events(payload):
            self._index.apply(instance, [event])
            if (took := time.monotonic() - began) > SLICE_SECONDS:
                await asyncio.sleep(REST * took)
                began = time.monotonic()
        self._next = number + 1
        await asyncio.sleep(max(LEAST_REST_SECONDS, REST * (time.monotonic() - began)))


class Reader:
    """Carries out orders."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._index = BlockIndex()
        self._followers: dict[int, Follower] = {}
        self._recent: OrderedDict[int, dict[int, Keys]] = OrderedDict()
        self._num_recent = 0

    def obey(self, order: Order) -> None:
        """Carry out one order; never blocks for longer than a look-up takes."""
        if isinstance(order, Find):
            self._say(self._find(order))
        elif isinstance(order, Promise):
            keys = self._recent.get(order.number, {})
            for instance in order.instances:
                self._index.promise(instance, keys)
        else:
            if (follower := self._followers.pop(order.instance, None)) is not None:
                follower.stop()
            if isinstance(order, Follow):
                follower = self._followers[order.instance] = Follower(order, self._index, self._say)
                follower.start()

    async def age(self) -> None:
        """Let promises end, until cancelled."""
        while True:
            await asyncio.sleep(PROMISE_SECONDS)
            self._index.age()

    async def count(self) -> None:
        """Say again and again how many blocks are known, until cancelled."""
        while True:
            self._say(Counted(self._index.counts()))
            await asyncio.sleep(COUNT_SECONDS)

    def _find(self, order: Find) -> Found:
        try:
            tokens = _tokens(order.tokens)
        except (msgspec.MsgspecError, RecursionError):
            return Found(order.number, 0, {})
        keys = self._index.keys_of(tokens, order.lora, order.salt)
        self._remember(order.number, keys)
        held, partial = self._index.match(keys), self._index.partial()
        return Found(order.number, len(tokens), held, partial)

    def _remember(self, number: int, keys: dict[int, Keys]) -> None:
        self._recent[number] = keys
        self._num_recent += _num_keys(keys)
        while self._num_recent > MAX_RECENT_KEYS:
            self._num_recent -= _num_keys(self._recent.popitem(last=False)[1])

    def _say(self, report: Report) -> None:
        answer = msgspec.msgpack.encode(report)
        self._writer.write(LENGTH.pack(len(answer)) + answer)


def _read(parts: list[bytes]) -> tuple[int, bytes]:
    """Return the number of a batch and the batch; vLLM says the topic first.

    Raises:
        ZmtpError: it is something else.
    """
    if len(parts) != 3:
        raise ZmtpError(f"{len(parts)} parts where a publisher sends 3")
    return _SEQ.unpack(parts[1])[0], parts[2]


def _tokens(text: bytes) -> list[int]:
    if text.startswith(b"["):
        return msgspec.json.decode(text, type=list[int])
    return msgspec.json.decode(text, type=_Tokenized).tokens


def _num_keys(keys: dict[int, Keys]) -> int:
    return 1 + sum(map(len, keys.values()))


async def read_orders(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read orders until the stream ends."""
    decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
    carried_out = Reader(writer)
    beside = [asyncio.ensure_future(carried_out.age()), asyncio.ensure_future(carried_out.count())]
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            carried_out.obey(decoder.decode(await reader.readexactly(size)))
            await writer.drain()
    for task in beside:
        task.cancel()


async def main(max_data_bytes: int) -> None:
    """Serve standard input and output."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (max_data_bytes, max_data_bytes))
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(), sys.stdout
    )
    await read_orders(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
