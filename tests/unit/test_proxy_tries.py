"""How often somebody may try a key, and that nobody can lock the owner out."""

from __future__ import annotations

import pytest

from proxy.fleet.tries import (
    MAX_ADDRESSES,
    MAX_OWNERS,
    ONE_AGAIN_SECONDS,
    TRIES_OF_ALL,
    TRIES_OF_ONE,
    Tries,
)

OWNER = "10.0.0.1"


def strangers(tries: Tries, count: int, now: float = 0.0) -> int:
    """Let so many strangers, each at its own address, try until they are not heard; count tries."""
    heard = 0
    for number in range(count):
        address = f"192.168.{number // 256}.{number % 256}"
        while not tries.wait(address, now):
            tries.fail(address, now)
            heard += 1
    return heard


def test_one_address_has_few_tries_and_then_one_at_times() -> None:
    tries = Tries()
    assert strangers(tries, 1) == TRIES_OF_ONE
    assert tries.wait("192.168.0.0", 0.0) == pytest.approx(ONE_AGAIN_SECONDS)
    assert strangers(tries, 1, ONE_AGAIN_SECONDS) == 1
    assert strangers(tries, 1, 1000 * ONE_AGAIN_SECONDS) == TRIES_OF_ONE


def test_all_together_have_a_bound() -> None:
    assert strangers(Tries(), 1000) == TRIES_OF_ALL


@pytest.mark.parametrize("is_known", [True, False])
def test_strangers_cannot_lock_the_owner_out(is_known: bool) -> None:
    tries = Tries()
    if is_known:
        tries.succeed(OWNER)
    strangers(tries, 1000)
    assert bool(tries.wait(OWNER, 0.0)) is not is_known
    assert tries.wait("127.0.0.1", 0.0) == tries.wait("::1", 0.0) == 0.0  # on the machine itself
    assert tries.wait("192.168.9.9", 0.0) > 0.0


def test_the_owner_may_mistype_too() -> None:
    tries = Tries()
    for _ in range(TRIES_OF_ONE - 1):
        tries.fail(OWNER, 0.0)
    tries.succeed(OWNER)
    for _ in range(TRIES_OF_ONE - 1):
        tries.fail(OWNER, 0.0)
    assert tries.wait(OWNER, 0.0) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8::ffff:2"),
        ("::ffff:192.168.0.1", "192.168.0.1"),
        ("fe80::1%e", "fe80::2"),
    ],
)
def test_who_has_many_addresses_counts_as_one(one: str, other: str) -> None:
    tries = Tries()
    for _ in range(TRIES_OF_ONE):
        tries.fail(one, 0.0)
    assert tries.wait(other, 0.0) > 0.0


def test_what_is_remembered_is_bounded() -> None:
    tries = Tries()
    for number in range(2 * MAX_ADDRESSES):
        tries.fail(f"10.1.{number // 256}.{number % 256}", 0.0)
        tries.succeed(f"10.2.{number // 256}.{number % 256}")
    assert len(tries._each) <= MAX_ADDRESSES
    assert len(tries._owners) <= MAX_OWNERS
