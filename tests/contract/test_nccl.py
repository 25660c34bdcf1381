"""What the transport nccl promises beyond the others, on the double of NCCL: groups that are
made, evicted and aborted; faults of the library; the order of what runs on a GPU."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.environment import check_environment
from p2p_engine.memory.layout import Regions, one_region
from p2p_engine.transports.base import Channel, Order
from p2p_engine.transports.handshake import ACCEPTED, PREAMBLE
from p2p_engine.transports.nccl import sending
from p2p_engine.transports.nccl.memory import MIB, Side, estimated_bytes
from p2p_engine.transports.nccl.reaper import PATIENCE_SECONDS, Reaper
from p2p_engine.transports.nccl.rendezvous import MAX_PIECES
from p2p_engine.transports.nccl.slabs import NUM_RECV_SLABS
from p2p_engine.transports.nccl.transport import NcclTransport
from p2p_engine.transports.nccl.wire import Frame, FrameKind, Wire
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.rigs.tensors import random_memory
from tests.rigs.transports import ARENA_BYTES, GrantedRegion, TransportEnd, TransportPair, write
from tests.support import SeededRandom, all_given_back, eventually, held_resources


@pytest.fixture
def double() -> Iterator[GpuDouble]:
    """Return the double; a test must give everything back, from one thread for each group."""
    made, environment = GpuDouble(), settings_of_process()
    with all_given_back(made):
        yield made
    assert settings_of_process() == environment


def settings_of_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


@contextlib.contextmanager
def pairs(name: str = "nccl", **options: Any) -> Iterator[TransportPair]:
    made = TransportPair(name, **options)
    try:
        yield made
    finally:
        made.close()


def stats(half: TransportEnd) -> dict[str, int]:
    assert isinstance(half.transport, NcclTransport)
    return half.transport.stats()


@contextlib.contextmanager
def impatience(pair: TransportPair, seconds: float) -> Iterator[None]:
    """Let both halves give up soon what was made to fail, and nothing before or after it."""
    resources = []
    for half in (pair.sender, pair.receiver):
        assert isinstance(half.transport, NcclTransport)
        resources.append(half.transport._shared)
    patience = [(shared.patience_seconds, shared.first_seconds) for shared in resources]
    for shared in resources:
        shared.patience_seconds = shared.first_seconds = seconds
    yield
    for shared, before in zip(resources, patience, strict=True):
        shared.patience_seconds, shared.first_seconds = before


def send(pair: TransportPair, channel: Channel, memory: np.ndarray) -> GrantedRegion:
    landing = pair.grant(None, memory.nbytes)
    write(channel, one_region(memory.ctypes.data, memory.nbytes), landing, memory)
    return landing


def assert_arrives(pair: TransportPair, channel: Channel, memory: np.ndarray) -> None:
    landing = send(pair, channel, memory)
    eventually(lambda: pair.has_landed(landing, memory.nbytes))
    assert pair.bytes_of(landing, memory.nbytes) == memory.tobytes()
    pair.receiver.arena.release(landing.space)


def test_a_group_is_connected_before_it_is_used(double: GpuDouble, rng: SeededRandom) -> None:
    with pairs() as pair:
        eager = double["eager_operations"]
        channel = pair.channel()
        assert double["eager_operations"] == eager + 1
        assert_arrives(pair, channel, random_memory(rng, 3 * MIB))


def test_its_memory_is_told_as_estimated_and_as_measured(double: GpuDouble) -> None:
    with pairs(num_channels=4) as pair:
        pair.channel()
        for half, side in ((pair.sender, Side.SENDER), (pair.receiver, Side.RECEIVER)):
            eventually(lambda h=half: stats(h)["measured_bytes"])  # type: ignore[misc]
            assert stats(half)["estimated_bytes"] == estimated_bytes(4, side)
        # both halves share one device here, so that each measures a part of the other's group too
        assert stats(pair.sender)["measured_bytes"] >= estimated_bytes(4)


def test_nothing_is_registered_unless_it_is_asked_for(double: GpuDouble, rng: SeededRandom) -> None:
    with pairs() as pair:
        assert_arrives(pair, pair.channel(), random_memory(rng, MIB))
        assert double["live_registrations"] == 0
        assert stats(pair.sender)["registered_bytes"] == 0
    with pairs(registers=True) as pair:
        assert_arrives(pair, pair.channel(), random_memory(rng, MIB))
        for half in (pair.sender, pair.receiver):
            eventually(lambda h=half: stats(h)["registered_bytes"] > ARENA_BYTES)  # type: ignore[misc]
        assert double["live_registrations"] == 4  # slabs and buffer on both sides


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_nothing_is_registered_unless_both_sides_want_it(
    double: GpuDouble, rng: SeededRandom, who: str
) -> None:
    """They would cut pieces differently."""
    with pairs() as pair:
        getattr(pair, who).close()
        setattr(pair, who, TransportEnd("nccl", registers=True))
        assert_arrives(pair, pair.channel(), random_memory(rng, MIB))
        assert double["live_registrations"] == 0


def test_many_pairs_on_one_device(double: GpuDouble, rng: SeededRandom) -> None:
    """Pieces of different pairs take turns over the slots."""
    with contextlib.ExitStack() as stack:
        ring = [stack.enter_context(pairs()) for _ in range(3)]
        channels = [pair.channel() for pair in ring]
        memory = random_memory(rng, 2 * MIB)
        for _ in range(10):
            sizes = [rng.randrange(1, MIB) for _ in ring]
            landings = [
                send(pair, channel, memory[:size])
                for pair, channel, size in zip(ring, channels, sizes, strict=True)
            ]
            for pair, landing, size in zip(ring, landings, sizes, strict=True):
                eventually(lambda p=pair, item=landing, n=size: p.has_landed(item, n))  # type: ignore[misc]
                assert pair.bytes_of(landing, size) == memory[:size].tobytes()
                pair.receiver.arena.release(landing.space)
        assert double["most_kernels"] <= 3 * 2 * 3


def test_nothing_leaves_before_it_is_computed(double: GpuDouble) -> None:
    """A slow kernel writes the source after the write was ordered: no old byte may leave."""
    cuda = Cuda()
    cuda.use(0)
    memory = np.zeros(600_000, np.uint8)
    with pairs() as pair:
        channel = pair.channel()
        assert pair.sender.device is not None
        stream = cuda.create_stream()
        kernel = SlowKernel(cuda, stream)
        cuda.fill(memory.ctypes.data, 7, memory.nbytes, stream)
        slow = pair.grant(None, memory.nbytes)
        moment = pair.sender.device.record(stream)
        source = one_region(memory.ctypes.data, memory.nbytes)
        job = channel.write(Order(source, slow.grant, keep=memory, after=(moment,)))
        assert_arrives(pair, channel, np.full(600_000, 3, np.uint8))  # others are not delayed
        assert job.state == "queued"
        assert not pair.has_landed(slow, memory.nbytes)
        kernel.end()
        eventually(lambda: pair.has_landed(slow, memory.nbytes))
        assert pair.bytes_of(slow, memory.nbytes) == b"\x07" * memory.nbytes
        cuda.destroy_stream(stream)
        del moment, job


def test_a_kernel_that_is_launched_late_is_waited_for(double: GpuDouble, rng: SeededRandom) -> None:
    """NCCL's calls return before the kernel is in its stream, and refuse another one until then."""
    memory = random_memory(rng, MIB)
    with pairs(slab_bytes=MIB // 4) as pair:
        channel, landing = pair.channel(), pair.grant(None, memory.nbytes)
        with double.fault(launch_hangs=1):
            source = one_region(memory.ctypes.data, memory.nbytes)
            job = channel.write(Order(source, landing.grant, keep=memory))
            assert landing.job is not None
            eventually(lambda: landing.job is not None and landing.job.state == "running")
            look_again(pair)
            assert not job.done
            assert not landing.job.done
        eventually(lambda: pair.has_landed(landing, memory.nbytes))
        assert pair.bytes_of(landing, memory.nbytes) == memory.tobytes()


def failure(connect: Callable[[], Channel | TransportError]) -> str:
    outcome = connect()
    assert isinstance(outcome, TransportError)
    return str(outcome)


def test_another_release_is_refused_with_both_named(double: GpuDouble) -> None:
    with pairs() as pair:
        endpoint = {**pair.invitation(), "version": "23007"}
        assert "NCCL 2.28.9 here, 2.30.7 there" in failure(lambda: pair.connect(endpoint))
        assert stats(pair.sender)["groups"] == 0


@pytest.mark.parametrize("fault", ["init_hangs", "init_fails"])
def test_a_group_that_is_not_made_is_an_error(double: GpuDouble, fault: str) -> None:
    with pairs() as pair:
        with double.fault(**{fault: 1}), impatience(pair, 0.3):
            text = failure(pair.connect)
            assert any(  # one side is the first to give up
                reason in text for reason in ("did not end", "ncclCommGetAsync", "peer closed")
            )
            roots = double["open_roots"]
        eventually(lambda: double["live_comms"] == 0)
        pair.channel()
        assert double["open_roots"] <= roots


def test_no_unique_id_before_the_peer_has_agreed(double: GpuDouble) -> None:
    """Who accepts the connection and then says nothing costs neither thread nor descriptor."""
    ids = double["unique_ids"]
    with pairs(patience_seconds=0.3) as pair, socket.create_server(("127.0.0.1", 0)) as silent:
        answered: list[socket.socket] = []

        def accept() -> None:
            connection, _ = silent.accept()
            connection.recv(24, socket.MSG_WAITALL)
            connection.sendall(ACCEPTED)
            answered.append(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        text = failure(lambda: pair.connect({**pair.invitation(), "address": address}))
        assert "did not agree to a group" in text
        thread.join(10)
        answered[0].close()
    assert double["unique_ids"] == ids


@pytest.mark.parametrize(
    "fault",
    [{"send_hangs": 1}, {"send_hangs": 1, "async_error": 6}, {"launch_hangs": 1}],
)
def test_a_transfer_that_fails_on_the_gpu_ends_and_is_never_taken_for_whole(
    double: GpuDouble, rng: SeededRandom, fault: dict[str, int]
) -> None:
    memory = random_memory(rng, 2 * MIB)
    with pairs() as pair:
        channel, broken = pair.channel(), []  # type: ignore[var-annotated]
        pair.sender.in_control(lambda: channel.watch(broken.append))
        landing = pair.grant(None, memory.nbytes)  # before an error that both sides may see
        with double.fault(**fault), impatience(pair, 0.5):
            source = one_region(memory.ctypes.data, memory.nbytes)
            job = channel.write(Order(source, landing.grant, keep=memory))
            assert job.wait(10)
            assert landing.job is not None
            assert landing.job.wait(10)
        assert (job.state, landing.job.state) == ("failed", "failed")
        eventually(lambda: broken)  # told in another thread
        pair.sender.in_control(lambda: None)
        assert len(broken) == 1
        pair.receiver.arena.release(landing.space)
        assert_arrives(pair, pair.channel(), memory)


def num_free_lanes(pair: TransportPair) -> int:
    """How many lanes of slabs the sender could take now."""
    assert isinstance(pair.sender.transport, NcclTransport)
    return pair.sender.transport._shared.send_slots.num_free


def look_again(pair: TransportPair) -> None:
    """Let both devices' threads look at all groups and events again."""
    for half in (pair.sender, pair.receiver):
        assert half.device is not None
        for _ in range(20):
            half.device.run(lambda: None, 5.0)


def test_a_failed_group_keeps_its_memory_until_its_abort_has_returned(
    double: GpuDouble, rng: SeededRandom
) -> None:
    """Its kernels have ended, and a network card still writes into what is registered."""
    memory = random_memory(rng, MIB)
    with double.fault(is_network=1), pairs(registers=True) as pair:
        channel, landing, late = pair.channel(), pair.grant(None, MIB), double["late_writes"]
        lanes = num_free_lanes(pair)
        with double.fault(abort_hangs=1):
            with double.fault(send_hangs=1):
                job = write(channel, one_region(memory.ctypes.data, MIB), landing, memory)
                eventually(lambda: double["resident_kernels"] == 2)
                look_again(pair)
                pair.sender.in_control(lambda: channel.close(0))
            eventually(lambda: not double["resident_kernels"])
            look_again(pair)
            assert landing.job is not None
            assert not landing.job.done
            assert not job.done
            assert double["late_writes"] == late
            assert num_free_lanes(pair) == lanes - 1
        assert job.wait(10)
        assert landing.job.wait(10)
        assert (job.state, landing.job.state) == ("failed", "failed")
        assert double["late_writes"] > late
        assert num_free_lanes(pair) == lanes
        pair.receiver.arena.release(landing.space)
        assert_arrives(pair, pair.channel(), memory)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_sent", range(9))
def test_wherever_a_sender_is_aborted_no_wrong_byte_counts(
    double: GpuDouble, rng: SeededRandom, num_sent: int, is_late: bool
) -> None:
    """At each of eight pieces, and when all kernels have ended: before the sender has seen that
    (`is_late`), and after. On one host, an aborted kernel tells its peer's that all bytes have
    come; the receiver may see the end of that one before the end of the connection (`is_late`)."""
    memory = random_memory(rng, MIB)
    with pairs(slab_bytes=MIB // 8) as pair:
        channel, landing, goes_on = pair.channel(), pair.grant(None, MIB), threading.Event()
        sender, receiver, sent = pair.sender.device, pair.receiver.device, double["sent_operations"]
        assert isinstance(pair.receiver.transport, NcclTransport)
        wire = pair.receiver.transport._senders[pair.sender.epoch]._wire
        assert sender is not None
        assert receiver is not None
        assert landing.job is not None

        def fail() -> None:
            goes_on.wait(20)
            channel._pair.fail(TransportError("the test says so"))  # type: ignore[attr-defined]

        with double.fault(send_hangs=sent + min(num_sent, 7)):
            job = write(channel, one_region(memory.ctypes.data, MIB), landing, memory)
            eventually(lambda: double["sent_operations"] == sent + min(num_sent, 7))
            eventually(lambda: double["resident_kernels"] == 2)
            look_again(pair)
            if num_sent == 8 and is_late:
                sender.post(fail)
            elif is_late:
                receiver.run(lambda: receiver.unwatch(wire._connection.fileno()), 5.0)
            if num_sent == 8:
                double["send_hangs"] = sent + 8
                eventually(lambda: double["sent_operations"] == sent + 8)
                assert is_late or job.wait(10)
            goes_on.set()
            if num_sent < 8 or not is_late:
                sender.post(fail)
            eventually(lambda: double["resident_kernels"] < 2)
            look_again(pair)
            assert (landing.job.state == "done") == (num_sent == 8 and not is_late)
            if num_sent < 8 and is_late:
                receiver.run(lambda: receiver.watch(wire._connection.fileno(), wire._serve), 5.0)
            assert job.wait(10)
            assert landing.job.wait(10)
        state = "done" if num_sent == 8 and not is_late else "failed"
        assert (job.state, landing.job.state) == (state, state)
        assert (pair.bytes_of(landing, MIB) == memory.tobytes()) == (num_sent == 8)


def test_an_abort_that_hangs_is_quarantined_and_costs_nothing_else(
    double: GpuDouble, rng: SeededRandom
) -> None:
    memory = random_memory(rng, MIB)
    with pairs() as pair:
        with double.fault(abort_hangs=1):
            first = pair.channel()
            pair.sender.in_control(first.close)
            second = pair.channel()
            assert_arrives(pair, second, memory)
            eventually(lambda: stats(pair.sender)["aborted"] == 1)
            assert double["live_comms"] == 4
        eventually(lambda: double["live_comms"] == 2)


def test_closing_gives_up_only_an_abort_that_counts_as_stuck(
    double: GpuDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the peer's, whose process may not have had a core for seconds."""
    wait, waits = Reaper.wait, list[float]()

    def listen(reaper: Reaper, timeout: float) -> bool:
        waits.append(timeout)
        return wait(reaper, timeout)

    monkeypatch.setattr(Reaper, "wait", listen)
    with pairs() as pair:
        pair.channel()
    assert waits == [PATIENCE_SECONDS] * 2


def test_an_aborted_peer_is_noticed_by_both_sides(double: GpuDouble, rng: SeededRandom) -> None:
    """Each abort waits for the other one, as on one host: both must come."""
    with pairs() as pair:
        channel = pair.channel()
        send(pair, channel, random_memory(rng, 4 * MIB))
        aborts = double["aborts"]
        pair.sender.in_control(channel.close)
        eventually(lambda: double["live_comms"] == 0)
        assert double["aborts"] == aborts + 2


def test_idle_groups_go_least_recently_used_first(double: GpuDouble, rng: SeededRandom) -> None:
    """One sender with three receivers and room for two groups: all are served, again and again."""
    memory, left = random_memory(rng, 300_000), double["left_registrations"]
    with contextlib.ExitStack() as stack:
        sender = TransportEnd("nccl", max_groups=2, registers=True)
        receivers = [stack.enter_context(pairs(registers=True)) for _ in range(3)]
        for pair in receivers:
            pair.sender.close()
            pair.sender = sender
        channels = [pair.channel() for pair in receivers]
        for _ in range(3):
            for pair, channel in zip(receivers, channels, strict=True):
                assert_arrives(pair, channel, memory)
                assert stats(sender)["groups"] <= 2
        assert stats(sender)["evicted"] >= 6
        told = stats(sender)
        assert told["made"] - told["evicted"] <= told["groups"] <= 2  # one may still be made
        eventually(lambda: double["live_comms"] == 2 * stats(sender)["groups"])
        assert double["left_registrations"] == left


def test_a_receiver_asks_for_the_end_of_what_it_does_not_need(
    double: GpuDouble, rng: SeededRandom
) -> None:
    """What peers make is accepted beyond the limit, and idle groups go then."""
    memory = random_memory(rng, 300_000)
    with contextlib.ExitStack() as stack:
        receiver = TransportEnd("nccl", max_groups=1)
        senders = [stack.enter_context(pairs()) for _ in range(3)]
        for pair in senders:
            pair.receiver.close()
            pair.receiver = receiver
        channels = [pair.channel() for pair in senders]
        for pair, channel in zip(senders, channels, strict=True):
            assert_arrives(pair, channel, memory)
        eventually(lambda: stats(receiver)["groups"] <= 1)
        for pair, channel in zip(senders, channels, strict=True):
            assert_arrives(pair, channel, memory)


def test_a_thousand_connections_leave_nothing(double: GpuDouble) -> None:
    with pairs() as pair:

        def connect(times: int) -> None:
            for _ in range(times):
                channel = pair.connect()
                assert not isinstance(channel, TransportError)
                pair.sender.in_control(channel.close)
            eventually(lambda: double["live_comms"] == 0)

        def num_spare_events() -> int:  # as many as were ever in use at once: none is lost
            devices = [half.device for half in (pair.sender, pair.receiver)]
            return sum(len(device._spare_events) for device in devices if device is not None)

        connect(10)
        num_before, before = num_spare_events(), held_resources()
        aborts = double["aborts"]
        connect(1000)
        assert double["aborts"] == aborts + 2000
        excess: set[str] = set()

        def is_as_before() -> bool:
            num_spare, after = num_spare_events(), held_resources()
            excess.clear()
            excess.update(after - before)
            return len(after) - num_spare <= len(before) - num_before

        try:
            eventually(is_as_before)
        except AssertionError:
            pytest.fail(f"not given back: {excess}, with {num_before} spare events before")


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
        {"NCCL_COMM_BLOCKING": "1"},
        {"NCCL_MIN_NCHANNELS": "8"},
        {"NCCL_MIN_NRINGS": "0x4"},
        {"NCCL_MIN_P2P_NCHANNELS": "3"},
        {"NCCL_MAX_CTAS": "32"},
        {"NCCL_P2P_USE_CUDA_MEMCPY": "1"},
        {"NCCL_BUFFSIZE": "8388608"},
        {"NCCL_LL_BUFFSIZE": "0x100000"},
        {"NCCL_LL128_BUFFSIZE": "33554432"},
    ],
)
def test_settings_that_deadlock_are_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environment))):
        check_environment(environment, 2)
    check_environment({}, 2)
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=2"):
        check_environment({}, 2, is_mps=True)
    check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 2, is_mps=True)


