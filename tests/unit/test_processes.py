"""A child process: its answers come in order, and whatever ends it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Child, ChildError, together
from tests.support import eventually

WAYS = {"the fork server": None, "a new interpreter": ()}


class Counter:
    """What the children of this file are."""

    def __init__(self, start: int) -> None:
        self._count = 10 // start

    def add(self, number: int) -> int:
        """The sum so far."""
        self._count += number
        return self._count

    def hang(self) -> None:
        """Answer nothing."""
        time.sleep(600)

    def leave(self, status: int) -> None:
        """End without a word."""
        os._exit(status)

    def variable(self, name: str) -> str | None:
        """Of the environment."""
        return os.environ.get(name)

    def close(self) -> None:
        """End badly where the count is odd."""
        if self._count % 2:
            sys.exit("odd")


pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture(params=WAYS)
def child(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Child]:
    with Child(Counter, 5, through=WAYS[request.param]) as made:
        yield made


def test_commands_run_in_order_and_one_that_raises_is_told(child: Child) -> None:
    child.tell("add", 1)
    child.tell("add", "one")
    child.tell("add", 2)
    assert child.answer() == 3
    with pytest.raises(ChildError, match="TypeError: unsupported operand"):
        child.answer()
    assert child.answer() == 5
    assert together([child], "add", [(1,)]) == [6]


def test_a_child_that_ends_by_itself_is_told(child: Child) -> None:
    with pytest.raises(ChildError, match="has ended"):
        child.ask("leave", 3)
    with pytest.raises(ChildError, match="did not end well: 3"):
        child.end()


def test_a_child_closes_its_object_when_it_may(child: Child) -> None:
    child.wait_until_made()
    child.end()
    assert child.has_ended()


def test_an_object_that_does_not_close_well_is_told(child: Child) -> None:
    assert child.ask("add", 1) == 3
    with pytest.raises(ChildError, match="did not end well: 1"):
        child.end()


def test_a_child_that_is_stopped_does_not_answer_and_one_that_is_woken_does(child: Child) -> None:
    child.wait_until_made()
    child.stop()
    child.tell("add", 1)
    assert not child.has_answered()
    with pytest.raises(ChildError, match="does not answer"):
        child.answer(timeout=0.01)
    child.wake()
    assert child.answer() == 3


def test_a_child_is_killed_whatever_it_does(child: Child) -> None:
    child.wait_until_made()
    child.tell("hang")
    assert child.kill() <= time.monotonic()
    assert child.has_ended()
    with pytest.raises(ChildError, match=f"did not end well: -{signal.SIGKILL.value}"):
        child.end()


def test_a_child_that_is_gone_before_we_hear_of_it_is_killed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Child(Counter, 1) as child:
        child.tell("leave", 3)
        eventually(lambda: not Path(f"/proc/{child.pid}").exists())
        monkeypatch.setattr(child, "has_ended", lambda: False)
        child.kill()


def test_an_object_that_cannot_be_made_is_told() -> None:
    with Child(Counter, 0) as child, pytest.raises(ChildError, match="ZeroDivisionError"):
        child.wait_until_made()


def test_a_child_may_have_an_environment_of_its_own() -> None:
    with Child(Counter, 5, environment={**os.environ, "P2P_CHILD": "yes"}) as child:
        assert child.ask("variable", "P2P_CHILD") == "yes"
    assert "P2P_CHILD" not in os.environ
