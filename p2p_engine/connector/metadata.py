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


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start: where this rank's engine listens."""

    location: RankAddress


@dataclass(frozen=True)
class RankReport(KVConnectorWorkerMetadata):
    """Worker to scheduler, after a step that asked for it: the same, of one rank or of several."""

    locations: tuple[RankAddress, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Join the reports of two ranks, as vLLM does for all of an instance."""
        more = other.locations if isinstance(other, RankReport) else ()
        return RankReport(self.locations + more)


@dataclass
class P2pConnectorMetadata(StepOrders, KVConnectorMetadata):
    """One step's orders from the scheduler half to every worker half."""

    asks_location: bool = False
