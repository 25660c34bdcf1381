"""A decode instance loses its power and comes back at its address, in a fleet without sockets. The
first prompt for it goes over links that still lead to the engines before."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.bench_fleet import BLOCK_TOKENS, FleetPlay, PlayedPrompt, watch_ends
from p2p_engine import assembly
from p2p_engine.errors import TransferRejected
from p2p_engine.peers.links import REST_SECONDS

NUM_TOKENS = 4 * BLOCK_TOKENS
OTHER_PORT = 100


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetPlay]:
    monkeypatch.setattr(assembly, "time", time)  # the world sets its own; this brings ours back
    play = FleetPlay(1, 1, seed=1, num_tokens=NUM_TOKENS, num_ranks=2)
    for instance in play.instances.values():
        play.start(instance)
    yield play
    play.close()


def play_restart(fleet: FleetPlay, first_port: int, seconds: float) -> PlayedPrompt:
    """Let the instances meet and their links rest, and decode restart; then send a prompt, and run
    for so many seconds at most."""
    [prefill], [decode] = fleet.of_role("P"), fleet.of_role("D")
    first = fleet.send(prefill, decode)
    watch_ends(fleet, [first])
    assert first.is_right
    fleet.world.run(fleet.world.now + REST_SECONDS / 2)
    decode.power_off(fleet.world)
    fleet.start(decode, first_port)
    second = fleet.send(prefill, decode)
    watch_ends(fleet, [second], seconds=seconds)
    return second


def test_it_arrives_if_the_engines_have_their_addresses_again(fleet: FleetPlay) -> None:
    prompt = play_restart(fleet, 2, fleet.config.peer_timeout_seconds / 2)
    assert [receive.error for receive in prompt.receives] == [None, None]
    assert prompt.is_right


def test_decode_is_told_if_the_engines_have_other_addresses(fleet: FleetPlay) -> None:
    """Prefill dials in vain until the old ones have been silent for too long."""
    prompt = play_restart(fleet, OTHER_PORT, fleet.config.peer_timeout_seconds + 2.0)
    assert prompt.is_over
    for receive in prompt.receives:
        assert isinstance(receive.error, TransferRejected)
        assert "is silent" in str(receive.error)
