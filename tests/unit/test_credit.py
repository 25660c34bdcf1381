"""Landing memory among senders: one alone has nearly all, nobody starves, nothing is forgotten."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from p2p_engine.memory.arena import SHARE
from p2p_engine.receive.credit import MAX_WAITING, RETRY_AFTER_SECONDS, Claims, Credit
from tests.doubles.world import SETTINGS
from tests.support import SeededRandom

TOTAL = 9_000


class LandingMemory:
    """What a store does with credit, without its bytes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.credit = Credit(SETTINGS, lambda: self.now)
        self.free = TOTAL
        self.live: dict[tuple[int, int], int] = {}
        self.seqs = itertools.count()

    def ask(
        self, epoch: int, nbytes: int, seq: int | None = None, *, is_awaited: bool = False
    ) -> tuple[int, str]:
        """Offer a chunk; returns its number, and why it was denied."""
        name = (epoch, next(self.seqs) if seq is None else seq)
        refusal = self.credit.refusal(name, nbytes, self.free, is_awaited=is_awaited)
        if refusal:
            self.credit.wait(name, nbytes, is_awaited=is_awaited)
        else:
            self.credit.take(name, nbytes)
            self.live[name] = nbytes
            self.free -= nbytes
        return name[1], refusal

    def end(self, name: tuple[int, int]) -> None:
        """A chunk was taken out of landing memory."""
        nbytes = self.live.pop(name)
        self.free += nbytes
        self.credit.give_back(name, nbytes)

    def held(self) -> Counter[int]:
        """Bytes by sender."""
        held: Counter[int] = Counter()
        for (epoch, _), nbytes in self.live.items():
            held[epoch] += nbytes
        return held


@pytest.fixture
def memory() -> LandingMemory:
    return LandingMemory()


def fill(memory: LandingMemory, epoch: int, nbytes: int = 10) -> int:
    """Ask until it is denied; returns how much the sender has then."""
    while not memory.ask(epoch, nbytes)[1]:
        pass
    return memory.held()[epoch]


def test_one_sender_has_nearly_everything(memory: LandingMemory) -> None:
    assert fill(memory, 1) == TOTAL * SHARE // (SHARE + 1)


def test_there_is_always_something_left_for_the_next(memory: LandingMemory) -> None:
    for epoch in range(1, 5):
        assert fill(memory, epoch, 1) > 0


def test_shares_even_out_as_memory_drains(memory: LandingMemory, rng: SeededRandom) -> None:
    fill(memory, 1)
    for _ in range(5_000):
        memory.end(rng.choice(list(memory.live)))
        for epoch in (1, 2, 3):
            memory.ask(epoch, 10)
    shares = memory.held().values()
    assert len(shares) == 3
    assert max(shares) < 1.2 * min(shares)


def test_a_sender_with_nothing_may_have_all_there_is(memory: LandingMemory) -> None:
    assert memory.ask(1, TOTAL)[1] == ""
    assert memory.ask(2, 1)[1] == "buffer and pool are full"


def test_what_frees_goes_to_who_has_less(memory: LandingMemory) -> None:
    fill(memory, 1)
    large = TOTAL // 2
    seq, denied = memory.ask(2, large)
    assert denied
    for name in list(memory.live):
        assert memory.ask(1, 10)[1]
        memory.end(name)
        if memory.free >= large:
            break
    assert memory.ask(2, large, seq)[1] == ""


