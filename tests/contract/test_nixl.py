"""What only the transport over NIXL has to prove: no byte of a lost sender lands in memory that is
somebody else's by then, though nobody can take a write of NIXL back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from p2p_engine.config import ucx_transports
from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.base import Channel, ConnectionInterrupted, WritesLost
from p2p_engine.transports.nixl import proving, sending
from p2p_engine.transports.nixl.library import NixlAgent, load_nixl
from p2p_engine.transports.nixl.sending import NixlChannel
from p2p_engine.transports.nixl.transport import NixlTransport
from p2p_engine.transports.proof import ProofDesk
from tests.rigs.nixl import lose_writes, prepare_nixl
from tests.rigs.tensors import random_memory
from tests.rigs.transports import MIB, TransportEnd, TransportPair, write
from tests.support import SeededRandom, eventually


@pytest.fixture(autouse=True)
def _nothing_left(nixl: None, no_leaks: None) -> None:
    """Each test gives back what it took, NIXL's own threads excepted."""


@pytest.fixture
def nixl() -> None:
    """Have NIXL, or skip."""
    prepare_nixl()


@pytest.fixture
def pair(_nothing_left: None) -> Iterator[TransportPair]:
    made = TransportPair("nixl")
    yield made
    made.close()


def channel_of(pair: TransportPair) -> NixlChannel:
    channel = pair.channel()
    assert isinstance(channel, NixlChannel)
    return channel


def receiving(pair: TransportPair) -> NixlTransport:
    assert isinstance(pair.receiver.transport, NixlTransport)
    return pair.receiver.transport


def cut(channel: NixlChannel) -> None:
    """End the connection beside NIXL's as the kernel does for a dead process: with no farewell."""
    channel._connection.shutdown(socket.SHUT_RDWR)


def is_gone(pair: TransportPair) -> bool:
    return pair.receiver.in_control(lambda: receiving(pair).is_gone(pair.sender.epoch))


def hears_end(pair: TransportPair) -> bool:
    return pair.sender.epoch in receiving(pair)._lost


def agent_of(pair: TransportPair) -> NixlAgent | None:
    landing = receiving(pair)._landing
    assert landing is not None
    return landing._agent


def start_to_connect(pair: TransportPair) -> Future[Channel | TransportError]:
    outcome: Future[Channel | TransportError] = Future()
    endpoint, transport = pair.invitation(), pair.sender.transport
    pair.sender.in_control(lambda: transport.connect(endpoint, outcome.set_result))
    return outcome


def is_proving(pair: TransportPair) -> bool:
    desk = receiving(pair)._desk
    assert desk is not None
    return desk.has_lent_to(pair.sender.epoch)


def is_waiting(pair: TransportPair) -> bool:
    desk = receiving(pair)._desk
    assert desk is not None
    return pair.sender.epoch in desk._waiting


class Brake:
    """Lets no write of an agent complete until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on, original = True, NixlAgent.is_complete

        def braked(agent: NixlAgent, handle: int) -> bool:
            is_complete = original(agent, handle)
            return is_complete and not self.is_on

        monkeypatch.setattr(NixlAgent, "is_complete", braked)


@pytest.mark.parametrize("min_bytes", [0, MIB], ids=["all", "large pieces"])
def test_lost_writes_are_found_before_kv_is_written(
    min_bytes: int, pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL reports success for all of them, and delivers the notification."""
    before = agent_of(pair)
    with monkeypatch.context() as lossy:
        lose_writes(lossy, min_bytes)
        assert isinstance(pair.connect(), WritesLost)
    pair.channel()
    assert agent_of(pair) is before  # what was lost is not on its way


