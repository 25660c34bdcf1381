"""Leases that are renewed: between engines that live, die, are restarted, or cannot be heard for a
while. Leases are short here; nobody waits for a set time but to let a lease end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2p_engine import P2pNcclEngine, SendMode, TransferKey
from p2p_engine.errors import TransferError, TransferTimeout
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.holds import UNNAMED_LEASES
from p2p_engine.transfer import Transfer
from p2p_engine.wire.addresses import split_address
from tests.rigs.engines import MIB, Peer, assert_idle, engines, settings
from tests.rigs.relay import FaultyRelay
from tests.rigs.tensors import pattern
from tests.support import eventually

KEY = TransferKey("request")
LEASE = 2.0
SHORT: dict[str, Any] = {"lease_seconds": LEASE, "retry_seconds": 0.1}


def wait_leases(count: float = 1.5) -> None:
    """Let so many leases go by. The first renewal comes after a quarter of one, and lasts for one:
    what is not renewed again has ended by then."""
    ends_at = time.monotonic() + count * LEASE
    eventually(lambda: time.monotonic() >= ends_at, count * LEASE + 10)


def hold(engine: P2pNcclEngine, nbytes: int = 1000) -> Any:
    return engine.hold(KEY, TensorSource(pattern("request", nbytes)))


def ended(transfer: Transfer) -> None:
    eventually(lambda: transfer.done)


def pull(engine: P2pNcclEngine, peer: str, nbytes: int = 1000) -> bool:
    tensor = engine.recv_tensor(KEY, peer, timeout=10)
    return torch.equal(tensor, pattern("request", nbytes))


def test_what_has_landed_outlives_its_lease_while_it_is_kept() -> None:
    with engines(2, **SHORT) as (sender, receiver):
        receiver.keep(KEY)
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        wait_leases()
        assert receiver.stats()["live_bytes"] > 0
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        receiver.drop(KEY)
        assert receiver.stats()["kept"] == receiver.stats()["expired_leases"] == 0
        assert_idle(sender, receiver)


def test_a_refusal_whose_lease_has_ended_does_not_come_back_when_its_key_is_kept() -> None:
    """A client sends its request again, under the same id, long after the first one failed."""
    with engines(2, lease_seconds=0.2) as (sender, receiver):
        sender.abandon(KEY, PeerAddress(receiver.zmq_address), "the first one failed")
        refusals = receiver._parts.store._replies._tombstones
        eventually(lambda: [item for item in [refusals.get((KEY, b""))] if item is not None])
        ends_at = time.monotonic() + 0.3
        eventually(lambda: time.monotonic() >= ends_at)
        receiver.keep(KEY, peer=PeerAddress(sender.zmq_address))
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)


def test_a_holder_that_was_denied_and_gave_up_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: dict[str, Any] = {"transfer_timeout_seconds": 0.5, "retry_seconds": 0.1}
    with engines(1, **times) as (holder,), engines(1, retry_seconds=0.1) as (receiver,):
        hold(holder)
        peer, sink = PeerAddress(holder.zmq_address), TensorSink()
        with monkeypatch.context() as patch:
            patch.setattr(receiver._parts.store, "_place", lambda *_: "full")
            transfer = receiver.receive(KEY, sink, peer=peer, pull=True)
            eventually(lambda: holder.stats()["denied_offers"])
            eventually(lambda: not holder._parts.sender._shipments)
        transfer.wait(5)


def test_what_is_kept_no_longer_ends_with_its_lease() -> None:
    with engines(2, **SHORT) as (sender, receiver):
        receiver.keep(KEY)
        sender.send_tensor(KEY, pattern("request", 1000), receiver.zmq_address).wait(10)
        receiver.drop(KEY)
        assert_idle(sender, receiver)
        assert receiver.stats()["expired_leases"] == 1


def test_what_is_held_outlives_its_lease_while_a_peer_keeps_it() -> None:
    with engines(2, **SHORT, send_type=SendMode.GET) as (holder, receiver):
        receiver.keep(KEY, peer=PeerAddress(holder.zmq_address))
        held = hold(holder)
        wait_leases()
        assert not held.done
        assert pull(receiver, holder.zmq_address)
        assert_idle(holder, receiver)


def test_who_holds_nothing_yet_knows_that_it_is_renewed() -> None:
    with engines(2, **SHORT) as (holder, receiver):
        receiver.keep(KEY, peer=PeerAddress(holder.zmq_address))
        eventually(lambda: holder.is_renewed(KEY))
        wait_leases()
        assert holder.is_renewed(KEY)
        assert not holder.is_renewed(KEY, binding=b"another prompt")
        receiver.drop(KEY)
        eventually(lambda: not holder.is_renewed(KEY))


def test_a_killed_peer_renews_nothing() -> None:
    """The holder has its memory back within one lease."""
    with engines(1, **SHORT) as (holder,), Peer(settings(**SHORT)) as peer:
        peer.ask("keep", [KEY.transfer_id], holder.zmq_address)
        held = hold(holder)
        wait_leases()
        assert not held.done
        peer.kill()
        with pytest.raises(TransferTimeout, match="lease"):
            held.wait(LEASE + 10)
        assert_idle(holder)


def test_nobody_keeps_anything_for_longer_than_the_holder_allows() -> None:
    """However often the peer renews it."""
    with (
        engines(1, **SHORT, max_renewal_seconds=LEASE) as (holder,),
        P2pNcclEngine(settings(**SHORT)) as greedy,
    ):
        greedy.keep(KEY, peer=PeerAddress(holder.zmq_address))
        held = hold(holder)
        with pytest.raises(TransferTimeout, match="lease"):
            held.wait(4 * LEASE + 10)
        assert greedy.stats()["kept"] == 1


def test_what_a_peer_will_never_give_is_refused_at_once() -> None:
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        receiver.keep(KEY, peer=PeerAddress(holder.zmq_address))
        eventually(lambda: receiver.stats()["links"].get("ready"))
        holder.abandon(KEY, None, "the request was aborted")
        with pytest.raises(TransferError, match="aborted"):
            receiver.recv_tensor(KEY, holder.zmq_address, timeout=10)


def test_what_a_peer_has_got_it_may_go_on_renewing() -> None:
    """Its other ranks may still send theirs: to be told that this one has no more would end all."""
    with engines(2, **SHORT, send_type=SendMode.GET) as (holder, receiver):
        peer = PeerAddress(holder.zmq_address)
        receiver.keep(KEY, peer=peer)
        held = hold(holder)
        assert pull(receiver, holder.zmq_address)
        eventually(lambda: held.done)
        wait_leases(1)  # four renewals
        hold(holder)  # computed again; what was refused could not be received any more
        assert pull(receiver, holder.zmq_address)
        receiver.drop(KEY)


def test_who_has_two_names_is_heard_by_both() -> None:
    """One engine is kept in touch with by its directory's name, and sent to by its own."""
    with engines(2, **SHORT) as (holder, receiver):
        rank = RankAddress(0, holder.zmq_address, holder.epoch)
        with contextlib.closing(Directory(settings(), [rank], kv_port=0, role="P")) as directory:
            receiver.keep(KEY, peer=PeerAddress(directory.address, 0))
            eventually(lambda: receiver.stats()["links"] == {"ready": 1})
            receiver.send_tensor(KEY, pattern("request", 9), holder.zmq_address)
            eventually(lambda: receiver.stats()["links"] == {"ready": 2})
            holder.abandon(KEY, None, "it was aborted")
            eventually(lambda: not receiver._parts.renewals._duties)
            with pytest.raises(TransferError, match="it was aborted"):
                receiver.receive(KEY, TensorSink())
            holder.drop_landed()
            assert_idle(holder, receiver)


