"""P2pNcclConnector: the class that vLLM loads; it forwards each hook to its half."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform

from p2p_engine.config import GIB, SendMode, queue_risk
from p2p_engine.connector import compat
from p2p_engine.connector.cache_spec import read_caches
from p2p_engine.connector.checkpoint import name_of_checkpoint
from p2p_engine.connector.device_room import check_room
from p2p_engine.connector.groups import (
    attention_groups,
    can_name_lost_blocks,
    is_draft_layer,
    layer_groups,
)
from p2p_engine.connector.host_buffer import HostBuffer, is_host_buffer_asked_for
from p2p_engine.connector.identity import covers, identity_of
from p2p_engine.connector.intent import ThisInstance
from p2p_engine.connector.metadata import P2pConnectorMetadata, RankHandshake, RankReport
from p2p_engine.connector.publisher import find_publisher
from p2p_engine.connector.roll_call import RollCall
from p2p_engine.connector.scheduler import SchedulerHalf
from p2p_engine.connector.serving import find_server
from p2p_engine.connector.siblings import check_siblings, has_handshake, siblings
from p2p_engine.connector.stats import P2pConnectorStats, P2pPromMetrics, StatsReporter
from p2p_engine.connector.support import (
    check_stash,
    check_supported,
    directory_port,
    identifies_media,
    name_unread_settings,
    num_local_ranks,
    our_settings,
    read_config,
)
from p2p_engine.connector.weights import Weights, hear_of_weights
from p2p_engine.connector.worker import LINGER_SECONDS, StepResults, WorkerHalf
from p2p_engine.engine import P2pNcclEngine
from p2p_engine.errors import ConfigError
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.wire.addresses import join_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        CopyBlocksOp,
        KVConnectorHandshakeMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class P2pNcclConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV cache, point to point, between the vLLM instances that a proxy pairs."""

    _cache_hit_source = compat.p2p_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Check the configuration; nothing is bound or started yet.

        Raises:
            ConfigError: a setting is wrong, or vLLM is configured in a way we do not support.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        compat.show_logs()
        if not compat.check_version():
            logger.warning("this vLLM is newer than the releases that this was tested with")
        transfer, parallel = our_settings(self._kv_transfer_config), vllm_config.parallel_config
        check_supported(vllm_config)
        self._config = read_config(transfer, num_local_ranks(parallel))
        if self._config.layerwise and (obstacle := compat.obstacle_to_layers(vllm_config)):
            logger.warning("layerwise has no effect with %s", obstacle)
            self._config = dataclasses.replace(self._config, layerwise=False)
        if self._config.stash_seconds:
            groups = layer_groups(kv_cache_config)
            check_stash(vllm_config, any(group.window or group.is_state for group in groups))
        self._role_name: str = transfer.kv_role or "kv_both"
        self._port = directory_port(transfer, parallel)
        self._scheduler: SchedulerHalf | None = None
        self._numbers = itertools.count(1)  # of steps
        self._worker: WorkerHalf | None = None
        self._host_buffers: list[HostBuffer] = []
        self._directory: Directory | None = None
        self._roll_call: RollCall | None = None
        others = siblings(transfer)
        check_siblings(others)
        self._yields_handshake = any(map(has_handshake, others.values()))
        self._reporter: StatsReporter | None = None
        self._invalid_block_ids: set[int] = set()
        self._handled: BaseException | None = None  # where the step began
        if role is KVConnectorRole.SCHEDULER:  # made after the workers, which have checked it
            name_unread_settings(self._kv_transfer_config)
            self._groups = layer_groups(kv_cache_config)
            self._scheduler = self._make_scheduler_half()
        else:
            self._groups = attention_groups(kv_cache_config, partial(is_draft_layer, vllm_config))

    def _make_scheduler_half(self) -> SchedulerHalf:
        config, vllm_config = self._config, self._vllm_config
        instance = ThisInstance(
            self._role_name,
            join_address(config.host, self._port),
            config.send_type,
            compat.has_random_request_ids(),
            is_registered=bool(config.proxy_ip),
        )
        return SchedulerHalf(
            instance,
            self._weights_of(vllm_config),
            self._groups,
            vllm_config.parallel_config.tensor_parallel_size,
            pp_size=vllm_config.parallel_config.pipeline_parallel_size,
            num_lookahead_tokens=compat.num_lookahead_tokens(vllm_config),
            num_speculative_tokens=compat.num_speculative_tokens(vllm_config),
            num_watermark_blocks=int(
                compat.watermark(vllm_config) * self._kv_cache_config.num_blocks
            ),
            stash_seconds=config.stash_seconds,
            has_host_buffer=is_host_buffer_asked_for(vllm_config)
            and current_platform.device_type != "cpu",
            identifies_media=identifies_media(vllm_config),
        )

    def _weights_of(self, vllm_config: VllmConfig) -> Weights:
        config = self._config
        hear_of_weights()
        is_any = covers(config.accept_differences, "weights")
        checkpoint = "accepted" if is_any else name_of_checkpoint(vllm_config)
        logger.info("weights: %s", checkpoint)
        return Weights(checkpoint, reset_keeps_weights=config.reset_keeps_weights)

    # Of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout with heads before tokens: a head's bytes are contiguous. MLA has no
        heads."""
        return None if vllm_config.model_config.use_mla else "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: nothing depends on work between layers, so whole graphs may be replayed.

        Bytes leave behind an event of the forward's stream: after a layer whose hook is called,
        else after the forward. They are loaded between forwards.
        """
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Rebuild statistics that have crossed a process boundary."""
        return P2pConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Make the Prometheus metrics."""
        return P2pPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # In the scheduler's process

    @property
    def _planner(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("a hook of the scheduler's was called in a worker")
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """Decide the request's part in a transfer."""
        self._planner.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens that come from the other instance, None while that is not
        known; they are always loaded between steps."""
        num_tokens = self._planner.num_loadable_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups that are transferred."""
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order a load into these blocks."""
        self._planner.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Order one step."""
        metadata = self._planner.build_metadata(scheduler_output)
        metadata.number = next(self._numbers)
        metadata.asks_location = self._roll_call is not None and self._roll_call.ask()
        return metadata

    def has_pending_push_work(self) -> bool:
        """Tell whether vLLM must step although nothing runs.

        It must if a rank has not reported its address, or if the workers need new orders.
        """
        is_searching = self._roll_call is not None and self._roll_call.is_open
        return is_searching or self._planner.has_orders_for_idle_workers()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        self._planner.workers_reported(connector_output)
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, RankReport):
            return
        self._planner.stashes_ended(report.ended_stashes)
        call = self._roll_call
        if call is not None and call.hear(report.locations):
            self._publish(call.found)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must outlive the request."""
        return self._planner.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must outlive the request."""
        return self._planner.request_finished(request, block_ids)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Use this pool to count free blocks and to hold blocks."""
        self._planner.bind_pool(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Tell whether to wait for spills in progress instead of preempting (since 0.30)."""
        return self._planner.can_wait_for_blocks()

    def weights_labelled(self, label: str) -> None:
        """Call the weights by this name, which vLLM's engine core was given (weights.py)."""
        self._planner.weights_labelled(label)

    def weights_changed(self, reset_encoder_cache: Callable[[], object] | None = None) -> None:
        """Forget the weights' name: vLLM's workers may have others (weights.py)."""
        self._planner.weights_changed(reset_encoder_cache)

    def weights_discarded(self) -> None:
        """Forget the weights' name at the next reset: vLLM throws them away then (weights.py)."""
        self._planner.weights_discarded()

    def adapter_loaded(self, adapter: LoRARequest) -> None:
        """Name an adapter, which vLLM's engine core has just loaded (weights.py)."""
        self._planner.adapter_loaded(adapter)

    def adapter_failed(self, adapter: LoRARequest) -> None:
        """Forget an adapter, which vLLM's engine core has failed to load (weights.py)."""
        self._planner.adapter_failed(adapter)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the instance's directory, and let peers find the ranks of all stages. A wake-up from
        sleep calls this again, and changes nothing: address and memory are what they were.

        Raises:
            ConfigError: the port is taken.
        """
        if self._directory is not None:
            return
        self._directory = self._open_directory()
        ranks = [item.location for item in metadata.values() if isinstance(item, RankHandshake)]
        if ranks:
            self._publish(ranks)
        else:
            self._roll_call = RollCall(self._vllm_config.parallel_config.world_size)

    def _open_directory(self) -> Directory:
        parallel = self._vllm_config.parallel_config
        directory = Directory(
            self._config,
            [],
            kv_port=self._port,
            role={"kv_producer": "P", "kv_consumer": "D"}.get(self._role_name, "PD"),
            model=str(self._vllm_config.model_config.served_model_name),
            tp_size=parallel.tensor_parallel_size,
            server=find_server(parallel, self._kv_transfer_config, self._config),
            events=find_publisher(self._vllm_config),
            has_prefix_cache=bool(self._vllm_config.cache_config.enable_prefix_caching),
        )
        self._planner.use_directory(directory)
        return directory

    def _publish(self, ranks: Sequence[RankAddress]) -> None:
        if self._directory is None:
            raise RuntimeError("ranks were found before there was a directory")
        self._directory.publish(ranks)
        logger.info(
            "instance ready: address=%s ranks=%s send_type=%s accept_differences=%s",
            self._directory.address, len(ranks), self._config.send_type.value,
            ",".join(self._config.accept_differences) or "none",
        )  # fmt: skip

    # In a worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the engine on these caches.

        Raises:
            ConfigError: they cannot be transferred, or no port is free.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        rank = get_pp_group().rank_in_group * tp_size + get_tensor_model_parallel_rank()
        groups, num_blocks, config = self._groups, self._kv_cache_config.num_blocks, self._config
        spec, caches = read_caches(
            self._vllm_config, groups, kv_caches, num_blocks, rank, config.pool_bytes,
            config.accept_differences,
        )  # fmt: skip
        model = self._vllm_config.model_config
        identity = identity_of(self._vllm_config, model, config.accept_differences)
        staging = [item.staging for item in caches]
        self._host_buffers = [buffer for buffer in staging if isinstance(buffer, HostBuffer)]
        if self._host_buffers and config.stash_seconds:
            raise ConfigError("stash_seconds does not go with kv_buffer_device cpu")
        pool_bytes = config.pool_bytes - sum(buffer.nbytes for buffer in self._host_buffers)
        if self._host_buffers:
            config = dataclasses.replace(config, mem_pool_size_gb=pool_bytes / GIB)
        devices = {tensor.device for tensor in kv_caches.values() if tensor.is_cuda}
        if devices and not self._host_buffers:
            config = config.on_device(f"cuda:{devices.pop().index}")
        receives = self._kv_transfer_config.is_kv_consumer
        spills = config.send_type is SendMode.GET
        if config.device != "cpu":
            cache_config, lands = self._vllm_config.cache_config, receives or spills
            check_room(config, cache_config, kv_caches, receives=lands)
            if risk := queue_risk(config, self._role_name, os.environ):
                logger.warning("%s", risk)
        engine = P2pNcclEngine(
            config, spec=spec, identity=identity, receives=receives, spills=spills
        )
        parallel = self._vllm_config.parallel_config
        # Data-parallel ranks step together; with pipeline parallelism, another batch may compute.
        is_alone = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        self._worker = WorkerHalf(
            engine,
            spec,
            caches,
            can_fail_requests=compat.HAS_FAILED_REQUESTS,
            names_lost_blocks=can_name_lost_blocks(self._kv_cache_config, groups),
            linger_seconds=LINGER_SECONDS if is_alone else 0.0,
        )
        self._reporter = StatsReporter(rank)

    def unregister_kv_caches(self) -> None:
        """End all transfers: the caches are about to lose their memory (since 0.33). Blocks, for
        some seconds at most.

        Raises:
            TransferTimeout: a copy does not stop; vLLM leaves the memory, then.
        """
        if self._worker is not None:
            self._worker.fall_asleep()

    def restore_kv_caches(self) -> None:
        """Take part again: the caches have their memory back, where it was (since 0.33)."""
        if self._worker is not None:
            self._worker.wake_up()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Use this operation to copy device blocks to and from host buffers."""
        for buffer in self._host_buffers:
            buffer.set_copy(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's address; None if it would replace a sibling connector's metadata."""
        if self._worker is None or self._yields_handshake:
            return None
        return RankHandshake(self._worker.location)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the stashes that have ended, and this rank's address if the scheduler half asked
        for it in this step; None if there is nothing to say."""
        metadata = self._connector_metadata
        if self._worker is None or not isinstance(metadata, P2pConnectorMetadata):
            return None
        locations = (self._worker.location,) if metadata.asks_location else ()
        ended = self._worker.take_ended_stashes()
        return RankReport(locations, ended) if locations or ended else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Withdraw the preempted requests' blocks, which are about to be overwritten."""
        if self._worker is not None and isinstance(kv_connector_metadata, P2pConnectorMetadata):
            self._worker.withdraw(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        if self._worker is not None and isinstance(connector_metadata, P2pConnectorMetadata):
            self._worker.start_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's loads; none of them is for this step's forward."""
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, P2pConnectorMetadata):
            self._worker.start_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads finish before the forward that needs them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let this layer leave, if what the step sends does so by layer."""
        if self._worker is not None and self._worker.layers.is_open:
            self._worker.layers.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """Release the blocks that the forward computed to their transfers; PUT waits for them."""
        self._look_for_failure()
        if self._worker is not None:
            self._worker.finish_step()

    def _look_for_failure(self) -> None:
        """Give the step's blocks up if its forward has raised: vLLM finishes the step all the same,
        while it handles the exception."""
        if self._worker is not None and sys.exc_info()[1] is not self._handled:
            self._worker.lose_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the transfers that ended (0.29; later releases call `get_transfer_results`)."""
        results = self._take_results()
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the transfers that ended."""
        results = self._take_results()
        return compat.TransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )

    def _take_results(self) -> StepResults:
        self._look_for_failure()
        metadata, results = self._connector_metadata, StepResults()
        if self._worker is not None:
            is_empty = isinstance(metadata, P2pConnectorMetadata) and not metadata.computes
            results = self._worker.take_results(is_empty=is_empty)
        self._invalid_block_ids |= results.invalid_block_ids
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not arrive, of the requests just reported."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes of the engine's statistics since the last step; in the scheduler's
        process, of those of requests."""
        if self._scheduler is not None:
            return P2pConnectorStats.of_untransferred(self._scheduler.untransferred.take_counts())
        if self._worker is None or self._reporter is None:
            return None
        engine = self._worker.engine
        return self._reporter.report(engine.stats(), engine.take_observed())

    # In both

    def shutdown(self) -> None:
        """Close what this process owns: bounded, idempotent."""
        if self._directory is not None:
            self._directory.close()
        if self._worker is not None:
            self._worker.close()