def test_a_file_of_nccls_may_set_what_is_refused(tmp_path: Path) -> None:
    """NCCL reads it into the environment, where nothing is set yet."""
    path = tmp_path / "nccl.conf"
    path.write_text("# for the cluster\nNCCL_DEBUG=WARN\nNCCL_LAUNCH_ORDER_IMPLICIT=1\n")
    with pytest.raises(ConfigError, match=r"NCCL_LAUNCH_ORDER_IMPLICIT.*nccl\.conf"):
        check_environment({"NCCL_CONF_FILE": str(path)}, 2)
    check_environment({"NCCL_CONF_FILE": str(path), "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, 2)
    check_environment({"NCCL_CONF_FILE": str(tmp_path / "nowhere")}, 2)
    path.write_bytes(b"# f\xfcr uns\nNCCL_MIN_NCHANNELS=4\nNCCL_MIN_NCHANNELS=2\n")
    with pytest.raises(ConfigError, match=r"NCCL_MIN_NCHANNELS=4 in .*nccl\.conf"):
        check_environment({"NCCL_CONF_FILE": str(path)}, 2)


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_MIN_NCHANNELS": "4"},  # what the groups have anyway
        {"NCCL_MAX_CTAS": "2"},  # fewer: less memory than is planned
        {"NCCL_MIN_CTAS": "32"},  # NCCL lowers it to the maximum
        {"NCCL_NCHANNELS_PER_NET_PEER": "32"},  # bounded by the channels of the group
        {"NCCL_COMM_BLOCKING": "0"},
        {"NCCL_BUFFSIZE": "4194304"},  # its default
        {"NCCL_LL128_BUFFSIZE": "-2"},
        {"NCCL_P2P_USE_CUDA_MEMCPY": "0"},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_MIN_NCHANNELS": "many"},
        {"NCCL_MIN_NCHANNELS": ""},
    ],
)
def test_variables_that_make_no_group_larger_are_allowed(environment: dict[str, str]) -> None:
    check_environment(environment, 4)