def test_what_was_given_up_before_it_is_kept_is_refused_at_once() -> None:
    with engines(2, lease_seconds=60) as (sender, receiver):
        sender.abandon(KEY, PeerAddress("127.0.0.1:1"), "the request was aborted")
        receiver.keep(KEY, peer=PeerAddress(sender.zmq_address))
        refused(lambda: receiver.recv_tensor(KEY, timeout=0.2), "aborted")


def test_what_was_given_up_and_is_sent_again_arrives() -> None:
    """A prompt was aborted on prefill and comes again under its old name, while decode queues."""
    other = TransferKey("given up for good")
    with engines(2, lease_seconds=60) as (sender, receiver):
        for key in (KEY, other):
            sender.abandon(key, None, "the request was aborted")
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        for key in (KEY, other):  # the answer to the second says that the first was answered
            receiver.keep(key, peer=PeerAddress(sender.zmq_address))
        refused(lambda: receiver.recv_tensor(other, timeout=0.2), "aborted")
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)


def test_what_was_discarded_and_is_kept_again_may_come() -> None:
    with engines(2, lease_seconds=60) as (sender, receiver):
        receiver.discard(KEY)
        receiver.keep(KEY)
        sender.send_tensor(KEY, pattern("request", 1000), receiver.zmq_address).wait(10)
        tensor = receiver.recv_tensor(KEY, timeout=10)
        assert torch.equal(tensor, pattern("request", 1000))


