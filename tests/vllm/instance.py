"""One vLLM instance in this process: all of it is real but for the model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.forward_context import set_forward_context
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.doubles.model import BLOCK, ModelDouble

HOST = "127.0.0.1"
TOKENS_PER_STEP = 4 * BLOCK
CONNECTOR = "P2pNcclConnector"


@contextmanager
def distributed_environment(folder: Path) -> Iterator[None]:
    """Make this process the one rank of its tensor-parallel group, as a worker does."""
    load_general_plugins()  # type: ignore[no-untyped-call]
    init_none_hash(sha256)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


class VllmInstance:
    """One instance; step it until what is waited for has happened."""

    def __init__(
        self,
        model: Path,
        kv_role: str,
        kv_port: int,
        *,
        failure_policy: str = "fail",
        num_blocks: int = 64,
        extra_config: Mapping[str, Any] | None = None,
        beside: Sequence[Mapping[str, Any]] = (),
        is_first: bool = True,
    ) -> None:
        """Start the connector of this role; it listens on `kv_port`.

        With others `beside` it, all are children of a MultiConnector; ours `is_first`, or last.
        """
        self.kv_port = kv_port
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.num_computed_tokens: dict[str, int] = {}  # by the model, for each request
        self._requests: dict[str, Request] = {}
        self._model = ModelDouble(num_blocks)
        transfer = {
            "kv_connector": CONNECTOR,
            "kv_role": kv_role,
            "kv_port": kv_port,
            "kv_load_failure_policy": failure_policy,
            "kv_connector_extra_config": {
                "host": HOST, "mem_pool_size_gb": 0.01, **(extra_config or {})
            },
        }  # fmt: skip
        if beside:
            children = [transfer, *beside] if is_first else [*beside, transfer]
            transfer = multi_connector(kv_role, children)
        self._config = _vllm_config(model, transfer)
        self._config.cache_config.num_gpu_blocks = num_blocks
        with set_current_vllm_config(self._config):
            self.worker = self._make_worker()
            self.scheduler = self._make_scheduler()

    def _make_worker(self) -> Any:
        worker = KVConnectorFactory.create_connector(
            self._config, KVConnectorRole.WORKER, self._model.kv_cache_config
        )
        worker.register_kv_caches(self._model.kv_caches)
        return worker

    def _make_scheduler(self) -> Any:
        scheduler: Any = Scheduler(
            vllm_config=self._config,
            kv_cache_config=self._model.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=BLOCK,
            log_stats=True,
        )
        mine = self.worker.get_handshake_metadata()
        handshake = {} if mine is None else {(0, 0): mine}
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshake)
        return scheduler

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        max_tokens: int = 4,
    ) -> Request:
        """Give the scheduler a request."""
        request = _request(request_id, prompt, max_tokens)
        request.kv_transfer_params = dict(params) if params is not None else None
        self._requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule, execute and update once, as vLLM's engine core does."""
        output = self.scheduler.schedule()
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.worker.handle_preemptions(output.kv_connector_metadata)
        if output.total_num_scheduled_tokens:
            result = self._forward(output)
        else:
            result = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
            time.sleep(0.001)  # as vLLM's engine core does when there was nothing to execute
        for batch in self.scheduler.update_from_output(output, result).values():
            for update in batch.outputs:
                self.outputs.setdefault(update.request_id, []).append(update)

    def step_until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Step until the condition holds.

        Raises:
            AssertionError: it did not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "what was waited for has not happened"
            self.step()

    def finish_reason(self, request_id: str) -> FinishReason | None:
        """How a request has ended; None while it has not."""
        updates = self.outputs.get(request_id, [])
        return next((u.finish_reason for u in updates if u.finish_reason is not None), None)

    def finish(self, request_id: str) -> FinishReason:
        """Step until this request has ended, and say how."""
        self.step_until(lambda: self.finish_reason(request_id) is not None)
        return cast("FinishReason", self.finish_reason(request_id))

    def tokens(self, request_id: str) -> list[int]:
        """All tokens that were output for a request."""
        updates = self.outputs.get(request_id, [])
        return list(itertools.chain.from_iterable(update.new_token_ids for update in updates))

    def holds(self, request_id: str, num_tokens: int) -> bool:
        """Whether the blocks of a request hold the KV of its first `num_tokens` tokens."""
        tokens = self._requests[request_id].all_token_ids
        return self._model.holds(self._block_ids(request_id), tokens, range(num_tokens))

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens the prefix cache claims to have."""
        probe = _request("probe", prompt, max_tokens=1)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(probe)[1])

    def wrong_cached_blocks(self) -> list[int]:
        """Return the blocks that the prefix cache offers and that do not hold what it says."""
        return [
            block_id
            for request in self._requests.values()
            for index, block_id in self._cached_blocks(request)
            if not self._model.holds(
                [block_id] * (index + 1),  # only the last one is looked at
                request.all_token_ids,
                range(index * BLOCK, (index + 1) * BLOCK),
            )
        ]

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some request holds."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return sum(block.ref_cnt > 0 for block in blocks if not block.is_null)

    def close(self) -> None:
        """Stop both halves of the connector."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        step = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)
        with set_forward_context(None, self._config), step as connector_output:
            sampled = {
                request_id: self._compute(self._requests[request_id], count)
                for request_id, count in output.num_scheduled_tokens.items()
            }
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
        )

    def _compute(self, request: Request, count: int) -> list[int]:
        """Compute the tokens scheduled for a request; the next one follows from the last."""
        end = request.num_computed_tokens  # the scheduler has advanced it already
        name, block_ids = request.request_id, self._block_ids(request.request_id)
        self._model.write(block_ids, request.all_token_ids, range(end - count, end))
        self.num_computed_tokens[name] = self.num_computed_tokens.get(name, 0) + count
        return [self._model.next_token(block_ids, end)] if end == request.num_tokens else []

    def _block_ids(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def _cached_blocks(self, request: Request) -> Iterator[tuple[int, int]]:
        pool = self.scheduler.kv_cache_manager.block_pool
        for index, block_hash in enumerate(request.block_hashes):
            found = pool.get_cached_block(block_hash, [0])
            if found:
                yield index, found[0].block_id


def _request(request_id: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def multi_connector(kv_role: str, children: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of a MultiConnector with these children, in order of precedence."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"connectors": [dict(child) for child in children]},
    }


def _vllm_config(model: Path, transfer: Mapping[str, Any]) -> VllmConfig:
    caches = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    caches.kv_cache_layout = "LBHNC"  # connectors are made after the layout has been resolved
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=TOKENS_PER_STEP,
            max_model_len=1024,
            is_encoder_decoder=False,
        ),
        cache_config=caches,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
    )