def test_a_variable_that_vllm_sets_itself_is_refused_with_what_works() -> None:
    """vLLM's EPLB sets NCCL_MAX_CTAS=8 in a worker unless a number is set there."""
    with pytest.raises(ConfigError, match=r"set 2 before vLLM starts, or transports without nccl"):
        check_environment({"NCCL_MAX_CTAS": "8"}, 2)
    check_environment({"NCCL_MAX_CTAS": "2"}, 2)


def test_a_first_communicator_may_take_longer_than_later_ones(double: GpuDouble) -> None:
    """It loads what NCCL needs in a process. Either side may be the new one."""
    with pairs(patience_seconds=0.3) as pair:
        with double.fault(init_milliseconds=900):
            first = pair.channel()
            pair.sender.in_control(first.close)
            text = failure(pair.connect)  # a second one is not
            assert any(reason in text for reason in ("did not end", "peer closed"))
        pair.channel()
    with pairs(patience_seconds=0.3) as pair, contextlib.ExitStack() as stack:
        old = pair.sender
        pair.channel()
        pair.sender = TransportEnd("nccl", patience_seconds=0.3)
        stack.callback(old.close)
        with double.fault(init_milliseconds=900):
            pair.channel()  # to a receiver that has made one


@pytest.mark.parametrize("channels", [2, 4, 8, 32])
def test_all_channels_are_used_between_hosts(double: GpuDouble, channels: int) -> None:
    with double.fault(is_network=1), pairs(num_channels=channels) as pair:
        pair.channel()
        assert double["peer_channels"] == channels


