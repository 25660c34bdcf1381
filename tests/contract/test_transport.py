"""One suite for every transport: what a receiver grants, a sender fills, and nobody else's byte
is touched. The receiving and the sending half run in one process, each with its own mover."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import HEADER_BYTES
from p2p_engine.memory.layout import Regions, one_region
from p2p_engine.transports.base import Arrival, Channel, Endpoint, Order
from p2p_engine.transports.handshake import PREAMBLE
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import Grant
from tests.doubles.gpu import GpuDouble
from tests.hostile.shortage import no_descriptor_left
from tests.rigs.tensors import random_memory
from tests.rigs.transports import MIB, NAMES, TRAILER, TransportPair, write
from tests.support import SeededRandom, eventually

SO_BUF_LOCK, SEND_LOCK, RECEIVE_LOCK = 72, 1, 2  # of Linux; Python has no names for them
GpuDouble()  # before any test looks at the threads that there are
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[TransportPair]:
    made = TransportPair(request.param)
    yield made
    made.close()


def pieces_of(memory: np.ndarray, rng: SeededRandom, count: int) -> tuple[Regions, bytes]:
    """Cut pieces of any size at any place out of memory, in any order."""
    starts = rng.numpy.integers(0, len(memory) - 5000, count)
    lengths = rng.numpy.integers(1, 5000, count)
    regions = Regions(memory.ctypes.data + starts, lengths)
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    return regions, b"".join(memory[start : start + n].tobytes() for start, n in pieces)


def test_any_list_of_regions_arrives_in_order(pair: TransportPair, rng: SeededRandom) -> None:
    memory, channel = random_memory(rng, MIB), pair.channel()
    for count in (1, 2, 63, 64, 65, 400):
        source, expected = pieces_of(memory, rng, count)
        landing = pair.grant(None, len(expected))
        job = write(channel, source, landing, memory)
        assert job.wait(10)
        assert job.state == "done", job.error
        eventually(lambda: pair.has_landed(landing, len(expected)))  # noqa: B023
        assert pair.bytes_of(landing, len(expected)) == expected
        assert job.checksum == google_crc32c.value(expected)
        if landing.job is not None and pair.receiver.device is None:  # else the store has it made
            assert landing.job.checksum == job.checksum


def test_receiver_that_writes_scatters(pair: TransportPair, rng: SeededRandom) -> None:
    """Both sides are lists, cut at other places."""
    if not pair.receiver.transport.scatters:
        pytest.skip("it writes one region")
    memory, channel = random_memory(rng, MIB), pair.channel()
    source, expected = pieces_of(memory, rng, 50)
    cut = rng.randrange(1, len(expected))

    def swapped(address: int) -> Regions:
        first = [address + len(expected) - cut, address]
        return Regions(np.array(first), np.array([cut, len(expected) - cut]))

    landing = pair.grant(swapped, len(expected))
    write(channel, source, landing, memory)
    eventually(lambda: pair.has_landed(landing, len(expected)))
    landed = pair.bytes_of(landing, len(expected))
    assert landed[-cut:] + landed[:-cut] == expected


def test_nothing_is_a_transfer_too(pair: TransportPair) -> None:
    channel = pair.channel()
    empty = Regions(np.zeros(0, np.int64), np.zeros(0, np.int64))
    job = write(channel, empty, pair.grant(None, 0))
    assert job.wait(10)
    assert job.state == "done"
    landing = pair.grant(None, 100)
    memory = np.arange(100, dtype=np.uint8)
    write(channel, one_region(memory.ctypes.data, 100), landing, memory)
    eventually(lambda: pair.has_landed(landing, 100))
    assert pair.bytes_of(landing, 100) == memory.tobytes()


def test_many_at_once_touch_their_own_bytes_only(pair: TransportPair, rng: SeededRandom) -> None:
    memory, channel = random_memory(rng, 2 * MIB), pair.channel()
    bystander = pair.receiver.arena.reserve(4096)
    assert bystander is not None
    view = pair.receiver.arena.arena.view(bystander.offset, 4096)
    view[:] = b"\xa5" * 4096
    running = []
    for _ in range(40):
        start, nbytes = rng.randrange(MIB), rng.randrange(1, 150_000)
        landing = pair.grant(None, nbytes)
        write(channel, one_region(memory.ctypes.data + start, nbytes), landing, memory)
        running.append((landing, memory[start : start + nbytes].tobytes()))
    for landing, expected in running:
        eventually(lambda: pair.has_landed(landing, len(expected)))  # noqa: B023
        assert pair.bytes_of(landing, len(expected)) == expected
    assert bytes(view) == b"\xa5" * 4096
    view.release()


def test_no_byte_after_the_channel_is_closed(pair: TransportPair, rng: SeededRandom) -> None:
    """Closing joins: the region can be another's right away, wherever the write stood."""
    memory = random_memory(rng, 4 * MIB)
    for _ in range(5):
        channel = pair.channel()
        landing = pair.grant(None, len(memory))
        job = write(channel, one_region(memory.ctypes.data, len(memory)), landing, memory)
        eventually(lambda: job.state != "queued")  # noqa: B023
        pair.sender.in_control(channel.close)
        assert job.done
        if landing.job is not None:
            landing.job.cancel()
            assert landing.job.wait(10)
        view = pair.receiver.arena.arena.view(landing.space.offset, landing.space.nbytes)
        view[:] = b"\xa5" * landing.space.nbytes
        pair.sender.in_control(lambda: None)
        assert bytes(view) == b"\xa5" * landing.space.nbytes
        view.release()
        pair.receiver.arena.release(landing.space)


