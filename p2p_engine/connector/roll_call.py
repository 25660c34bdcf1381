"""RollCall: collects the addresses of this instance's ranks if vLLM did not pass them on.

At start, vLLM gives the scheduler half each rank's handshake metadata. MultiConnector, however,
passes on only those of the first child that has any. A worker's report after a step reaches each
child's scheduler half in every release, so the addresses are requested in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from p2p_engine.peers.directory import RankAddress

# An order and its answer are one step, or as many as there are pipeline stages, apart.
MAX_STEPS = 1000


class RollCall:
    """A request for addresses, open until `num_ranks` ranks have answered."""

    def __init__(self, num_ranks: int) -> None:
        """Nothing is asked yet."""
        self._num_ranks = num_ranks
        self._found: dict[int, RankAddress] = {}
        self._num_steps = 0

    @property
    def is_open(self) -> bool:
        """Tell whether a rank has not answered; vLLM must keep stepping until all have."""
        return len(self._found) < self._num_ranks

    @property
    def found(self) -> list[RankAddress]:
        """The ranks that have answered."""
        return list(self._found.values())

    def ask(self) -> bool:
        """Return whether the next step must ask.

        Raises:
            ConfigError: too many steps have asked, and some ranks have not answered.
        """
        self._num_steps += self.is_open
        if self._num_steps > MAX_STEPS:
            raise ConfigError(
                f"only {len(self._found)} of {self._num_ranks} ranks said in {MAX_STEPS} steps "
                "where they listen: build_connector_worker_meta is not forwarded to them"
            )
        return self.is_open

    def hear(self, locations: Iterable[RankAddress]) -> bool:
        """Note answers; return whether these completed the call."""
        was_open = self.is_open
        self._found.update((item.rank, item) for item in locations)
        return was_open and not self.is_open
