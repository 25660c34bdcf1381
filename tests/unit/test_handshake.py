"""The door of a data port: one token for one connection, few strangers, none of them for long."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.transports import handshake
from p2p_engine.transports.handshake import (
    MAX_PENDING_OF_ONE,
    PREAMBLE,
    TOKEN_SECONDS,
    Dials,
    Door,
    Tokens,
    dial,
)
from tests.doubles.clock import Clock
from tests.support import eventually

EPOCH = 7


def test_a_token_is_good_for_one_connection_of_one_epoch() -> None:
    tokens = Tokens(Clock())
    token = bytes.fromhex(tokens.make(EPOCH))
    assert bytes.fromhex(tokens.make(EPOCH)) == token  # HELLO was said twice
    assert not tokens.redeem(EPOCH + 1, token)
    assert not tokens.redeem(EPOCH, b"")
    assert not tokens.redeem(EPOCH, bytes(16))
    assert tokens.redeem(EPOCH, token)
    assert not tokens.redeem(EPOCH, token)
    assert bytes.fromhex(tokens.make(EPOCH)) != token


def test_an_unused_token_expires_and_a_new_one_is_never_almost_over() -> None:
    clock = Clock()
    tokens = Tokens(clock)
    first = bytes.fromhex(tokens.make(EPOCH))
    clock.now += TOKEN_SECONDS / 2
    second = bytes.fromhex(tokens.make(EPOCH))
    assert first != second
    assert not tokens.redeem(EPOCH, first)
    clock.now += TOKEN_SECONDS
    assert not tokens.redeem(EPOCH, second)
    tokens.forget(EPOCH)
    tokens.forget(EPOCH)
    assert len(tokens) == 0


class House:
    """A control plane with a door, and who was let in."""

    def __init__(self) -> None:
        self.control = ControlPlane("127.0.0.1", range(1), name="t")
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.tokens, self.admitted = Tokens(), list[tuple[socket.socket, int]]()
        self.door = Door(
            self.control, listener, self.tokens, lambda c, e: self.admitted.append((c, e))
        )
        self.control.start()

    def knock(self, source: str = "127.0.0.1", data: bytes = b"") -> socket.socket:
        stranger = socket.create_connection(self.address, source_address=(source, 0))
        stranger.settimeout(10)
        stranger.sendall(data)
        return stranger

    def close(self) -> None:
        self.control.stop(5)
        self.door.close()
        self.control.close(5)
        for connection, _ in self.admitted:
            connection.close()


@pytest.fixture
def house(no_leaks: None) -> Iterator[House]:
    made = House()
    yield made
    made.close()


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "nobody.invalid", "127.0.0.1\0", ""])
def test_a_host_that_cannot_be_dialled_fails_by_name(house: House, host: str) -> None:
    """At once, so that the next transport is tried."""
    outcomes: list[TransportError] = []
    dials = Dials()

    def begin() -> None:
        dial(dials, house.control, host, 1, b"", lambda c, d: None, outcomes.append)

    house.control.call_soon(begin)
    eventually(lambda: outcomes)
    assert house.control.errors == 0


def test_a_token_that_was_seen_in_use_opens_nothing(house: House) -> None:
    shown = PREAMBLE.pack(EPOCH, bytes.fromhex(house.tokens.make(EPOCH)))
    with house.knock(data=shown), house.knock() as replay:
        eventually(lambda: house.admitted)
        replay.sendall(shown)
        assert is_cut(replay)
    assert [epoch for _, epoch in house.admitted] == [EPOCH]


def test_strangers_wait_a_short_time_without_anybody_knocking(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_SECONDS", 0.1)
    with house.knock(data=b"half") as half, house.knock() as silent:
        assert is_cut(half)
        assert is_cut(silent)
    assert len(house.door) == 0


def test_strangers_of_one_address_are_few_and_do_not_keep_others_out(house: House) -> None:
    strangers = [house.knock() for _ in range(3 * MAX_PENDING_OF_ONE)]
    try:
        for late in strangers[MAX_PENDING_OF_ONE:]:
            assert is_cut(late)
        assert len(house.door) == MAX_PENDING_OF_ONE
        shown = PREAMBLE.pack(EPOCH, bytes.fromhex(house.tokens.make(EPOCH)))
        with house.knock("127.0.0.2", shown):
            eventually(lambda: house.admitted)
    finally:
        for stranger in strangers:
            stranger.close()


def test_without_a_descriptor_the_door_rests_and_opens_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when somebody else's flood has taken them all: no error a thousand times a second."""
    monkeypatch.setattr(handshake, "REST_SECONDS", 0.1)
    real, failures = house.door._listener, []

    class Full:
        def accept(self) -> None:
            failures.append(1)
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            return real.fileno()

    house.control.call_soon(lambda: setattr(house.door, "_listener", Full()))
    eventually(lambda: isinstance(house.door._listener, Full))
    shown = PREAMBLE.pack(EPOCH, bytes.fromhex(house.tokens.make(EPOCH)))
    with house.knock(data=shown):
        eventually(lambda: failures)
        house.control.call_soon(lambda: setattr(house.door, "_listener", real))
        eventually(lambda: house.admitted)
    assert len(failures) < 100
    assert house.control.errors == 0


def test_a_door_that_cannot_be_watched_after_its_rest_tries_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "REST_SECONDS", 0.1)
    honest, refused = house.control.watch, list[int]()
    listener = house.door._listener.fileno()

    def watch(fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        if fd == listener and len(refused) < 3:
            refused.append(fd)
            raise OSError(28, "No space left on device")
        honest(fd, callback, writable=writable)

    def rest() -> None:
        house.control.unwatch(listener)
        house.door._rest_until = 1.0

    monkeypatch.setattr(house.control, "watch", watch)
    house.control.call_soon(rest)
    eventually(lambda: len(refused) == 3)
    with house.knock(data=PREAMBLE.pack(EPOCH, bytes.fromhex(house.tokens.make(EPOCH)))):
        eventually(lambda: house.admitted)
    assert house.control.errors == 0
