"""The tools of the tests themselves: a leak check that finds nothing would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.support import SeededRandom, eventually, held_resources


def test_eventually_returns_what_the_condition_gave() -> None:
    values = iter([0, 0, 7])
    assert eventually(lambda: next(values)) == 7


def test_eventually_names_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match="the sky falls"):
        eventually(lambda: False, timeout=0.01, what="the sky falls")


def test_a_seed_repeats_both_random_sources() -> None:
    one, two = SeededRandom(5), SeededRandom(5)
    assert (one.random(), one.numpy.random()) == (two.random(), two.numpy.random())
    assert "P2P_TEST_SEED=5" in repr(one)


def test_leaks_of_each_kind_are_seen() -> None:
    before = held_resources()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="leaked-thread")
    thread.start()
    memory_file = os.memfd_create("leaked-file")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        leaked = " ".join(held_resources() - before)
        for name in ("leaked-thread", "/memfd:leaked-file", f"child {child.pid}"):
            assert name in leaked
    finally:
        stop.set()
        thread.join()
        os.close(memory_file)
        child.communicate()
    eventually(lambda: held_resources() <= before)
