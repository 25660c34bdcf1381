"""The order in which vLLM's model runners call a connector's worker side, read in release 0.32, for
loads between forwards; and what each call asks of our worker half.

V1 is `KVConnectorModelRunnerMixin` and `GPUModelRunner`, V2 `ActiveKVConnector`. LAYERS stands for
`wait_for_layer_load` and `save_kv_layer` of each layer in turn: where the attention of a layer is
run by Python, eagerly or between piecewise graphs. A replayed full graph calls neither.
"""

from __future__ import annotations

FORWARD = "forward"
LAYERS = "layers"
END = (
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
)
_V1 = ("start_load_kv", "wait_for_save", "get_transfer_results", *END, "clear_connector_metadata")
_V1_DRAFT = ("start_load_kv", "get_transfer_results", *END, "wait_for_save",
             "clear_connector_metadata")  # fmt: skip
_BEGIN = ("handle_preemptions", "bind_connector_metadata")

# By runner and by how the model is run.
STEPS: dict[str, tuple[str, ...]] = {
    "V1 piecewise": (*_BEGIN, LAYERS, *_V1),
    "V1 full": (*_BEGIN, FORWARD, *_V1),
    "V1 with a draft model": (*_BEGIN, LAYERS, *_V1_DRAFT),  # which runs before the last two
    "V2 piecewise": (*_BEGIN, LAYERS, "finish_forward", *_V1),
    "V2 full": (*_BEGIN, FORWARD, "finish_forward", *_V1),
}
# A step in which nothing is computed.
EMPTY_STEPS: dict[str, tuple[str, ...]] = {
    "V1": (*_BEGIN, *_V1),
    "V2": (*_BEGIN, "finish_forward", *_V1),
}
# With a draft model, on a stage before the last one: only the report ends a step.
EARLY_STAGE = (*_BEGIN, LAYERS, *_V1_DRAFT[:-2])
# A forward that raises. V1 goes on as ever, while it handles the exception; V2 does no more.
LOST_STEP = (*_BEGIN, FORWARD)
# What our connector makes of a call: a method of WorkerHalf, with the step's orders or without.
HOOKS: dict[str, tuple[str, bool]] = {
    "handle_preemptions": ("withdraw", True),
    "bind_connector_metadata": ("start_step", True),
    "start_load_kv": ("start_loads", True),
    "wait_for_save": ("finish_step", False),
    "get_transfer_results": ("take_results", False),
    "build_connector_worker_meta": ("take_ended_stashes", False),
}
