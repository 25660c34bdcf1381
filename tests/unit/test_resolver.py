"""Names are resolved beside the loop, each once at a time, and a bad one holds nobody else up."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator

import pytest

from p2p_engine.control import resolver as names
from p2p_engine.control.resolver import (
    FAILURE_SECONDS,
    FRESH_SECONDS,
    MAX_LOOKUPS,
    MAX_NAMES,
    MAX_THREADS,
    SLOW_SECONDS,
    Answer,
    LookupKind,
    Resolver,
    look_up,
)
from p2p_engine.errors import PeerUnreachable
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


class ResolverScene:
    """A loop with names, whose look-ups end when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.told: list[tuple[str, Answer]] = []
        self._may_answer = threading.Condition()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self.names = Resolver(4.5, self._calls.append, lambda: self.now)

    def look_up(self, host: str) -> Answer:
        """What the threads call."""
        with self._may_answer:
            self.asked.append(host)
            self._may_answer.wait_for(lambda: host in self.answers, timeout=30)
            return self.answers.pop(host)

    def ask(self, host: str) -> None:
        self.names.resolve(host, lambda answer: self.told.append((host, answer)))

    def answer(self, host: str, answer: Answer) -> None:
        """Let a look-up end, and the loop hear of it."""
        eventually(lambda: host in self.asked)
        with self._may_answer:
            self.asked.remove(host)
            self.answers[host] = answer
            self._may_answer.notify_all()
        eventually(lambda: self._calls)
        self._calls.popleft()()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.names.tick(self.now)

    def close(self) -> None:
        self.names.close()
        with self._may_answer:
            self.answers |= dict.fromkeys(self.asked, ())
            self._may_answer.notify_all()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[ResolverScene]:
    made = ResolverScene()
    monkeypatch.setattr(names, "look_up", made.look_up)
    yield made
    made.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "p2p-name"])


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0"])
def test_an_address_needs_no_look_up(scene: ResolverScene, host: str) -> None:
    scene.ask(host)
    assert scene.told == [(host, (host,))]


def test_all_who_ask_for_a_name_are_told_by_one_look_up(scene: ResolverScene) -> None:
    for _ in range(3):
        scene.ask("a")
    assert scene.told == []
    scene.answer("a", ("10.0.0.1",))
    assert scene.told == [("a", ("10.0.0.1",))] * 3
    assert scene.asked == []


def test_an_answer_is_good_for_a_short_time(scene: ResolverScene) -> None:
    scene.ask("a")
    scene.answer("a", ("10.0.0.1",))
    scene.ask("a")
    assert len(scene.told) == 2
    scene.pass_time(FRESH_SECONDS)
    scene.ask("a")
    scene.answer("a", ("10.0.0.2",))
    assert scene.told[-1] == ("a", ("10.0.0.2",))


def test_a_failure_is_remembered_and_then_tried_again(scene: ResolverScene) -> None:
    scene.ask("a")
    scene.answer("a", error := PeerUnreachable("no such name"))
    scene.ask("a")
    assert scene.told == [("a", error)] * 2
    scene.pass_time(FAILURE_SECONDS)
    scene.ask("a")
    scene.answer("a", ("10.0.0.1",))
    assert scene.told[-1] == ("a", ("10.0.0.1",))


def test_who_waits_too_long_is_told_so_and_the_thread_goes_on(scene: ResolverScene) -> None:
    scene.ask("a")
    scene.pass_time(4.4)
    assert scene.told == []
    scene.pass_time(0.1)
    ((_, error),) = scene.told
    assert isinstance(error, PeerUnreachable)
    assert str(error) == "name 'a' was not resolved within 4.5 s"
    scene.ask("a")  # answered by the failure that is remembered
    assert len(scene.told) == 2
    scene.answer("a", ("10.0.0.1",))
    assert len(scene.told) == 2
    scene.ask("a")
    assert scene.told[-1] == ("a", ("10.0.0.1",))


def test_bad_names_leave_threads_to_names_that_were_resolved_before(scene: ResolverScene) -> None:
    known = [f"known {number}" for number in range(4)]
    for name in known:
        scene.ask(name)
        scene.answer(name, ("10.0.0.1",))
    scene.pass_time(FRESH_SECONDS)
    strangers = [f"bad {number}" for number in range(MAX_NAMES - len(known))]
    for name in strangers:
        scene.ask(name)
    eventually(lambda: len(scene.asked) == MAX_LOOKUPS[LookupKind.NEW])
    scene.told.clear()
    for name in known:
        scene.ask(name)
    eventually(lambda: len(scene.asked) == MAX_LOOKUPS[LookupKind.NEW] + len(known))
    scene.ask("one too many")
    assert isinstance(scene.told[-1][1], PeerUnreachable)
    for name in known:
        scene.answer(name, ("10.0.0.2",))
        assert scene.told[-1] == (name, ("10.0.0.2",))
    scene.pass_time(4.5)
    assert (
        sum(isinstance(answer, PeerUnreachable) for _, answer in scene.told) == len(strangers) + 1
    )
    assert len(scene.names._lookups) == MAX_LOOKUPS[LookupKind.NEW]  # that hang
    scene.ask("after the flood")
    scene.answer(scene.asked[0], ())
    scene.answer("after the flood", ("10.0.0.3",))
    assert scene.told[-1] == ("after the flood", ("10.0.0.3",))