@pytest.mark.parametrize("is_held_first", [True, False])
def test_who_asks_next_gets_what_was_kept_when_the_first_receive_ended(
    is_held_first: bool,
) -> None:
    """Before anything had come: the holder is not told to let go, and what it offers meanwhile is
    put off."""
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        peer = PeerAddress(holder.zmq_address)
        receiver.keep(KEY, peer=peer)
        first = receiver.receive(KEY, TensorSink(), peer=peer, pull=True)
        eventually(lambda: holder._parts.holds._unheld)
        first.cancel("its request was aborted")
        held = []
        if is_held_first:
            held.append(hold(holder))
            eventually(lambda: holder.stats()["denied_offers"])
            assert receiver.stats()["live_bytes"] == 0
        sink = TensorSink()
        second = receiver.receive(KEY, sink, peer=peer, pull=True)
        held = held or [hold(holder)]
        second.wait(10)
        held[0].wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, pattern("request", 1000))
        receiver.drop(KEY)
        assert_idle(holder, receiver)


def test_what_is_released_while_it_is_offered_is_held_no_longer() -> None:
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        peer = PeerAddress(holder.zmq_address)
        receiver.keep(KEY, peer=peer)
        first = receiver.receive(KEY, TensorSink(), peer=peer, pull=True)
        eventually(lambda: holder._parts.holds._unheld)
        first.cancel("its request was aborted")
        held = hold(holder)
        eventually(lambda: holder.stats()["denied_offers"])
        receiver.drop(KEY)
        held.wait(10)
        assert_idle(holder, receiver)


@pytest.mark.parametrize("way", ["cancelled", "discarded", "overdue"])
@pytest.mark.parametrize("is_dropped_first", [True, False])
def test_what_nobody_keeps_any_more_is_let_go_of_at_once(way: str, is_dropped_first: bool) -> None:
    """Whatever has ended its receive before."""
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        peer = PeerAddress(holder.zmq_address)
        receiver.keep(KEY, peer=peer)
        eventually(lambda: holder.is_renewed(KEY))
        steps: list[Callable[[], None]] = [lambda: receiver.drop(KEY)]
        if way == "discarded":
            steps.append(lambda: receiver.discard(KEY, peer=peer, pull=True))
        else:
            seconds = 0.2 if way == "overdue" else 60
            first = receiver.receive(KEY, TensorSink(), peer=peer, pull=True, timeout=seconds)
            steps.append(first.cancel if way == "cancelled" else lambda: ended(first))
        for step in steps if is_dropped_first else reversed(steps):
            step()
        hold(holder).wait(10)
        assert_idle(holder, receiver)
        assert not receiver._parts.store._left
        assert not receiver._parts.expectations.let_go


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_was_gone_and_is_held_again_is_not_released_before(is_kept: bool) -> None:
    """Its lease has ended, and who asked was told so; then the client sends it again."""
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        if is_kept:
            receiver.keep(KEY, peer=PeerAddress(holder.zmq_address))
            eventually(lambda: holder.is_renewed(KEY))
        ended(holder.hold(KEY, TensorSource(pattern("request", 9)), lease=0.05))
        with pytest.raises(TransferError, match="its lease has ended"):
            pull(receiver, holder.zmq_address)
        if is_kept:
            receiver.drop(KEY)
        barrier(receiver, holder)
        held = hold(holder)
        assert pull(receiver, holder.zmq_address)
        held.wait(10)
        assert_idle(holder, receiver)


