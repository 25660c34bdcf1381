"""What the connector reads of vLLM's configuration before there is a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def configs(**changes: Any) -> tuple[Any, Any]:
    """What `check_supported` looks at; a change of the name sets that field."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
        data_parallel_size=1, data_parallel_external_lb=False, data_parallel_hybrid_lb=False,
        data_parallel_index=1, data_parallel_rank_local=0, data_parallel_size_local=1,
        enable_elastic_ep=False, world_size=1, nnodes_within_dp=1, elastic_ep_max_dp_size=1,
        enable_fault_tolerance=False,
    )  # fmt: skip
    model = SimpleNamespace(enable_sleep_mode=False, sleep_mode_backend="cumem")
    outputs = SimpleNamespace(enable_return_routed_experts=False)
    transfer = SimpleNamespace(kv_connector="P2pNcclConnector", engine_id="e", kv_role="kv_both")
    for name, value in changes.items():
        owner = next(item for item in (parallel, model, outputs, transfer) if hasattr(item, name))
        setattr(owner, name, value)
    return SimpleNamespace(
        parallel_config=parallel, model_config=model, aux_output_config=outputs,
        kv_transfer_config=transfer,
    ), transfer  # fmt: skip
