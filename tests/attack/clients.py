"""Clients: whole requests, many at once, from a process of their own."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.attack.strangers import YIELDED
from tests.rigs.proxies import COMPLETIONS

_END = b'"max_tokens": 8}'
# Beginnings of bodies, what is repeated in them, and their ends.
KINDS: dict[str, tuple[bytes, bytes, bytes]] = {
    "text": (b'{"model": "tiny", "prompt": "', b"once upon a time ", b'", ' + _END),
    "escapes": (b'{"model": "tiny", "prompt": "', b'\\n\\"', b'", ' + _END),
    "token ids": (b'{"model": "tiny", "prompt": [', b"12345, ", b"1], " + _END),
    "messages": (
        b'{"model": "tiny", "messages": [',
        b'{"role": "user", "content": "hi"}, ',
        b"{}], " + _END,
    ),
    "empty lists": (b'{"model": "tiny", "prompt": [', b"[], ", b"1], " + _END),
    "deep lists": (b'{"model": "tiny", "prompt": ', b"[", b""),
    "deep objects": (b'{"model": "tiny", "prompt": ', b'{"a": ', b""),
    "one number": (b'{"model": "tiny", "n": ', b"9", b", " + _END),
    "one fraction": (b'{"model": "tiny", "max_tokens": 0.', b"9", b"}"),
    "the same key": (b'{"model": "tiny", ', b'"stream": false, ', _END),
    "blanks": (b'{"model": "tiny", ', b" ", _END),
}


def body_of(kind: str, num_bytes: int) -> bytes:
    """Make a body of about so many bytes. Of `keys`, each is another."""
    if kind == "keys":
        each = b"".join(b'"key %d": 1, ' % number for number in range(num_bytes // 17))
        return b'{"model": "tiny", ' + each + _END
    begin, middle, end = KINDS[kind]
    return begin + middle * (num_bytes // len(middle)) + end


class Clients:
    """The commands; each returns how many of its requests ended how."""

    def __init__(self, url: str) -> None:
        os.nice(YIELDED)
        self._url = url

    def post(self, kinds: list[str], num_bytes: int, count: int, together: int) -> Counter[str]:
        """Send so many bodies of each kind, some at a time."""
        bodies = {kind: body_of(kind, num_bytes) for kind in kinds}

        async def each(client: aiohttp.ClientSession, number: int) -> str:
            kind = kinds[number % len(kinds)]
            data = io.BytesIO(bodies[kind])
            async with client.post(self._url + COMPLETIONS, data=data) as answer:
                await answer.read()
            return str(answer.status)

        return asyncio.run(_together(each, count * len(kinds), together))

    def ask_for_models(self, count: int) -> Counter[str]:
        """Ask for so many models at once, each another one."""

        async def each(client: aiohttp.ClientSession, number: int) -> str:
            asked = {"model": f"model {number}", "prompt": "x", "stream": True}
            async with client.post(self._url + COMPLETIONS, json=asked) as answer:
                await answer.read()
            return str(answer.status)

        return asyncio.run(_together(each, count, count))

    def read(self, paths: list[str], together: int, seconds: float) -> Counter[str]:
        """Read pages, again and again, with so many clients."""
        ends = time.monotonic() + seconds

        async def each(client: aiohttp.ClientSession, number: int) -> str:
            path, count = paths[number % len(paths)], 0
            while time.monotonic() < ends:
                async with client.get(self._url + path) as answer:
                    async for _ in answer.content.iter_any():
                        if time.monotonic() > ends:
                            break
                count += 1
            return path if count else "nothing"

        return asyncio.run(_together(each, together, together))


async def _together(
    each: Callable[[aiohttp.ClientSession, int], Awaitable[str]], count: int, together: int
) -> Counter[str]:
    room, timeout = asyncio.Semaphore(together), aiohttp.ClientTimeout(total=120)

    async def one(number: int) -> str:
        async with room:
            try:
                return await each(client, number)
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                return type(error).__name__

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        ended: list[Any] = await asyncio.gather(*(one(number) for number in range(count)))
    return Counter(ended)