def barrier(receiver: P2pNcclEngine, holder: P2pNcclEngine) -> None:
    """Wait until the holder has heard all that was said to it."""
    other = TransferKey("barrier")
    receiver.keep(other, peer=PeerAddress(holder.zmq_address))
    eventually(lambda: holder.is_renewed(other))
    receiver.drop(other)


@pytest.mark.parametrize("says_want", [False, True])
def test_what_was_released_and_is_kept_again_is_held(says_want: bool) -> None:
    """It was aborted on decode and asked for again before prefill had computed it."""
    with engines(2, lease_seconds=60, send_type=SendMode.GET) as (holder, receiver):
        peer = PeerAddress(holder.zmq_address)
        receiver.keep(KEY, peer=peer)
        eventually(lambda: holder.is_renewed(KEY))
        receiver.drop(KEY)
        receiver.discard(KEY, peer=peer, pull=True)
        eventually(lambda: not holder.is_renewed(KEY))
        sink = TensorSink()
        if says_want:
            receiver.receive(KEY, sink, peer=peer, pull=True)
            eventually(lambda: holder._parts.holds._unheld)
        else:
            receiver.keep(KEY, peer=peer)
            eventually(lambda: holder.is_renewed(KEY))
        held = hold(holder)
        if not says_want:
            assert not held.done
            receiver.receive(KEY, sink, peer=peer, pull=True)
        held.wait(10)
        eventually(lambda: sink.tensor is not None)


def test_what_was_refused_meanwhile_stays_refused() -> None:
    """Its sender was told no, and has given it up: nobody waits for it."""
    with engines(2, lease_seconds=60) as (sender, receiver):
        receiver.discard(KEY)
        with pytest.raises(TransferError, match="not wanted"):
            sender.send_tensor(KEY, pattern("request", 9), receiver.zmq_address).wait(10)
        receiver.keep(KEY)
        with pytest.raises(TransferError, match="not wanted"):
            receiver.recv_tensor(KEY, timeout=10)


def refused(receive: Callable[[], object], reason: str) -> None:
    """Ask until it is refused for this reason."""

    def is_refused() -> bool:
        with pytest.raises(TransferError) as caught:
            receive()
        return reason in str(caught.value)

    eventually(is_refused)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_restarted_peer_has_nothing_of_what_was_kept(is_named: bool) -> None:
    """Who names the peer need not ask it: it would wait for a request that never comes."""
    with engines(1, **SHORT, peer_timeout_seconds=2) as (receiver,):
        with P2pNcclEngine(settings(**SHORT, send_type=SendMode.GET)) as first:
            port = split_address(first.zmq_address)[1]
            receiver.keep(KEY, peer=PeerAddress(first.zmq_address))
            hold(first)
            wait_leases(0.5)
        with P2pNcclEngine(settings(**SHORT, port=port)) as second:
            eventually(
                lambda: second.stats()["sessions"] and receiver.stats()["links"].get("ready"), 30
            )
            peer = second.zmq_address if is_named else None
            with pytest.raises(TransferError, match="restarted"):
                receiver.recv_tensor(KEY, peer, timeout=10)
            assert_idle(second)