def test_claim_of_a_sender_that_does_not_come_back_ends(memory: LandingMemory) -> None:
    fill(memory, 1)
    memory.ask(2, TOTAL // 2)
    memory.end(next(iter(memory.live)))
    assert "waiting" in memory.ask(1, 10)[1]
    memory.now += SETTINGS.retry_seconds + 1
    assert memory.ask(1, 10)[1] == ""


def test_claim_of_a_sender_that_is_gone_ends(memory: LandingMemory) -> None:
    fill(memory, 1)
    memory.ask(2, TOTAL // 2)
    memory.end(next(iter(memory.live)))
    memory.credit.forget(2)
    assert memory.ask(1, 10)[1] == ""


def test_one_that_waits_with_many_chunks_asks_at_one_pace(memory: LandingMemory) -> None:
    """Ten thousand chunks that are denied are not half a million messages in a second."""
    pauses = [memory.credit.wait((1, seq), 10) for seq in range(10_000)]
    assert pauses[0] == RETRY_AFTER_SECONDS
    assert pauses[9] == 10 * RETRY_AFTER_SECONDS
    assert pauses[-1] == SETTINGS.retry_seconds
    assert memory.credit._waiting.num_of(1) == MAX_WAITING


def test_a_chunk_is_forgotten_at_its_deadline_though_an_older_one_comes_again(
    memory: LandingMemory,
) -> None:
    for seq in range(MAX_WAITING):
        memory.credit.wait((1, seq), 10)
    for _ in range(4):
        memory.now += SETTINGS.retry_seconds
        assert memory.credit.wait((1, 0), 10) <= SETTINGS.retry_seconds
    assert memory.credit._waiting.num_of(1) == 1
    assert memory.credit.wait((1, MAX_WAITING), 10) == 2 * RETRY_AFTER_SECONDS


def test_one_of_many_that_were_denied_claims_no_longer_than_until_it_should_come_again(
    memory: LandingMemory,
) -> None:
    for seq in range(1_000):
        memory.credit.wait((1, seq), 10, is_awaited=True)
    memory.now += 2 * SETTINGS.retry_seconds
    assert not memory.credit.is_awaited()
    assert memory.ask(2, 10)[1] == ""


def test_a_chunk_that_will_not_come_again_claims_nothing(memory: LandingMemory) -> None:
    fill(memory, 1)
    seq, denied = memory.ask(2, TOTAL, is_awaited=True)
    assert denied
    memory.credit.discard((2, seq))
    memory.end(next(iter(memory.live)))
    assert memory.ask(1, 10)[1] == ""


def test_eight_senders_of_unequal_speed_all_get_their_share(rng: SeededRandom) -> None:
    """Sender n asks n times as often, with chunks of any size; memory empties at random. Nobody is
    served less than a slow sender alone would be, and nobody has much more than the others."""
    memory = LandingMemory()
    waiting: dict[int, dict[int, int]] = {epoch: {} for epoch in range(1, 9)}
    served: Counter[int] = Counter()
    longest_wait: Counter[int] = Counter()
    since: dict[int, int] = {}
    for step in range(40_000):
        memory.now += 0.001
        epoch = rng.choices(range(1, 9), weights=range(1, 9))[0]
        if waiting[epoch] and rng.random() < 0.9:
            seq, nbytes = rng.choice(list(waiting[epoch].items()))
        else:
            seq, nbytes = next(memory.seqs), rng.choice([50, 200, 800])
        _, denied = memory.ask(epoch, nbytes, seq)
        if denied:
            waiting[epoch][seq] = nbytes
            since.setdefault(epoch, step)
        else:
            waiting[epoch].pop(seq, None)
            served[epoch] += nbytes
            longest_wait[epoch] = max(longest_wait[epoch], step - since.pop(epoch, step))
        if memory.live and rng.random() < 0.3:
            memory.end(rng.choice(list(memory.live)))
    assert set(served) == set(range(1, 9))
    assert max(served.values()) < 3 * min(served.values())
    assert max(longest_wait.values()) < 2_000


def test_what_is_awaited_needs_no_share(memory: LandingMemory) -> None:
    fill(memory, 1)
    assert memory.ask(1, 10)[1]
    assert not memory.ask(1, memory.free, is_awaited=True)[1]


def test_nothing_else_is_granted_while_what_is_awaited_was_denied(memory: LandingMemory) -> None:
    fill(memory, 1)
    number, refusal = memory.ask(1, memory.free + 1, is_awaited=True)
    assert refusal
    assert "go first" in memory.ask(2, 10)[1]
    memory.end(next(iter(memory.live)))
    assert not memory.ask(1, memory.free, number, is_awaited=True)[1]
    memory.end((1, number))
    assert not memory.ask(2, 10)[1]


def test_what_is_awaited_and_not_offered_again_is_forgotten(memory: LandingMemory) -> None:
    memory.ask(1, TOTAL + 1, is_awaited=True)
    assert memory.ask(2, 10)[1]
    memory.now += SETTINGS.retry_seconds + 1
    assert not memory.ask(2, 10)[1]
    memory.ask(1, TOTAL + 1, is_awaited=True)
    memory.credit.forget(1)
    assert not memory.ask(2, 10)[1]


def test_among_awaited_ones_a_sender_with_less_goes_first(memory: LandingMemory) -> None:
    for _ in range(8):
        memory.ask(1, 1000, is_awaited=True)
    assert memory.ask(2, memory.free + 1, is_awaited=True)[1]
    assert "hold less" in memory.ask(1, 500, is_awaited=True)[1]


class PlainClaims:
    """What claims.py says of itself, by looking at everything."""

    def __init__(self) -> None:
        self.chunks: dict[int, dict[int, tuple[int, float]]] = {}

    def of_those_below(self, held: Counter[int], limit: int, now: float) -> int:
        """The sum of the oldest chunks of senders that hold less."""
        total = 0
        for epoch, chunks in self.chunks.items():
            for seq in [seq for seq, chunk in chunks.items() if chunk[1] <= now]:
                del chunks[seq]
            if chunks and held[epoch] < limit:
                total += next(iter(chunks.values()))[0]
        return total


def test_claims_are_those_of_a_look_at_everything(rng: SeededRandom) -> None:
    claims, plain, held, now = Claims(), PlainClaims(), Counter[int](), 0.0
    for _ in range(5_000):
        now += rng.random()
        name = (rng.randrange(40), rng.randrange(4))
        step = rng.choice(["put", "put", "discard", "forget", "hold"])
        mine = plain.chunks.setdefault(name[0], {})
        if step == "put":
            nbytes, until = rng.randrange(1, 100), now + rng.uniform(0, 60)
            claims.put(name, nbytes, until, held[name[0]])
            mine[name[1]] = (nbytes, until)
        elif step == "discard":
            claims.discard(name)
            mine.pop(name[1], None)
        elif step == "forget" and rng.random() < 0.1:
            claims.forget(name[0])
            mine.clear()
        else:
            held[name[0]] = rng.randrange(100)
            claims.set_held(name[0], held[name[0]])
        limit = rng.randrange(100)
        claims.forget_old(now)
        assert claims.of_those_below(limit) == plain.of_those_below(held, limit, now)
        assert len(claims) == sum(map(len, plain.chunks.values()))
        assert claims.num_of(name[0]) == len(mine)


def test_many_senders_that_wait_cost_no_more_than_a_few() -> None:
    """Every offer asks what the others claim."""

    def seconds(num_senders: int) -> float:
        memory = LandingMemory()
        fill(memory, 1)
        for epoch in range(2, num_senders + 2):
            for seq in range(4):
                memory.credit.wait((epoch, seq), 10, is_awaited=True)
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            for _ in range(200):
                memory.credit.refusal((1, 0), 10, 500, is_awaited=True)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(4_000) < 8 * seconds(10)
