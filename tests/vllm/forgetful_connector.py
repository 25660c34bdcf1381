"""Our connector with one fault: of a request whose id says so, a part of each layer's state is lost
when it has landed. Tokens that change then show that the model reads that part."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any, cast

from p2p_engine.connector import connector
from p2p_engine.connector.metadata import P2pConnectorMetadata

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import MambaSpec

_LOST = re.compile(r"lost-part-(\d)")


def id_that_loses(part: int, number: int) -> str:
    """Return the id of a request whose states lose this part."""
    return f"lost-part-{part}-{number}"


class ForgetfulConnector(connector.P2pNcclConnector):
    """Strikes each request with such an id, when its KV has landed."""

    _caches: dict[str, torch.Tensor]
    _blocks: dict[str, list[int]]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember where the states lie."""
        self._caches, self._blocks = kv_caches, {}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Remember which request's state lands where, by group."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, P2pConnectorMetadata):
            for load in metadata.loads:
                tables = [load.ranges[group.table].block_ids for group in self._groups]
                self._blocks[load.party.request_id] = [int(table[-1]) for table in tables]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Zero a part of what has just landed."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            blocks = self._blocks.pop(request_id)
            if found := _LOST.search(request_id):
                self._strike(blocks, int(found[1]))
        return results

    def _strike(self, blocks: list[int], part: int) -> None:
        for group, block in zip(self._groups, blocks, strict=True):
            if not group.is_state:
                continue
            spec = cast("MambaSpec", group.spec)
            sizes = [
                math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ]
            ends = [0, *itertools.accumulate(sizes)]
            for name in group.layer_names:
                self._caches[name][block].view(-1)[ends[part] : ends[part + 1]] = 0


P2pNcclConnector = ForgetfulConnector  # the name that `kv_connector_module_path` asks for
