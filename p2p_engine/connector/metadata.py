"""The messages between the two halves of the connector, in classes that vLLM carries."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from p2p_engine.connector.orders import StepOrders
from p2p_engine.peers.directory import RankAddress
from p2p_engine.wire.messages import TransferKey


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start: where this rank's engine listens."""

    location: RankAddress


@dataclass(frozen=True)
class RankReport(KVConnectorWorkerMetadata):
    """Worker to scheduler, after a step: the same if it was asked for, and the keys of stashes that
    have ended; of one rank or of several."""

    locations: tuple[RankAddress, ...] = ()
    ended_stashes: tuple[TransferKey, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Join the reports of two ranks, as vLLM does for all of an instance."""
        if not isinstance(other, RankReport):
            return self
        return RankReport(
            self.locations + other.locations, self.ended_stashes + other.ended_stashes
        )


@dataclass
class P2pConnectorMetadata(StepOrders, KVConnectorMetadata):
    """One step's orders from the scheduler half to every worker half."""

    asks_location: bool = False