@pytest.mark.parametrize(
    ("channels", "processors", "slots"),
    [(1, 132, 3), (2, 132, 3), (4, 132, 2), (8, 132, 2), (16, 132, 2), (32, 132, 2),
     (32, 108, 1), (64, 132, 1), (2, 4, 1)],
)  # fmt: skip
def test_two_pieces_are_in_progress_where_their_kernels_fit(
    double: GpuDouble, channels: int, processors: int, slots: int
) -> None:
    """One is ready when the other ends: more channels are not slower. Those of both directions
    must be resident at once."""
    with double.fault(multiprocessors=processors), pairs(num_channels=channels) as pair:
        assert isinstance(pair.sender.transport, NcclTransport)
        shared = pair.sender.transport._shared
        assert (shared.send_slots.num_free, shared.recv_slots.num_free) == (min(2, slots), slots)


def test_memory_of_one_host_is_not_registered_with_its_peer() -> None:
    environment = {"NCCL_LEGACY_CUDA_REGISTER": "1"}
    with pytest.raises(ConfigError, match="NCCL_LEGACY_CUDA_REGISTER"):
        check_environment(environment, 2, registers=True)
    check_environment(environment, 2)


def test_what_waits_for_a_slab_is_refused_once_nobody_wants_it(
    double: GpuDouble, rng: SeededRandom
) -> None:
    """The copies out of all slabs hang: the sender has its memory back at once, the receiver not
    before they have ended."""
    memory = random_memory(rng, 2 * MIB)
    with pairs("nccl to host") as pair:
        channel, sent = pair.channel(), double["sent_operations"]
        with double.fault(copies_hang=1):
            landing = pair.grant(None, memory.nbytes)
            source = one_region(memory.ctypes.data, memory.nbytes)
            job = channel.write(Order(source, landing.grant, keep=memory))
            eventually(lambda: double["sent_operations"] == sent + NUM_RECV_SLABS)
            assert landing.job is not None
            landing.job.cancel()
            assert job.wait(10)
            assert not landing.job.done
        assert landing.job.wait(10)
        assert landing.job.state == "cancelled"
        pair.receiver.arena.release(landing.space)
        assert_arrives(pair, channel, memory)