def test_cancelled_write_never_looks_whole(pair: TransportPair, rng: SeededRandom) -> None:
    memory, channel = random_memory(rng, 4 * MIB), pair.channel()
    for _ in range(10):
        landing = pair.grant(None, len(memory))
        job = write(channel, one_region(memory.ctypes.data, len(memory)), landing, memory)
        job.cancel()
        assert job.wait(10)
        if landing.job is not None:
            assert landing.job.wait(10)
        if job.state == "done":
            eventually(lambda: pair.has_landed(landing, len(memory)))  # noqa: B023
        else:
            assert not pair.has_landed(landing, len(memory))
        pair.receiver.arena.release(landing.space)
    landing = pair.grant(None, len(memory))
    write(channel, one_region(memory.ctypes.data, len(memory)), landing, memory)
    eventually(lambda: pair.has_landed(landing, len(memory)))
    assert pair.bytes_of(landing, len(memory)) == memory.tobytes()


def test_sender_is_gone_only_after_its_end(pair: TransportPair) -> None:
    transport, epoch = pair.receiver.transport, pair.sender.epoch
    if transport.receiver_writes:
        pytest.skip("nobody else writes")

    def is_gone() -> bool:  # in the thread that lets it in: it may answer before it has noted it
        return pair.receiver.in_control(lambda: transport.is_gone(epoch))

    channel = pair.channel()
    assert not is_gone()
    pair.receiver.in_control(lambda: transport.forget(epoch, may_write=True))
    assert not is_gone()
    pair.sender.in_control(channel.close)
    pair.sender.close()
    eventually(is_gone)


def test_a_sender_that_is_forgotten_leaves_nothing_and_may_come_again(pair: TransportPair) -> None:
    """Nothing is granted to it, so nothing has to be proven."""
    transport, epoch = pair.receiver.transport, pair.sender.epoch
    for _ in range(2):
        pair.channel()
        before = len(os.listdir("/proc/self/fd"))
        pair.receiver.in_control(lambda: transport.forget(epoch, may_write=False))
        assert pair.receiver.in_control(lambda: transport.is_gone(epoch))
        eventually(lambda: len(os.listdir("/proc/self/fd")) < before)  # noqa: B023


def test_receiver_that_is_gone_is_an_error_or_unseen(
    pair: TransportPair, rng: SeededRandom
) -> None:
    """The sender outlives it, whatever it was writing."""
    memory, channel = random_memory(rng, 4 * MIB), pair.channel()
    landing = pair.grant(None, len(memory))
    job = write(channel, one_region(memory.ctypes.data, len(memory)), landing, memory)
    pair.receiver.close()
    assert job.wait(10)
    try:
        for _ in range(3):
            again = write(channel, one_region(memory.ctypes.data, 4096), landing, memory)
            assert again.wait(10)
    except TransportError:
        pass
    pair.sender.in_control(channel.close)


@pytest.mark.parametrize("closes_first", ["receiver", "sender"])
def test_connection_that_ends_by_itself_is_noticed(pair: TransportPair, closes_first: str) -> None:
    """By a sender that writes nothing, too; but its own close is no news."""
    channel, broken = pair.channel(), []  # type: ignore[var-annotated]
    pair.sender.in_control(lambda: channel.watch(broken.append))
    if closes_first == "sender":
        pair.sender.in_control(channel.close)
    pair.receiver.close()
    expected = closes_first == "receiver"

    eventually(lambda: bool(broken) or not expected)
    pair.sender.in_control(lambda: None)
    assert [type(error) for error in broken] == [TransportError] * expected


def test_write_after_close_is_refused(pair: TransportPair) -> None:
    channel = pair.channel()
    landing = pair.grant(None, 8)
    pair.sender.in_control(channel.close)
    pair.sender.in_control(channel.close)
    memory = np.zeros(8, np.uint8)
    with pytest.raises(TransportError):
        write(channel, one_region(memory.ctypes.data, 8), landing, memory)