def test_renewals_may_be_lost_for_less_than_a_lease() -> None:
    """One pair cannot hear each other for a while, both lose their connection; all wait once."""
    lease = 8.0
    changes: dict[str, Any] = {
        "lease_seconds": lease,
        "retry_seconds": 0.1,
        "peer_timeout_seconds": 1.0,
    }
    with (
        engines(2, **changes, send_type=SendMode.GET) as holders,
        engines(2, **changes, send_type=SendMode.GET) as (deaf, receiver),
        FaultyRelay(holders[0].zmq_address) as silent,
        FaultyRelay(holders[1].zmq_address) as relay,
    ):
        deaf.keep(KEY, peer=PeerAddress(silent.address))
        receiver.keep(KEY, peer=PeerAddress(relay.address))
        held = [hold(holder) for holder in holders]
        eventually(lambda: all(holder.stats()["sessions"] == 1 for holder in holders))
        began_at = time.monotonic()
        relay.cut()
        silent.mode = "hold"
        eventually(lambda: not deaf.stats()["links"].get("ready"))
        silent.mode = "pass"
        silent.cut()
        eventually(lambda: time.monotonic() - began_at > 1.5 * lease, 2 * lease)
        assert not any(transfer.done for transfer in held)
        assert pull(deaf, holders[0].zmq_address)
        assert pull(receiver, holders[1].zmq_address)


def meet(one: P2pNcclEngine, other: P2pNcclEngine) -> None:
    """Let `one` make a link to `other`."""
    key = TransferKey("hello")
    other.hold(key, TensorSource(pattern("hello", 16)))
    one.recv_tensor(key, other.zmq_address, timeout=10)


def test_what_is_held_outlives_its_lease_while_a_step_of_its_reader_takes_long() -> None:
    """Requests that come meanwhile wait before the scheduler, so nobody can keep their KV."""
    with engines(2, **SHORT, send_type=SendMode.GET) as (holder, receiver):
        meet(receiver, holder)
        held = hold(holder)
        receiver.step_began()
        wait_leases(2)
        assert not held.done
        receiver.step_ended()
        assert pull(receiver, holder.zmq_address)
        assert_idle(holder, receiver)


def test_what_has_landed_outlives_its_lease_while_a_step_takes_long() -> None:
    with engines(2, **SHORT) as (sender, receiver):
        receiver.step_began()
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        wait_leases(2)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)


def test_a_long_step_refuses_nothing_that_was_refused_long_ago() -> None:
    with engines(2, **SHORT) as (sender, receiver):
        meet(receiver, sender)
        receiver.discard(KEY)
        wait_leases(2)
        receiver.step_began()
        eventually(lambda: receiver._parts.expectations.keeps_all)
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)


def test_what_has_landed_lives_for_a_round_after_a_long_step() -> None:
    """The requests that have come meanwhile are known only in a later step."""
    with engines(2, **SHORT) as (sender, receiver):
        receiver.step_began()
        tensor = pattern("request", 1000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        wait_leases(2)
        receiver.step_ended()
        ends_at = time.monotonic() + 0.1 * LEASE
        eventually(lambda: time.monotonic() >= ends_at)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)


def test_a_peer_that_renews_all_again_and_again_costs_one_look() -> None:
    with engines(2, lease_seconds=600, send_type=SendMode.GET) as (holder, receiver):
        meet(receiver, holder)
        held = holder._parts.holds._by_transfer[hold(holder)]
        first, holder._parts.holds._all_renewed_at = held.lease_ends_at, -1e9
        holder._parts.holds.on_renew_all()
        second = held.lease_ends_at
        assert second > first
        for _ in range(100):
            holder._parts.holds.on_renew_all()
        assert held.lease_ends_at == second
        receiver.discard(KEY, peer=PeerAddress(holder.zmq_address))


def test_a_step_that_has_ended_keeps_nothing() -> None:
    with engines(2, **SHORT, send_type=SendMode.GET) as (holder, receiver):
        meet(receiver, holder)
        held = hold(holder)
        receiver.step_began()
        receiver.step_ended()
        ended(held)
        assert holder.stats()["expired_leases"] == 1


