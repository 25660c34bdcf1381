"""Our connector with one fault: of the first KV that has landed, one byte is changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from p2p_engine.connector import connector
from p2p_engine.connector.metadata import P2pConnectorMetadata

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


HEAD_SIZE = 64  # of the tiny model

logger = logging.getLogger(__name__)


class CorruptingConnector(connector.P2pNcclConnector):
    """Strikes once, when the first KV has landed."""

    _caches: dict[str, torch.Tensor]
    _first_blocks: dict[str, int]
    _has_struck = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember where the bytes lie."""
        self._caches, self._first_blocks = kv_caches, {}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Remember which request's KV lands where."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, P2pConnectorMetadata):
            for load in metadata.loads:
                self._first_blocks[load.party.request_id] = int(load.ranges[0].block_ids[0])
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Change a byte of what has just landed."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            self._strike(self._first_blocks[request_id])
        return results

    def _strike(self, block_id: int) -> None:
        """Blow up one number: in a float32 below 2, the top bit of the exponent is clear."""
        if not self._has_struck:
            self._has_struck = True
            page = next(iter(self._caches.values()))[block_id][0].view(-1)
            values = page[page.numel() // 2 :]  # the keys of a head come first
            index = int((values[:HEAD_SIZE].abs() < 2).nonzero()[0])
            values[index : index + 1].view(torch.uint8)[3] ^= 0x40
            logger.warning("one byte was changed: block=%d value=%d", block_id, index)


P2pNcclConnector = CorruptingConnector  # the name that `kv_connector_module_path` asks for
