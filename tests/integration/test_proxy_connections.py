"""One connection of a client: HTTP/1.0, a client that leaves, and bytes that nobody would write."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from p2p_engine.simulate.answers import events
from tests.doubles.server import Behaviour
from tests.hostile.requests import ATTACKS, SMUGGLED, post
from tests.rigs.desync import PATIENCE, ask
from tests.rigs.proxies import STREAMED, fleet, until
from tests.rigs.raw import NotHTTP, raw_client
from tests.rigs.recorded import recorded

if TYPE_CHECKING:
    from tests.support import SeededRandom

BODY = json.dumps(STREAMED).encode()
NUM_RANDOM = 300
# No fault of the proxy and none of an instance is among them.
STATUSES = {100, 200, 400, 403, 404, 405, 417, 431, 501, 505}


def streamed(version: bytes) -> bytes:
    """A request for a stream."""
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % (version, len(BODY)) + BODY


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection() -> None:
    async with fleet() as (proxy, _, [decode]):
        async with raw_client(proxy.port) as client:
            await client.send(streamed(b"1.0"))
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert body == b"".join(events(STREAMED))
        decode.behaviour = Behaviour(cut_after=2, headers={"Content-Encoding": "identity"})
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(streamed(b"1.0"))
        try:
            await reader.read(-1)
        except ConnectionResetError:
            pass  # a cut stream must not look like a whole one
        else:
            raise AssertionError("a stream that was cut off looks whole")
        finally:
            writer.close()


async def test_a_client_that_leaves_is_noticed_also_with_requests_behind() -> None:
    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hang_after=1)
        async with raw_client(proxy.port) as client:
            await client.send(streamed(b"1.1") + post(SMUGGLED))
            await until(lambda: decode.received, "the first is in progress")
        await until(lambda: decode.received[0].ended == "left", "decode is told")
        await proxy.until_idle()
        assert len(decode.received) == 1


def garbled(rng: SeededRandom, raw: bytes) -> bytes:
    """Change an attack in a few places."""
    content = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0:
                content[place : place + rng.randint(1, 4)] = b""
            case 1:
                content[place:place] = rng.choice([b"\r\n", b"\n", b"\r", b" ", b"\0", b":", b"0"])
            case 2:
                content[place : place + 1] = bytes([rng.randrange(256)])
            case _:
                other = rng.choice(PARTS)
                start = rng.randrange(len(other) + 1)
                content[place:place] = other[start : start + rng.randint(1, 60)]
    return bytes(content)


PARTS = [b"".join(attack.parts)[:4096] for attack in ATTACKS.values()]


async def test_no_garbled_request_harms_another(rng: SeededRandom) -> None:
    """Whatever is made of the corpus: answers are whole, and what arrives is one request each."""
    async with recorded() as (proxy, prefill, decode):
        for number in range(NUM_RANDOM):
            raw = garbled(rng, rng.choice(PARTS))
            async with raw_client(proxy.port) as client:
                await client.send(raw)
                client.finish()
                while True:
                    try:
                        answer = await asyncio.wait_for(client.answer(), PATIENCE)
                    except (NotHTTP, ConnectionError):
                        break  # it left before the end
                    if answer is None:
                        break
                    assert answer.status in STATUSES, raw
            if number % 10 == 0:
                prompt = f"number {number}"
                honest = await ask(proxy.port, prompt)
                assert honest is not None
                assert (honest.status, prompt in honest.body.decode()) == (200, True), raw
        assert (prefill.faults, decode.faults) == ([], [])
        await proxy.until_idle()
