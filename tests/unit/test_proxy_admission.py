"""Admission: first come, first served, for each model; bounded, and never stuck."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from proxy.errors import ProxyError
from proxy.http.asgi import Ends
from proxy.routing.admission import Admission
from proxy.routing.router import Busy, NoInstance


class Places:
    """So many places for each model."""

    def __init__(self, **places: int) -> None:
        self.places = places
        self.served: list[str] = []

    def take(self, model: str, name: str = "") -> str:
        if model not in self.places:
            raise NoInstance("gone", [])
        if not self.places[model]:
            raise Busy(model)
        self.places[model] -= 1
        self.served.append(name)
        return name or model


async def settle() -> None:
    """Let every task run until all of them wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_finds_room_does_not_wait() -> None:
    admission, room, ends = Admission(9, 9, 9.0), Places(m=1), Ends()
    assert await admission.enter("m", lambda: room.take("m"), ends) == "m"
    assert (admission.num_running, admission.num_queued) == (1, 0)
    ends.close()
    assert admission.num_running == 0


async def test_first_come_first_served() -> None:
    admission, room = Admission(9, 9, 9.0), Places(m=0)
    waiting = []
    for name in "abc":
        enter = admission.enter("m", partial(room.take, "m", name), Ends())
        waiting.append(asyncio.ensure_future(enter))
        await settle()
    for count in range(1, 4):
        room.places["m"] = 1
        admission.wake()
        await settle()
        assert room.served == ["a", "b", "c"][:count]
    assert [await task for task in waiting] == ["a", "b", "c"]
    assert admission.num_queued == 0


async def test_one_wake_serves_as_many_as_there_is_room_for() -> None:
    admission, room = Admission(9, 9, 9.0), Places(m=0)
    waiting = [
        asyncio.ensure_future(admission.enter("m", lambda: room.take("m"), Ends()))
        for _ in range(4)
    ]
    await settle()
    room.places["m"] = 3
    admission.wake()
    await settle()
    assert [task.done() for task in waiting] == [True, True, True, False]
    waiting[3].cancel()
    await settle()
    assert admission.num_queued == 0


async def test_a_busy_model_does_not_hold_up_another() -> None:
    admission, room = Admission(9, 9, 9.0), Places(busy=0, free=1)
    waiting = asyncio.ensure_future(admission.enter("busy", lambda: room.take("busy"), Ends()))
    await settle()
    assert await admission.enter("free", lambda: room.take("free"), Ends()) == "free"
    waiting.cancel()
    await settle()


async def test_the_whole_proxy_has_a_limit_too() -> None:
    admission, room, ends = Admission(1, 9, 9.0), Places(m=5), Ends()
    await admission.enter("m", lambda: room.take("m"), ends)
    second = asyncio.ensure_future(admission.enter("m", lambda: room.take("m"), Ends()))
    await settle()
    assert not second.done()
    ends.close()
    assert await second == "m"


@pytest.mark.parametrize(("max_queued", "code"), [(0, "queue_full"), (1, "queue_timeout")])
async def test_both_ends_of_patience_are_429(max_queued: int, code: str) -> None:
    admission, room = Admission(9, max_queued, 0.01), Places(m=0)
    with pytest.raises(ProxyError) as caught:
        await admission.enter("m", lambda: room.take("m"), Ends())
    assert (caught.value.status, caught.value.code) == (429, code)
    assert b"retry-after" in dict(caught.value.answer_to_client().headers)
    assert admission.num_queued == 0


async def test_who_waits_for_what_is_gone_is_told() -> None:
    admission, room = Admission(9, 9, 9.0), Places(m=0)
    waiting = asyncio.ensure_future(admission.enter("m", lambda: room.take("m"), Ends()))
    await settle()
    del room.places["m"]
    admission.wake()
    with pytest.raises(NoInstance):
        await waiting


async def test_a_waiter_that_leaves_hands_on_its_turn() -> None:
    admission, room = Admission(9, 9, 9.0), Places(m=0)
    first, second = (
        asyncio.ensure_future(admission.enter("m", lambda: room.take("m"), Ends()))
        for _ in range(2)
    )
    await settle()
    room.places["m"] = 1
    admission.wake()
    first.cancel()  # in the very moment
    await settle()
    assert (first.cancelled(), await second) == (True, "m")


async def test_a_thousand_that_give_up_at_once_try_once() -> None:
    """Each try looks at all instances."""
    admission, num_tries = Admission(9, 1000, 0.05), 0

    def start() -> None:
        nonlocal num_tries
        num_tries += 1
        raise Busy("m")

    waiting = [asyncio.ensure_future(admission.enter("m", start, Ends())) for _ in range(1000)]
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {getattr(error, "code", None) for error in ends} == {"queue_timeout"}
    assert num_tries <= 1 + 2  # the first does not wait at once
    assert admission.num_queued == 0