def test_grant_outside_the_arena_is_refused(pair: TransportPair) -> None:
    if pair.receiver.transport.receiver_writes:
        pytest.skip("the receiver places the bytes")
    channel, memory = pair.channel(), np.zeros(64, np.uint8)
    size = pair.receiver.arena.arena.nbytes
    for offset in (size, size - 64, size - 71, 1 << 47):
        grant = Grant(1, 2, 1, 0, 0, 1, offset, TRAILER)
        with pytest.raises(TransportError, match="arena"):
            channel.write(Order(one_region(memory.ctypes.data, 64), grant))


def test_grant_in_the_header_of_the_arena_is_refused(pair: TransportPair) -> None:
    """Neither bytes nor a completion word ever lie where the nonce is."""
    if pair.receiver.transport.receiver_writes:
        pytest.skip("the receiver places the bytes")
    channel, memory = pair.channel(), np.zeros(64, np.uint8)
    empty = Regions(np.zeros(0, np.int64), np.zeros(0, np.int64))
    for source in (empty, one_region(memory.ctypes.data, 64)):
        for offset in (0, 8, HEADER_BYTES - 8):
            grant = Grant(1, 2, 1, 0, 0, 1, offset, TRAILER)
            with pytest.raises(TransportError, match="header"):
                channel.write(Order(source, grant))
    pair.receiver.arena.check()


def test_completion_word_at_an_impossible_place_is_refused(pair: TransportPair) -> None:
    if pair.receiver.transport.receiver_writes:
        pytest.skip("it writes none")
    channel, memory = pair.channel(), np.zeros(64, np.uint8)
    size = pair.receiver.arena.arena.nbytes
    for word in (0, HEADER_BYTES - 8, HEADER_BYTES + 4, size - 7, size, 1 << 47):
        grant = Grant(1, 2, 1, 0, 0, 1, HEADER_BYTES, TRAILER, word)
        with pytest.raises(TransportError, match="completion word"):
            channel.write(Order(one_region(memory.ctypes.data, 64), grant))
    pair.receiver.arena.check()


def test_expect_from_a_stranger_is_refused(pair: TransportPair) -> None:
    with pytest.raises(TransportError):
        pair.receiver.transport.expect(Arrival(99, 1, one_region(1, 1)))


@pytest.mark.parametrize("spoil", ["token", "missing", "nonsense", "nobody"])
def test_bad_invitation_is_an_error_not_a_hang(pair: TransportPair, spoil: str) -> None:
    endpoint = pair.invitation()
    if spoil == "missing":
        endpoint = {}
    elif spoil == "nonsense":
        endpoint = dict.fromkeys(endpoint, "\0nonsense")
    elif spoil == "nobody":
        nobody = dict.fromkeys(("address", "proven_address"), "127.0.0.1:1")
        endpoint = {**endpoint, **nobody, "socket": "p2p-nobody", "secret": "x"}
    else:
        endpoint = {**endpoint, "token": "00" * 16, "secret": "00" * 16}
    assert isinstance(pair.connect(endpoint), TransportError)
    pair.channel()


