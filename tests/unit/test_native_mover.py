"""The binding of the mover; its behaviour is tested in tests/c/test_mover.c and test_channel.c."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mempool import Arena, Job, Mover, copy_now, read_word, write_word
from tests.support import SeededRandom

Int64s = npt.NDArray[np.int64]
LONG = 30.0


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(slice_bytes=4096)
    yield mover
    assert mover.close(LONG)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def int64s(*values: int) -> Int64s:
    return np.array(values, dtype=np.int64)


def whole(array: npt.NDArray[np.uint8]) -> tuple[Int64s, Int64s]:
    """Return the array as one region."""
    return int64s(array.ctypes.data), int64s(array.nbytes)


def random_bytes(rng: SeededRandom, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.array(bytearray(rng.randbytes(nbytes)), dtype=np.uint8)


def ended(job: Job) -> Job:
    assert job.wait(LONG)
    assert job.done
    return job


# copies


def test_a_copy_arrives_and_its_word_is_seen_by_a_peer(mover: Mover, rng: SeededRandom) -> None:
    ours = Arena(1 << 20)
    theirs = Arena.attach(ours.fileno(), 1 << 20)
    source = random_bytes(rng, 100_001)
    addresses, lengths = whole(source)
    word = theirs.address + (1 << 19)
    job = mover.copy(
        addresses, int64s(theirs.address), lengths, word_address=word, word_value=2**64 - 1, tag="t"
    )
    assert (ended(job).state, job.error, job.nbytes, job.tag) == ("done", None, 100_001, "t")
    assert read_word(ours.address + (1 << 19)) == 2**64 - 1
    assert bytes(ours.view(0, 100_001)) == source.tobytes()


def test_drain_tells_of_each_job_once(mover: Mover) -> None:
    page = np.zeros(10, dtype=np.uint8)
    addresses, lengths = whole(page)
    assert mover.drain() == []
    assert select.select([mover.fileno()], [], [], 0)[0] == []
    jobs = {mover.copy(addresses, addresses, lengths, tag=i) for i in range(20)}
    seen: list[Job] = []
    while len(seen) < 20:
        assert select.select([mover.fileno()], [], [], LONG)[0]
        seen += mover.drain()
    assert set(seen) == jobs
    assert [job.tag for job in seen] == list(range(20))
    assert mover.drain() == []
    assert mover.stats()["jobs_ended"] == 20


class Watched:
    """Something a weak reference can watch."""


def test_keep_lives_until_the_job_was_drained(mover: Mover) -> None:
    kept = Watched()
    watch = weakref.ref(kept)
    job = mover.copy(int64s(), int64s(), int64s(), keep=kept)
    del kept
    ended(job)
    assert watch() is not None
    mover.drain()
    assert watch() is None


def test_a_job_that_nobody_holds_still_ends_and_is_drained(mover: Mover) -> None:
    mover.copy(int64s(), int64s(), int64s(), tag="forgotten")
    gc.collect()
    assert select.select([mover.fileno()], [], [], LONG)[0]
    assert [job.tag for job in mover.drain()] == ["forgotten"]


def test_a_cycle_through_a_tag_is_collected() -> None:
    mover = Mover()
    kept = Watched()
    watch = weakref.ref(kept)
    tag: list[object] = [kept]
    tag.append(mover.copy(int64s(), int64s(), int64s(), tag=tag))
    mover.close()
    mover.drain()
    del kept, tag
    gc.collect()
    assert watch() is None


def test_a_cancelled_copy_never_writes_its_word() -> None:
    mover = Mover(slice_bytes=4096)
    page = np.zeros(1 << 20, dtype=np.uint8)
    word = np.zeros(1, dtype=np.uint64)
    addresses = np.full(1 << 16, page.ctypes.data, dtype=np.int64)  # 64 GiB in all
    lengths = np.full(1 << 16, page.nbytes, dtype=np.int64)
    job = mover.copy(
        addresses, addresses, lengths, word_address=word.ctypes.data, word_value=1, keep=page
    )
    assert not job.wait(0.0)
    assert (job.done, job.state in ("queued", "running")) == (False, True)
    job.cancel()
    assert (ended(job).state, job.error) == ("cancelled", "cancelled")
    job.cancel()
    assert word[0] == 0
    assert mover.close(LONG)


LISTS = {
    "shorter": (int64s(1, 2), int64s(1, 2), int64s(1)),
    "negative": (int64s(1), int64s(1), int64s(-1)),
    "null": (int64s(0), int64s(1), int64s(1)),
    "overflowing": (int64s(1, 1), int64s(1, 1), int64s(2**62, 1)),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_that_cannot_be_right_are_refused(mover: Mover, name: str) -> None:
    with pytest.raises(ValueError, match="region"):
        mover.copy(*LISTS[name])
    with pytest.raises(ValueError, match="region"):
        copy_now(*LISTS[name])


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float64])
def test_lists_of_another_type_are_refused(mover: Mover, dtype: type[np.generic]) -> None:
    wrong = np.zeros(1, dtype=dtype)
    with pytest.raises(TypeError, match="int64"):
        mover.copy(int64s(1), wrong, int64s(0))
    with pytest.raises(TypeError, match="int64"):
        copy_now(wrong, int64s(1), int64s(0))


def test_lists_must_be_contiguous(mover: Mover) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        mover.copy(int64s(1, 2, 3, 4)[::2], int64s(1, 2), int64s(0, 0))


def test_copy_now_copies_on_this_thread(rng: SeededRandom) -> None:
    source = random_bytes(rng, 5000)
    target = np.zeros_like(source)
    addresses, lengths = whole(source)
    assert copy_now(addresses, int64s(target.ctypes.data), lengths) == 5000
    assert np.array_equal(source, target)


def test_words_round_trip() -> None:
    word = np.zeros(1, dtype=np.uint64)
    write_word(word.ctypes.data, 2**64 - 2)
    assert read_word(word.ctypes.data) == int(word[0]) == 2**64 - 2


@pytest.mark.parametrize("address", [0, 12, -8, 2**64])
def test_words_at_odd_addresses_are_refused(mover: Mover, address: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of 8|not in"):
        read_word(address)
    with pytest.raises(ValueError, match=r"multiple of 8|not in"):
        write_word(address, 1)
    if address != 0:
        with pytest.raises(ValueError, match=r"multiple of 8|not in"):
            mover.copy(int64s(), int64s(), int64s(), word_address=address)


# streams


def test_what_is_sent_is_received(
    mover: Mover, sockets: tuple[socket.socket, socket.socket], rng: SeededRandom
) -> None:
    source = random_bytes(rng, 1_000_003)
    target = np.zeros_like(source)
    mover.attach(sockets[0].fileno(), 1)
    mover.attach(sockets[1].fileno(), 2**64 - 1)
    addresses, lengths = whole(source)
    expected = mover.expect(2**64 - 1, 7, *whole(target), tag="in")
    sent = mover.send(1, 7, addresses, lengths, tag="out")
    assert (ended(sent).state, ended(expected).state) == ("done", "done")
    assert np.array_equal(source, target)
    assert {job.tag for job in mover.drain()} == {"in", "out"}


def test_two_movers_talk_over_tcp(rng: SeededRandom) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    here, there = Mover(), Mover(slice_bytes=10_000)
    with left, right:
        here.attach(left.fileno(), 1)
        there.attach(right.fileno(), 1)
    sources = [random_bytes(rng, rng.randrange(3_000_000)) for _ in range(6)]
    targets = [np.zeros_like(source) for source in sources]
    expected = [there.expect(1, i, *whole(target)) for i, target in enumerate(targets)]
    for i, source in enumerate(sources):
        here.send(1, i, *whole(source))
    assert [ended(job).state for job in expected] == ["done"] * 6
    assert all(map(np.array_equal, sources, targets))
    assert here.close(LONG)
    assert there.close(LONG)


def test_a_lost_peer_fails_what_it_owed(
    mover: Mover, sockets: tuple[socket.socket, socket.socket]
) -> None:
    target = np.zeros(10, dtype=np.uint8)
    mover.attach(sockets[0].fileno(), 1)
    expected = mover.expect(1, 7, *whole(target))
    sockets[1].close()
    assert (ended(expected).state, expected.error) == ("failed", "the peer closed the connection")
    late = mover.send(1, 8, *whole(target))
    assert (ended(late).state, late.error) == ("failed", "the peer closed the connection")
    assert mover.stats()["channels"] == 0


def test_detach_ends_jobs_and_may_be_repeated(
    mover: Mover, sockets: tuple[socket.socket, socket.socket]
) -> None:
    target = np.zeros(10, dtype=np.uint8)
    mover.attach(sockets[0].fileno(), 1)
    sockets[0].close()  # the mover has its own descriptor
    expected = mover.expect(1, 7, *whole(target))
    mover.detach(1)
    mover.detach(1)
    assert (ended(expected).state, expected.error) == ("failed", "the channel was detached")
    assert sockets[1].recv(1) == b""
    with pytest.raises(ValueError, match="channel 1 is not attached"):
        mover.send(1, 7, *whole(target))


def test_what_exists_is_refused(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    target = np.zeros(10, dtype=np.uint8)
    mover.attach(sockets[0].fileno(), 1)
    with pytest.raises(ValueError, match="exists"):
        mover.attach(sockets[1].fileno(), 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        mover.attach(-1, 2)
    mover.expect(1, 7, *whole(target))
    with pytest.raises(ValueError, match="exists"):
        mover.expect(1, 7, *whole(target))


# life


@pytest.mark.usefixtures("no_leaks")
def test_close_leaves_nothing_behind(sockets: tuple[socket.socket, socket.socket]) -> None:
    target = np.zeros(10, dtype=np.uint8)
    mover = Mover()
    mover.attach(sockets[0].fileno(), 1)
    expected = mover.expect(1, 7, *whole(target))
    assert mover.close(LONG) is True
    assert mover.close(0.0) is True
    assert (expected.state, expected.error) == ("cancelled", "the mover was closed")
    assert mover.drain() == [expected]
    for use in (
        mover.fileno,
        lambda: mover.attach(sockets[0].fileno(), 1),
        lambda: mover.copy(int64s(), int64s(), int64s()),
        lambda: mover.send(1, 1, int64s(), int64s()),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()
    expected.cancel()
    assert expected.wait(0.0)


@pytest.mark.usefixtures("no_leaks")
def test_a_forgotten_mover_closes_itself(sockets: tuple[socket.socket, socket.socket]) -> None:
    target = np.zeros(10, dtype=np.uint8)
    mover = Mover()
    mover.attach(sockets[0].fileno(), 1)
    expected = mover.expect(1, 7, *whole(target), keep=target)
    del mover
    assert (expected.state, expected.error) == ("cancelled", "the mover was closed")
    expected.cancel()


@pytest.mark.parametrize("slice_bytes", [0, -1, (1 << 30) + 1])
def test_odd_slices_are_refused(slice_bytes: int) -> None:
    with pytest.raises(ValueError, match="slice_bytes"):
        Mover(slice_bytes=slice_bytes)


def test_jobs_are_made_by_movers_only() -> None:
    with pytest.raises(TypeError):
        Job()


def test_the_interpreter_may_exit_with_everything_open(tmp_path: Path) -> None:
    program = """if True:
        import socket
        import numpy as np
        from mempool import Arena, Mover
        arena, mover, (left, right) = Arena(1 << 36), Mover(), socket.socketpair()
        arena.prefault(1 << 36)
        mover.attach(left.fileno(), 1)
        page = np.array([arena.address]), np.array([1 << 30])
        jobs = [mover.expect(1, 1, *page), mover.send(1, 2, *page)]
    """
    # The build that is tested here, not the one in the working directory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=LONG, env=environment, cwd=tmp_path)
