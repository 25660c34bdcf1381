"""Worker half: on one rank, carries out the orders of each step with the engine.

It needs no thread of its own, and nothing here blocks, but PUT and the withdrawal of a preempted
request's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.connector.loads import Loads
from p2p_engine.connector.metadata import P2pConnectorMetadata, RankHandshake
from p2p_engine.connector.sends import Sends
from p2p_engine.directory import RankAddress

if TYPE_CHECKING:
    from p2p_engine.connector.host_buffer import Staging
    from p2p_engine.engine import P2pNcclEngine
    from p2p_engine.paged import PagedCache


@dataclass(frozen=True)
class StepResults:
    """What this rank reports after a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


class WorkerHalf:
    """The engine of one rank and what it does for vLLM; owns the engine."""

    def __init__(
        self,
        engine: P2pNcclEngine,
        cache: PagedCache,
        staging: Staging,
        *,
        block_size: int,
        rank: int,
        can_fail_requests: bool,
    ) -> None:
        self.engine = engine
        self._rank = rank
        self._spec = cache.spec
        self._sends = Sends(engine, cache, block_size, staging)
        self._loads = Loads(engine, cache, staging, can_fail_requests=can_fail_requests)

    @property
    def handshake(self) -> RankHandshake:
        """Where peers find this rank."""
        engine = self.engine
        return RankHandshake(RankAddress(self._rank, engine.zmq_address, engine.epoch, self._spec))

    def withdraw(self, metadata: P2pConnectorMetadata) -> None:
        """Before anything of the step runs: take back the preempted requests' chunks."""
        if metadata.preempted:
            self._sends.withdraw(metadata.preempted)

    def start_step(self, metadata: P2pConnectorMetadata) -> None:
        """Before the forward: offer what it will complete."""
        if metadata.drops_landed:
            self.engine.drop_landed()
        self._sends.start_step(metadata.sends)
        self._sends.end(metadata.ended_sends)

    def start_loads(self, metadata: P2pConnectorMetadata) -> None:
        """After the forward, which may still have zeroed the blocks to be filled."""
        self._loads.start(metadata.loads)
        self._loads.cancel(metadata.cancelled_loads)
        self._loads.discard(metadata.unwanted)

    def finish_step(self) -> None:
        """After the forward: what it computed may leave."""
        self._sends.finish_step()

    def take_results(self) -> StepResults:
        """Report what has ended since the last step."""
        self.engine.poll()
        loads = self._loads.take_results()
        return StepResults(
            self._sends.take_released(), loads.finished, loads.failed, loads.invalid_block_ids
        )

    def close(self) -> None:
        """Close the engine: bounded, idempotent."""
        self.engine.close()