@pytest.mark.parametrize("num_left", range(6))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "nixl"])  # UCX dies of it
def test_without_a_descriptor_a_dial_fails_and_the_next_one_succeeds(
    name: str, num_left: int
) -> None:
    pair = TransportPair(name)
    try:
        outcome: Future[Channel | TransportError] = Future()
        endpoint = pair.invitation()
        with no_descriptor_left(but=num_left):
            pair.sender.in_control(
                lambda: pair.sender.transport.connect(endpoint, outcome.set_result)
            )
            with suppress(TimeoutError):
                outcome.result(0.3)
        found = outcome.result(10)
        if not isinstance(found, TransportError):
            pair.sender.in_control(found.close)
        pair.channel()
        assert (pair.sender.control.errors, pair.receiver.control.errors) == (0, 0)
    finally:
        pair.close()


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("side", ["receiver", "sender"])
@pytest.mark.parametrize("name", ["shm", "tcp", "nixl"])
def test_a_connection_that_cannot_be_watched_ends_and_the_next_one_is_let_in(
    name: str, side: str, nth: int
) -> None:
    """The kernel bounds what may be watched."""
    pair, seen = TransportPair(name), list[int]()
    control = pair.receiver.control if side == "receiver" else pair.sender.control
    honest = control.watch

    def watch(fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        seen.append(fd)
        if len(seen) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(fd, callback, writable=writable)

    try:
        control.watch = watch  # type: ignore[method-assign]
        found = pair.connect()
        control.watch = honest  # type: ignore[method-assign]
        assert isinstance(found, TransportError) == (len(seen) >= nth)
        if not isinstance(found, TransportError):
            pair.sender.in_control(found.close)

        def is_let_in() -> bool:  # when the receiver has heard of the end
            found = pair.connect()
            if not isinstance(found, TransportError):
                pair.sender.in_control(found.close)
            return not isinstance(found, TransportError)

        eventually(is_let_in)
        assert (pair.sender.control.errors, pair.receiver.control.errors) == (0, 0)
    finally:
        pair.close()


def test_invitation_is_good_for_one_connection(pair: TransportPair) -> None:
    endpoint = pair.invitation()
    if "token" not in endpoint:
        pytest.skip("no token")
    first = pair.connect(endpoint)
    assert not isinstance(first, TransportError)
    assert isinstance(pair.connect(endpoint), TransportError)
    assert pair.sender.in_control(first.close)
    pair.channel()


def test_nonce_of_another_memory_is_refused(pair: TransportPair) -> None:
    endpoint = pair.invitation()
    if "nonce" not in endpoint:
        pytest.skip("no memory is mapped")
    for change in ({"nonce": "7"}, {"nonce_offset": "-8"}, {"nonce_offset": str(1 << 40)}):
        assert isinstance(pair.connect({**endpoint, **change}), TransportError)
    larger = {**endpoint, "nbytes": str(1 << 40)}
    assert isinstance(pair.connect(larger), TransportError)


def test_noise_on_the_data_port_lets_nobody_in(pair: TransportPair, rng: SeededRandom) -> None:
    endpoint = pair.invitation()
    if "secret" in endpoint:
        pytest.skip("no socket")
    strangers = [_dial(endpoint) for _ in range(20)]
    try:
        for number, stranger in enumerate(strangers):
            noise = rng.randbytes(rng.choice([0, 1, 23, 24]))
            stranger.sendall(noise or PREAMBLE.pack(pair.sender.epoch, bytes(16)))
            if number % 3 == 0:
                stranger.close()
        pair.channel()
        for stranger in strangers[1::3]:
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            assert _rest(stranger) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_listener_that_never_answers_is_dropped_at_close() -> None:
    """A dial that is under way when the engine ends leaves no descriptor behind."""
    pair, silent = TransportPair("tcp"), socket.create_server(("127.0.0.1", 0))
    outcome: Future[Channel | TransportError] = Future()
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    endpoint = {"address": address, "token": "00" * 16}
    pair.sender.in_control(lambda: pair.sender.transport.connect(endpoint, outcome.set_result))
    accepted, _ = silent.accept()
    accepted.settimeout(10)
    assert len(accepted.recv(PREAMBLE.size, socket.MSG_WAITALL)) == PREAMBLE.size
    pair.close()
    assert _rest(accepted) == b""  # the end of the stream
    accepted.close()
    silent.close()


@pytest.mark.parametrize("name", NAMES)
def test_close_is_idempotent_and_leaves_nothing(name: str) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    pair = TransportPair(name)
    channel = pair.channel()
    pair.sender.in_control(channel.close)
    for _ in range(2):
        pair.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("is_capped", [False, True])
def test_a_buffer_that_the_kernel_would_cut_is_left_to_its_tuning(
    is_capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that is set ends the tuning for good, on what a listener accepts as well."""
    folder = Path("/proc/sys/net/core")
    limits = [int((folder / name).read_text()) for name in ("rmem_max", "wmem_max")]
    size = 2 * max(limits) if is_capped else min(limits)
    monkeypatch.setattr("p2p_engine.memory.host.SOCKET_BUFFER_BYTES", size)
    pair = TransportPair("tcp")
    try:
        pair.channel()
        locks = _locked_buffers(split_address(pair.invitation()["address"])[1])
    finally:
        pair.close()
    expected = {"receives": SEND_LOCK | RECEIVE_LOCK, "sends": SEND_LOCK}
    assert locks == (dict.fromkeys(expected, 0) if is_capped else expected)


def _locked_buffers(port: int) -> dict[str, int]:
    """Which buffers of the two ends of a connection to a port the kernel does not tune."""
    found: dict[str, int] = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.fromfd(int(path.name), socket.AF_INET, socket.SOCK_STREAM) as end:
                ports = end.getpeername()[1], end.getsockname()[1]
                lock = end.getsockopt(socket.SOL_SOCKET, SO_BUF_LOCK)
            if port in ports:
                found["sends" if ports[0] == port else "receives"] = lock
    return found


def _dial(endpoint: Endpoint) -> socket.socket:
    for key in {"address", "proven_address"} & set(endpoint):
        return socket.create_connection(split_address(endpoint[key]), 10)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + endpoint["socket"])
    return connection


def _rest(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(64):
            received += piece
    except ConnectionResetError:
        return received
    return received