def resolved(scene: ResolverScene, prefix: str, num: int) -> list[str]:
    """Names that were resolved, and whose answers are not good any more."""
    names = [f"{prefix} {number}" for number in range(num)]
    for name in names:
        scene.ask(name)
        scene.answer(name, ("10.0.0.1",))
    scene.pass_time(FAILURE_SECONDS)
    scene.told.clear()
    return names


def test_a_known_name_that_hangs_is_told_by_its_last_answer(scene: ResolverScene) -> None:
    resolved(scene, "a", 1)
    scene.ask("a 0")
    scene.pass_time(SLOW_SECONDS * 0.9)
    assert scene.told == []
    scene.pass_time(SLOW_SECONDS * 0.1)
    assert scene.told == [("a 0", ("10.0.0.1",))]
    for _ in range(3):
        scene.pass_time(FAILURE_SECONDS)
        scene.ask("a 0")  # it hangs still, and has one thread
    assert scene.told == [("a 0", ("10.0.0.1",))] * 4
    assert scene.asked == ["a 0"]
    scene.answer("a 0", PeerUnreachable("no server"))
    scene.ask("a 0")
    assert scene.told[-1] == ("a 0", ("10.0.0.1",))
    scene.pass_time(FAILURE_SECONDS)
    scene.ask("a 0")
    scene.answer("a 0", PeerUnreachable("there is no such name"))
    assert isinstance(scene.told[-1][1], PeerUnreachable)  # a server has said so


def test_known_names_that_hang_leave_threads_to_all_others(scene: ResolverScene) -> None:
    """More of them than any kind of name has threads."""
    bad = resolved(scene, "bad", 2 * MAX_LOOKUPS[LookupKind.SWIFT])
    (good,) = resolved(scene, "good", 1)
    for name in bad:
        scene.ask(name)
    for _ in range(2):  # each time, those that hang make room
        eventually(lambda: len(scene.asked) % MAX_LOOKUPS[LookupKind.SWIFT] == 0)
        scene.pass_time(SLOW_SECONDS)
    scene.ask(good)
    scene.answer(good, ("10.0.0.2",))
    assert scene.told[-1] == (good, ("10.0.0.2",))
    scene.ask("new")
    scene.answer("new", ("10.0.0.3",))
    assert scene.told[-1] == ("new", ("10.0.0.3",))
    assert {name for name, _ in scene.told[:-2]} == set(bad)
    assert {answer for _, answer in scene.told[:-2]} == {("10.0.0.1",)}


def test_names_that_were_slow_the_last_time_have_few_threads(scene: ResolverScene) -> None:
    slow = resolved(scene, "slow", MAX_LOOKUPS[LookupKind.SWIFT])
    for name in slow:
        scene.ask(name)
    eventually(lambda: len(scene.asked) == len(slow))
    scene.pass_time(SLOW_SECONDS)
    for name in slow:
        scene.answer(name, ("10.0.0.1",))
    scene.pass_time(FAILURE_SECONDS)
    scene.told.clear()
    for name in slow:
        scene.ask(name)
    scene.pass_time(SLOW_SECONDS)
    assert [name for name, _ in scene.told] == slow
    eventually(lambda: len(scene.asked) == MAX_LOOKUPS[LookupKind.SLOW])
    assert len(scene.names._lookups) == MAX_LOOKUPS[LookupKind.SLOW]
    for name in list(scene.asked):
        scene.answer(name, ("10.0.0.1",))
        assert scene.names._known.get(name) is not None


def test_there_are_never_more_threads_than_a_bound(scene: ResolverScene) -> None:
    names = resolved(scene, "bad", 2 * MAX_THREADS)
    for start in range(0, len(names), MAX_LOOKUPS[LookupKind.SWIFT]):
        for name in names[start : start + MAX_LOOKUPS[LookupKind.SWIFT]]:
            scene.ask(name)
        scene.pass_time(SLOW_SECONDS)
    eventually(lambda: len(scene.asked) == MAX_THREADS)
    assert len(scene.names._lookups) == MAX_THREADS
    assert len(scene.told) == len(names)


def test_a_thread_that_cannot_be_had_is_a_failure(
    scene: ResolverScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    scene.ask("a")
    scene._calls.popleft()()
    ((_, error),) = scene.told
    assert "can't start new thread" in str(error)


def test_nobody_is_told_after_the_end(scene: ResolverScene) -> None:
    scene.ask("a")
    eventually(lambda: scene.asked)
    scene.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "p2p-name"])
    assert not scene._calls
    assert scene.told == []


def test_the_resolver_of_the_machine() -> None:
    found = look_up("localhost")
    assert isinstance(found, tuple)
    assert found[0] == "127.0.0.1"
    for host in ("", "a" * 64 + ".example", "\0", "nobody.invalid"):
        answer = look_up(host)
        assert isinstance(answer, PeerUnreachable) or not host
