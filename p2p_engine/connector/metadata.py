"""What the two halves of the connector tell each other, in the classes that vLLM carries."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from p2p_engine.connector.orders import StepOrders
from p2p_engine.directory import RankAddress


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start: where this rank's engine listens."""

    location: RankAddress


@dataclass
class P2pConnectorMetadata(StepOrders, KVConnectorMetadata):
    """One step's orders from the scheduler half to every worker half."""
