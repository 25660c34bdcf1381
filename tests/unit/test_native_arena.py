"""Arenas: shared, sealed, prefaulted, and gone when closed."""

from __future__ import annotations

import fcntl
import gc
import os

import pytest

from mempool import Arena
from tests.support import eventually

MIB = 1 << 20


def test_a_peer_maps_the_same_memory() -> None:
    ours = Arena(MIB)
    theirs = Arena.attach(ours.fileno(), MIB)
    assert theirs.address != ours.address
    assert theirs.fileno() == -1  # attach keeps no descriptor
    ours.view(1000, 5)[:] = b"hello"
    assert bytes(theirs.view(1000, 5)) == b"hello"
    ours.close()
    assert bytes(theirs.view(1000, 5)) == b"hello"
    theirs.close()


def test_the_file_is_sealed_and_not_inherited() -> None:
    arena = Arena(MIB)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fileno(), 4096)
    assert fcntl.fcntl(arena.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    arena.close()


def test_attach_refuses_a_file_that_could_shrink(tmp_path: object) -> None:
    with open(f"{tmp_path}/plain", "wb+") as file:
        file.truncate(MIB)
        with pytest.raises(ValueError, match="not sealed"):
            Arena.attach(file.fileno(), MIB)


def test_attach_refuses_a_file_that_is_too_small() -> None:
    arena = Arena(MIB)
    with pytest.raises(ValueError, match="smaller"):
        Arena.attach(arena.fileno(), MIB + 1)
    arena.close()


def test_attach_refuses_what_is_no_file() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Arena.attach(-1, MIB)


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"\[Errno"):
        Arena(1 << 62)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_size_is_no_arena(nbytes: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Arena(nbytes)


def test_close_waits_for_no_view_but_refuses_while_one_lives() -> None:
    arena = Arena(MIB)
    view = arena.view(0, 10)
    with pytest.raises(BufferError, match="1 views"):
        arena.close()
    view[0] = 7  # still mapped
    view.release()
    arena.close()
    arena.close()


def test_a_view_keeps_the_memory_of_a_forgotten_arena() -> None:
    arena = Arena(MIB)
    view = arena.view(100, 4)
    del arena
    gc.collect()
    view[:] = b"kept"
    assert bytes(view) == b"kept"


def test_a_closed_arena_refuses_everything() -> None:
    arena = Arena(MIB)
    arena.close()
    for use in (
        arena.fileno,
        arena.report,
        lambda: arena.view(0, 1),
        lambda: arena.prefault(1),
        lambda: arena.address,
        lambda: arena.nbytes,
        lambda: arena.touched_bytes,
        lambda: arena.refusal,
        lambda: memoryview(arena),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(MIB + 1, 0), (0, MIB + 1), (MIB, 1), (2**63, 2**63)]
)
def test_views_outside_are_refused(offset: int, nbytes: int) -> None:
    arena = Arena(MIB)
    with pytest.raises(ValueError, match="outside"):
        arena.view(offset, nbytes)
    assert len(arena.view(MIB, 0)) == 0


def test_every_step_reports_in_words() -> None:
    arena = Arena(MIB, huge_pages=True, page_lock=True, cuda_register=True)
    report = arena.report()
    assert set(report) == {"memory_file", "huge_pages", "page_lock", "cuda_register", "prefault"}
    assert all(outcome and outcome != "off" for outcome in report.values())
    assert Arena(MIB, huge_pages=False).report()["huge_pages"] == "off"


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.fileno()).st_blocks * 512


@pytest.mark.usefixtures("no_leaks")
def test_prefault_touches_pages_in_the_background() -> None:
    arena = Arena(64 * MIB)
    arena.view(MIB, 4)[:] = b"data"
    arena.prefault(16 * MIB)
    arena.prefault(8 * MIB)
    eventually(lambda: arena.report()["prefault"] == f"{16 * MIB} of {16 * MIB} bytes")
    assert resident_bytes(arena) == arena.touched_bytes == 16 * MIB
    assert not arena.refusal
    arena.prefault(1 << 40)  # no more than there is
    eventually(lambda: resident_bytes(arena) == 64 * MIB)
    assert bytes(arena.view(MIB, 4)) == b"data"
    arena.close()


@pytest.mark.usefixtures("no_leaks")
def test_close_stops_a_prefault_that_would_take_long() -> None:
    arena = Arena(1 << 40)
    arena.prefault(1 << 40)
    arena.close()
