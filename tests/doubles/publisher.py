"""PublisherDouble: a publisher of KV events, less kind than vLLM's: it can lose, repeat, reorder,
forget and restart."""

from __future__ import annotations

import asyncio
import itertools
import struct
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from p2p_engine.wire.messages import Publisher

SEQ = struct.Struct(">q")
END = -1
SIZE = 16  # of a block, in tokens


def stored(
    tokens: list[int], first: int = 0, *, size: int = SIZE, name: str = "", **changed: Any
) -> dict[str, Any]:
    """The event that stores a prompt's whole blocks from number `first` on."""
    names = [f"{name}{tokens[:end]}".encode() for end in range(size, len(tokens) + 1, size)]
    blocks = names[first:]
    event = {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * size : len(names) * size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(blocks),
        "group_idx": 0,
    }
    return event | changed


def removed(tokens: list[int], *, size: int = SIZE) -> dict[str, Any]:
    """The event that removes the last whole block of these tokens."""
    return {
        "type": "BlockRemoved",
        "block_hashes": [f"{tokens[: len(tokens) // size * size]}".encode()],
        "medium": "GPU",
        "group_idx": 0,
    }


class PublisherDouble:
    """`async with` it: a PUB socket and a ROUTER on 127.0.0.1, which stay where they are across
    `restart`."""

    def __init__(self, topic: bytes = b"kv") -> None:
        self.topic = topic
        self.buffer: list[tuple[int, bytes]] = []  # what can be replayed
        self.lost: set[int] = set()  # what a subscriber does not get, though it is in the buffer
        self.lost_once: set[int] = set()  # what the next replay leaves out
        self.num_replays = 0
        self.replays = True
        self.ports: tuple[int, int] = (0, 0)
        self._numbers = itertools.count()

    async def __aenter__(self) -> PublisherDouble:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def place(self) -> Publisher:
        """Where it publishes."""
        return Publisher(self.ports[0], self.ports[1], topic=self.topic.decode())

    async def restart(self, *, first: int = 0) -> None:
        """Begin anew at the same ports, as a server that crashed."""
        await self._close()
        self.buffer.clear()
        self._numbers = itertools.count(first)
        self._open()

    async def publish(self, *events: dict[str, Any], number: int | None = None) -> int:
        """Send a batch, unless it is to be lost; return its number."""
        payload = msgspec.msgpack.encode([0.5, events, 0])
        return await self.publish_bytes(payload, number)

    async def publish_bytes(self, payload: bytes, number: int | None = None) -> int:
        """Send a batch, whatever it is."""
        number = next(self._numbers) if number is None else number
        self.buffer.append((number, payload))
        if number not in self.lost:
            await self._pub.send_multipart([self.topic, SEQ.pack(number), payload])
        return number

    async def subscribed(self) -> None:
        """Wait until somebody has subscribed."""
        assert await asyncio.wait_for(self._pub.recv(), 20) == b"\x01" + self.topic

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        for socket, port in zip((self._pub, self._router), self.ports, strict=True):
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.ports = tuple(
            int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            for socket in (self._pub, self._router)
        )  # type: ignore[assignment]
        self._serving = asyncio.ensure_future(self._serve())

    async def _close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            peer, empty, first = await self._router.recv_multipart()
            self.num_replays += 1
            if not self.replays:
                continue
            left_out, self.lost_once = self.lost_once, set()
            for number, payload in list(self.buffer):
                if number >= SEQ.unpack(first)[0] and number not in left_out:
                    await self._router.send_multipart(
                        [peer, empty, self.topic, SEQ.pack(number), payload]
                    )
            if END not in left_out:
                await self._router.send_multipart([peer, empty, b"", SEQ.pack(END), b""])