def test_a_step_that_never_ends_keeps_what_nobody_named_for_a_few_leases() -> None:
    with engines(2, lease_seconds=0.5, retry_seconds=0.1, send_type=SendMode.GET) as pair:
        holder, receiver = pair
        meet(receiver, holder)
        held, began_at = hold(holder), time.monotonic()
        receiver.step_began()
        ended(held)
        assert time.monotonic() - began_at >= UNNAMED_LEASES * 0.5


def test_an_offer_that_is_denied_outlives_its_deadline_while_a_step_takes_long() -> None:
    changes = {**SHORT, "transfer_timeout_seconds": LEASE, "mem_pool_size_gb": 0}
    with engines(2, **changes, kv_buffer_size=4 * MIB) as (sender, receiver):
        meet(receiver, sender)
        receiver.step_began()
        keys, sent = (TransferKey("first"), TransferKey("second")), []
        for key in keys:
            tensor = pattern(key.transfer_id, 5 * MIB // 2)
            sent.append(sender.send_tensor(key, tensor, receiver.zmq_address))
        eventually(lambda: sender.stats()["denied_offers"])
        wait_leases(2)
        assert not sent[1].done
        for key in keys:
            tensor = receiver.recv_tensor(key, sender.zmq_address, timeout=10)
            assert torch.equal(tensor, pattern(key.transfer_id, 5 * MIB // 2))


def test_what_is_denied_outlives_its_deadline_while_it_is_kept() -> None:
    """And arrives as soon as there is room."""
    changes = {**SHORT, "transfer_timeout_seconds": LEASE, "mem_pool_size_gb": 0}
    with engines(2, **changes, kv_buffer_size=4 * MIB) as (sender, receiver):
        keys, sent = (TransferKey("first"), TransferKey("second")), []
        for key in keys:
            receiver.keep(key, peer=PeerAddress(sender.zmq_address))
            tensor = pattern(key.transfer_id, 5 * MIB // 2)
            sent.append(sender.send_tensor(key, tensor, receiver.zmq_address))
        eventually(lambda: sender.stats()["denied_offers"])
        wait_leases()
        assert not sent[1].done
        for key in keys:
            tensor = receiver.recv_tensor(key, sender.zmq_address, timeout=10)
            assert torch.equal(tensor, pattern(key.transfer_id, 5 * MIB // 2))
        sent[1].wait(10)


def test_thousands_of_contents_cost_a_few_messages() -> None:
    names = [TransferKey(f"request-{number}") for number in range(4000)]
    with engines(2, lease_seconds=4, send_type=SendMode.GET) as (holder, receiver):
        for key in names:
            holder.hold(key, TensorSource(pattern("x", 16)))
            receiver.keep(key, peer=PeerAddress(holder.zmq_address))
        eventually(lambda: holder.stats()["sessions"] == 1)
        before = receiver.stats()["messages_sent"]
        began_at = time.monotonic()
        eventually(lambda: time.monotonic() - began_at > 6, 20)
        num_said = receiver.stats()["messages_sent"] - before
        assert holder.stats()["expired_leases"] == 0
        assert num_said <= 10 * (time.monotonic() - began_at), "pings included"


def test_what_is_held_comes_to_who_waits_for_a_push() -> None:
    """Each side may have been told another mode."""
    with engines(2, retry_seconds=0.1) as (holder, receiver):
        hold(holder)
        assert pull(receiver, holder.zmq_address)
        assert_idle(holder, receiver)


def test_a_push_that_was_given_up_is_not_waited_for() -> None:
    with engines(2, retry_seconds=0.1) as (sender, receiver):
        sender.abandon(KEY, None, "the request was aborted")
        with pytest.raises(TransferError, match="aborted"):
            receiver.recv_tensor(KEY, sender.zmq_address, timeout=19)


def test_a_push_that_does_not_come_is_asked_for_more_and_more_seldom() -> None:
    with engines(2, retry_seconds=0.05, lease_seconds=20) as (sender, receiver):
        with pytest.raises(TransferTimeout):
            receiver.recv_tensor(KEY, sender.zmq_address, timeout=3)
        assert receiver.stats()["messages_sent"] < 20
        assert sender.stats()["open_transfers"] == 0
