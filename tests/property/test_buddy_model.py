"""The allocator against a model: a list of who owns each unit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from mempool import Buddy

UNIT = 64


class BuddyModel(RuleBasedStateMachine):
    """Holds that runs never overlap and that a request fails only when nothing fits."""

    live = Bundle("live")
    freed = Bundle("freed")

    @initialize(num_units=st.integers(1, 200))
    def create(self, num_units: int) -> None:
        self.buddy = Buddy(num_units * UNIT + 1, UNIT)
        self.owners: list[int | None] = [None] * num_units
        self.requested: dict[int, int] = {}
        self.peak_units = 0

    def longest_free_run(self) -> int:
        text = "".join("x" if owner is not None else "." for owner in self.owners)
        return max(len(run) for run in text.split("x"))

    @rule(target=live, nbytes=st.one_of(st.integers(0, 8 * UNIT), st.integers(0, 220 * UNIT)))
    def alloc(self, nbytes: int) -> object:
        num_units = max(1, -(-nbytes // UNIT))
        if num_units > self.longest_free_run():
            with pytest.raises(MemoryError):
                self.buddy.alloc(nbytes)
            return multiple()
        handle = self.buddy.alloc(nbytes)
        assert handle not in self.requested
        first = self.buddy.offset(handle) // UNIT
        run = slice(first, first + num_units)
        assert self.buddy.nbytes(handle) == num_units * UNIT
        assert self.owners[run] == [None] * num_units
        self.owners[run] = [handle] * num_units
        self.requested[handle] = nbytes
        self.peak_units = max(self.peak_units, first + num_units)
        return handle

    @rule(target=freed, handle=consumes(live))
    def free(self, handle: int) -> int:
        self.buddy.free(handle)
        self.owners = [None if owner == handle else owner for owner in self.owners]
        del self.requested[handle]
        return handle

    @rule(handle=freed)
    def use_after_free(self, handle: int) -> None:
        for use in (self.buddy.free, self.buddy.offset, self.buddy.nbytes):
            with pytest.raises(ValueError, match="not a live handle"):
                use(handle)

    @rule(number=st.integers(0, 2**64 - 1))
    def free_any_number(self, number: int) -> None:
        if number not in self.requested:
            with pytest.raises(ValueError, match="not a live handle"):
                self.buddy.free(number)

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "buddy"):
            return
        self.buddy.check()
        stats = self.buddy.stats()
        used = sum(owner is not None for owner in self.owners) * UNIT
        assert stats.pop("largest_free_bytes") <= self.longest_free_run() * UNIT
        assert stats == {
            "capacity_bytes": len(self.owners) * UNIT,
            "free_bytes": len(self.owners) * UNIT - used,
            "used_bytes": used,
            "requested_bytes": sum(self.requested.values()),
            "num_blocks": len(self.requested),
            "high_water_bytes": self.peak_units * UNIT,
        }


BuddyModel.TestCase.settings = settings(deadline=None, stateful_step_count=60)
test_the_allocator_agrees_with_its_model = BuddyModel.TestCase