def num_said(pair: TransportPair, monkeypatch: pytest.MonkeyPatch, kind: FrameKind) -> list[Frame]:
    """Collect the frames of a kind that are said from now on."""
    said: list[Frame] = []
    say = Wire.say

    def listen(wire: Wire, frame: Frame) -> None:
        if frame.kind is kind:
            said.append(frame)
        say(wire, frame)

    monkeypatch.setattr(Wire, "say", listen)
    return said


def test_one_round_trip_covers_several_pieces(
    double: GpuDouble, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered ones, all of them packed in the streams of one lane's slabs."""
    memory = random_memory(rng, 2 * MIB)
    with pairs(slab_bytes=MIB // 8) as pair:
        channel, sent = pair.channel(), double["sent_operations"]
        asked = num_said(pair, monkeypatch, FrameKind.ASK)
        parts = np.arange(0, 2 * MIB, 2 * 1000, dtype=np.int64)
        lengths = np.minimum(1000, 2 * MIB - parts)
        regions = Regions(memory.ctypes.data + parts, lengths)
        landing = pair.grant(None, regions.nbytes)
        write(channel, regions, landing, memory)
        eventually(lambda: pair.has_landed(landing, regions.nbytes))
        expected = b"".join(
            memory[start : start + n].tobytes()
            for start, n in zip(parts.tolist(), lengths.tolist(), strict=True)
        )
        assert pair.bytes_of(landing, regions.nbytes) == expected
        num_pieces = double["sent_operations"] - sent
        assert num_pieces == -(-regions.nbytes // (MIB // 8))
        assert len(asked) == -(-num_pieces // MAX_PIECES)


def test_a_source_in_host_memory_waits_for_an_idle_slab(
    double: GpuDouble, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from there may hold up the device's thread until its stream gets there: behind a send
    in the same stream, that would be until the peer has received. Sources on the device go on."""
    memory, other = random_memory(rng, 2 * MIB), random_memory(rng, MIB)
    with pairs(slab_bytes=MIB // 8) as pair:
        channel = pair.channel()
        assert pair.sender.device is not None
        cuda = pair.sender.device.cuda
        cuda.note_host(memory.ctypes.data, memory.nbytes)
        asked = num_said(pair, monkeypatch, FrameKind.ASK)
        landings = [send(pair, channel, each) for each in (memory, other, memory)]
        for landing, each in zip(landings, (memory, other, memory), strict=True):
            eventually(lambda item=landing, n=each.nbytes: pair.has_landed(item, n))  # type: ignore[misc]
            assert pair.bytes_of(landing, each.nbytes) == each.tobytes()
        assert len(asked) == 2 * 16 + 8 // MAX_PIECES
        cuda.forget_host(memory.ctypes.data)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_copy_that_is_refused_keeps_neither_lane_nor_slab(
    double: GpuDouble, rng: SeededRandom, side: str
) -> None:
    """From host memory on one side, to host memory on the other; what has begun ends first."""
    memory = random_memory(rng, MIB)
    with pairs("nccl" if side == "sender" else "nccl to host") as pair:
        channel, lanes = pair.channel(), num_free_lanes(pair)
        assert pair.sender.device is not None
        if side == "sender":
            pair.sender.device.cuda.note_host(memory.ctypes.data, memory.nbytes)
        with double.fault(copy_fails=1):
            landing = pair.grant(None, memory.nbytes)
            job = write(channel, one_region(memory.ctypes.data, memory.nbytes), landing, memory)
            assert job.wait(10)
            assert landing.job is not None
            assert landing.job.wait(10)
            assert "failed" in (job.state, landing.job.state)
        assert isinstance(pair.receiver.transport, NcclTransport)
        slabs = pair.receiver.transport._shared.recv_slabs
        eventually(lambda: num_free_lanes(pair) == lanes)
        eventually(lambda: not slabs._slots.num_held)
        pair.receiver.arena.release(landing.space)
        assert_arrives(pair, pair.channel(), memory)
        pair.sender.device.cuda.forget_host(memory.ctypes.data)


def test_a_write_that_is_cancelled_ends_behind_what_was_granted(
    double: GpuDouble, rng: SeededRandom
) -> None:
    memory = random_memory(rng, 4 * MIB)
    with pairs(slab_bytes=MIB // 16) as pair:
        channel = pair.channel()
        for _ in range(20):
            landing = pair.grant(None, memory.nbytes)
            job = write(channel, one_region(memory.ctypes.data, memory.nbytes), landing, memory)
            job.cancel()
            assert job.wait(10)
            assert landing.job is not None
            assert landing.job.wait(10)
            assert (job.state, landing.job.state) in {
                ("cancelled", "cancelled"), ("done", "done"), ("cancelled", "done"),
            }  # fmt: skip
            pair.receiver.arena.release(landing.space)
        assert_arrives(pair, channel, memory)


def test_a_receive_that_is_cancelled_refuses_the_rest(double: GpuDouble, rng: SeededRandom) -> None:
    memory = random_memory(rng, 4 * MIB)
    with pairs(slab_bytes=MIB // 16) as pair:
        channel = pair.channel()
        for _ in range(20):
            landing = pair.grant(None, memory.nbytes)
            job = write(channel, one_region(memory.ctypes.data, memory.nbytes), landing, memory)
            assert landing.job is not None
            landing.job.cancel()
            assert job.wait(10)
            assert landing.job.wait(10)
            assert landing.job.state in ("cancelled", "done")
            pair.receiver.arena.release(landing.space)
        assert_arrives(pair, channel, memory)


@pytest.mark.parametrize(
    "new", [{"offset": 0}, {"offset": 1 << 40}, {"nbytes": 3}, {"nbytes": 128}, {"seq": 1}]
)
def test_a_group_that_cannot_be_is_refused(double: GpuDouble, new: dict[str, int]) -> None:
    with pairs() as pair:
        fields = {"nbytes": 2, "offset": MIB, **new}
        with hostile(pair) as peer:
            peer.sendall(FRAME.pack(FrameKind.NEW, 1, 0, fields.get("seq", 0), fields["offset"],
                                    fields["nbytes"]))  # fmt: skip
            assert peer.recv(1) == b""


FRAME = struct.Struct("<BxxxIQQQQ")


@contextlib.contextmanager
def hostile(pair: TransportPair) -> Iterator[socket.socket]:
    """Connect as a sender that says what it likes."""
    endpoint = pair.invitation()
    host, port = endpoint["address"].rsplit(":", 1)
    preamble = PREAMBLE.pack(pair.sender.epoch, bytes.fromhex(endpoint["token"]))
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(preamble)
        assert peer.recv(len(ACCEPTED), socket.MSG_WAITALL) == ACCEPTED
        yield peer


def test_bursts_are_small_on_a_slow_link(
    double: GpuDouble, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is granted is sent, also if nobody wants it any more."""
    memory = random_memory(rng, 4 * MIB)
    with pairs(slab_bytes=MIB // 8) as pair:
        channel = pair.channel()
        monkeypatch.setattr(sending, "LONG_SECONDS", 0.0)
        assert_arrives(pair, channel, memory)
        asked = num_said(pair, monkeypatch, FrameKind.ASK)
        assert_arrives(pair, channel, memory)
        assert {frame.nbytes for frame in asked} == {MIB // 8}
        monkeypatch.undo()
        monkeypatch.setattr(sending, "LONG_SECONDS", 60.0)
        monkeypatch.setattr(sending, "SHORT_SECONDS", 60.0)
        assert_arrives(pair, channel, memory)
        asked = num_said(pair, monkeypatch, FrameKind.ASK)
        assert_arrives(pair, channel, memory)
        assert max(frame.nbytes for frame in asked) > MIB // 8