def test_proof_that_is_not_answered_ends_and_may_be_tried_again(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer may only have been busy."""
    with monkeypatch.context() as silent:
        silent.setattr(proving, "PROOF_SECONDS", 0.2)
        silent.setattr(ProofDesk, "hear", lambda *_: None)
        assert isinstance(pair.connect(), ConnectionInterrupted)
    pair.channel()


@pytest.mark.parametrize("older", ["sender", "receiver"])
def test_engine_that_proves_nothing_and_this_one_take_the_next_transport(
    older: str, pair: TransportPair
) -> None:
    invitation = pair.invitation()
    if older == "sender":
        assert "address" not in invitation
    else:
        invitation["address"] = invitation.pop("proven_address")
        assert isinstance(pair.connect(invitation), TransportError)


def test_proof_is_told_in_any_pieces_between_other_words(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "heard", lambda connection: connection.recv(1))
    brake, intact = Brake(monkeypatch), list[bool]()
    outcome = start_to_connect(pair)
    eventually(lambda: is_proving(pair))
    receiver, epoch = receiving(pair), pair.sender.epoch
    pair.receiver.in_control(lambda: receiver.confirm(epoch, lambda: intact.append(True)))
    eventually(lambda: bool(intact))
    brake.is_on = False
    channel = outcome.result(10)
    assert isinstance(channel, NixlChannel)
    pair.sender.in_control(channel.close)


@pytest.mark.parametrize("end", ["it dies", "it is forgotten"])
def test_memory_of_a_proof_that_its_sender_does_not_end_is_lent_after_a_fence(
    end: str, pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write there. Another sender, which waits for the memory, connects again."""
    other = TransportPair("nixl", sender=TransportEnd("nixl"), receiver=pair.receiver)
    brake, before = Brake(monkeypatch), agent_of(pair)
    try:
        outcome = start_to_connect(pair)
        eventually(lambda: is_proving(pair))
        waiting = start_to_connect(other)
        eventually(lambda: is_waiting(other))
        receiver, epoch = receiving(pair), pair.sender.epoch
        if end == "it dies":
            receiver._senders[epoch].shutdown(socket.SHUT_RDWR)
        else:
            pair.receiver.in_control(lambda: receiver.forget(epoch, may_write=False))
        assert isinstance(outcome.result(10), ConnectionInterrupted)
        assert isinstance(waiting.result(10), ConnectionInterrupted)
        assert agent_of(pair) is not before
        brake.is_on = False
        other.channel()
    finally:
        for channel in other._channels:
            other.sender.in_control(channel.close)
        other.sender.close()


def test_bytes_of_a_lost_sender_land_until_the_fence_and_never_after(
    pair: TransportPair, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PIECE_BYTES", MIB)  # two of these six are on their way
    memory = random_memory(rng, 6 * MIB)
    channel, landing = channel_of(pair), pair.grant(None, len(memory))
    brake = Brake(monkeypatch)
    job = write(channel, one_region(memory.ctypes.data, len(memory)), landing, memory)
    view = pair.receiver.arena.arena.view(landing.space.offset, landing.space.nbytes)
    first = memory[:MIB].tobytes()
    eventually(lambda: bytes(view[:MIB]) == first, what="the first piece lies there")
    cut(channel)
    eventually(lambda: hears_end(pair))
    before = agent_of(pair)
    assert not is_gone(pair)
    eventually(lambda: is_gone(pair))
    assert agent_of(pair) is not before
    view[:] = b"\xa5" * len(view)
    brake.is_on = False  # it writes on, as a process that was stopped
    assert job.wait(10)
    assert job.state != "done"
    assert bytes(view) == b"\xa5" * len(view)
    assert not pair.has_landed(landing, len(memory))
    view.release()


def test_sender_with_farewell_costs_no_fence(pair: TransportPair) -> None:
    channel, before = channel_of(pair), agent_of(pair)
    assert pair.sender.in_control(channel.close)
    eventually(lambda: is_gone(pair))
    assert agent_of(pair) is before


def test_channel_whose_write_failed_says_no_farewell(pair: TransportPair) -> None:
    channel, before = channel_of(pair), agent_of(pair)
    memory = np.zeros(4096, np.uint8)
    landing = pair.grant(None, 4096)
    channel.arena = replace(channel.arena, base=0)  # no memory of the peer's
    job = write(channel, one_region(memory.ctypes.data, 4096), landing, memory)
    assert job.wait(10)
    assert (job.state, channel.has_failed) == ("failed", True)
    with pytest.raises(TransportError, match="closed"):
        write(channel, one_region(memory.ctypes.data, 4096), landing, memory)
    assert pair.sender.in_control(channel.close)
    eventually(lambda: hears_end(pair) or is_gone(pair))
    eventually(lambda: is_gone(pair))
    assert agent_of(pair) is not before


def test_word_of_a_sender_counts_only_if_its_connection_is_intact(pair: TransportPair) -> None:
    channel, heard = channel_of(pair), list[str]()

    def confirm(what: str) -> None:
        receiver, epoch = receiving(pair), pair.sender.epoch
        pair.receiver.in_control(lambda: receiver.confirm(epoch, lambda: heard.append(what)))

    confirm("intact")
    eventually(lambda: heard == ["intact"])
    channel.has_failed = True
    confirm("failed")
    pair.sender.in_control(channel.close)
    eventually(lambda: hears_end(pair))
    assert heard == ["intact"]
    confirm("lost")
    assert heard == ["intact"]
    eventually(lambda: is_gone(pair))
    confirm("fenced")
    assert heard == ["intact", "fenced"]


def test_next_connection_of_a_lost_sender_waits_for_the_fence(
    pair: TransportPair, rng: SeededRandom
) -> None:
    before, memory = agent_of(pair), random_memory(rng, 4096)
    cut(channel_of(pair))
    channel = channel_of(pair)
    assert agent_of(pair) is not before
    landing = pair.grant(None, 4096)
    write(channel, one_region(memory.ctypes.data, 4096), landing, memory)
    eventually(lambda: pair.has_landed(landing, 4096))
    assert pair.bytes_of(landing, 4096) == memory.tobytes()


def test_others_are_told_of_a_fence_and_connect_again(
    pair: TransportPair, rng: SeededRandom
) -> None:
    """What they had written before stays published."""
    end = TransportEnd("nixl")
    other = TransportPair("nixl", sender=end, receiver=pair.receiver)
    try:
        broken: list[TransportError] = []
        theirs: Channel = other.channel()
        end.in_control(lambda: theirs.watch(broken.append))
        memory, landing = random_memory(rng, 4096), other.grant(None, 4096)
        assert write(theirs, one_region(memory.ctypes.data, 4096), landing, memory).wait(10)
        cut(channel_of(pair))
        eventually(lambda: hears_end(pair))
        eventually(lambda: is_gone(pair))
        eventually(lambda: bool(broken))
        eventually(lambda: pair.has_landed(landing, 4096))
        assert other.bytes_of(landing, 4096) == memory.tobytes()
        end.in_control(theirs.close)
        again = other.grant(None, 4096)
        write(other.channel(), one_region(memory.ctypes.data, 4096), again, memory)
        eventually(lambda: other.has_landed(again, 4096))
    finally:
        for channel in other._channels:
            end.in_control(channel.close)
        end.close()


def test_connection_into_a_fence_may_be_tried_again(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of which a sender was told is no more when its NIXL connects."""
    original, receiver = NixlAgent.connect, receiving(pair)

    def connect_late(agent: NixlAgent, metadata: bytes) -> str:
        before = agent_of(pair)
        receiver._lost.add(1)
        pair.receiver.in_control(receiver._fence)
        eventually(lambda: agent_of(pair) not in (before, None))
        monkeypatch.setattr(NixlAgent, "connect", original)
        raise TransportError("the peer's agent does not answer")

    monkeypatch.setattr(NixlAgent, "connect", connect_late)
    assert isinstance(pair.connect(), ConnectionInterrupted)
    pair.channel()


def test_introduction_that_is_nonsense_is_an_error(pair: TransportPair) -> None:
    agent = NixlAgent(load_nixl(), "tcp", progresses=False)
    try:
        for metadata in (b"", b"nonsense", bytes(300)):
            with pytest.raises(TransportError):
                agent.connect(metadata)
    finally:
        agent.close()


def test_ucx_gets_rdma_unless_the_environment_says_otherwise() -> None:
    assert ucx_transports({}) == "ib"
    assert ucx_transports({"UCX_TLS": "rc,ud,cuda_copy"}) == "rc,ud,cuda_copy"


@pytest.mark.parametrize("value", ["all", "shm", "tcp,posix", "^cma", "rc,cma", "cuda_ipc", "ib,"])
def test_ucx_transports_that_nothing_can_fence_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="UCX_TLS"):
        ucx_transports({"UCX_TLS": value})


def test_machine_without_such_a_device_is_named(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS")
    end = pair.receiver
    with pytest.raises(ConfigError, match="UCX_TLS=srd"):
        NixlTransport(end.mover, end.arena, end.control, 1, "127.0.0.1", 10.0, "srd")
