"""A vLLM instance without a model: the real scheduler, our real connector, a made-up forward.

The forward writes into each token's slot a number that depends on all tokens up to it, and before
it samples it reads back every slot of the context. A token decoded from KV that is missing, stale
or somebody else's is therefore found at once.

The worker knows what the scheduler's outputs tell it and what it has sampled itself, no more: what
it feeds, samples and throws away follows vLLM's model runner (`WorkerRequest`).
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.utils import get_pp_indices
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from p2p_engine.connector import compat
from p2p_engine.connector.connector import P2pNcclConnector
from p2p_engine.transfer_config import CONNECTOR
from tests.doubles import vllm_config
from tests.doubles.device import DeviceDouble

try:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
except ImportError:  # since 0.33
    from vllm.v1.core.kv_cache_planning import (  # type: ignore[no-redef]
        get_kv_cache_groups,
    )

BLOCK_SIZE = vllm_config.BLOCK_SIZE
NUM_LAYERS = vllm_config.NUM_LAYERS
NUM_HEADS = vllm_config.NUM_HEADS
SLOT_WIDTH = 16  # numbers in the slot of a head's token, all the same
EOS_TOKEN_ID = 1
UNKNOWN = -1  # what vLLM's model runner writes for a token that it samples while it runs ahead
LAYER_NAMES = [f"layers.{index}" for index in range(NUM_LAYERS + 1)]
DRAFT = NUM_LAYERS  # the number of a draft's one layer: vLLM goes on counting
INDEXERS = range(DRAFT + 1, DRAFT + 1 + NUM_LAYERS)  # what chooses the tokens that a layer looks at
LAYER_NAMES += [f"layers.{index}.indexer.k_cache" for index in range(NUM_LAYERS)]
KEY_WIDTH = 4  # numbers in the slot of an indexer's token
WINDOW = 40
STATE = -1  # the layer keeps no slot for each token, but one number that follows from all of them
STATE_NUMBERS = 4
# What the layers look back at: vLLM makes a group of each of the three, or one.
MODELS = {
    "full": (0, 0, 0),
    "latent": (0, 0, 0),
    "sparse": (0, 0, 0),  # latents and indexers, for which vLLM has one table
    "mixed": (WINDOW, 0, WINDOW),
    "windows": (WINDOW, WINDOW, WINDOW),
    "states": (STATE, 0, STATE),
    "states and windows": (STATE, 0, WINDOW),
    "states only": (STATE, STATE, STATE),
    "states of Mamba1": (STATE, 0, STATE),
    "states of delta nets": (STATE, 0, STATE),
    "states of short convolutions": (STATE, 0, STATE),
    "states of delta nets and latents": (STATE, 0, STATE),
}
# vLLM's name for what makes a state, and the number of its parts; all others are Mamba2's.
KINDS_OF_STATE = {
    "states of Mamba1": ("MAMBA1", 2),
    "states of delta nets": ("GDN_ATTN", 2),
    "states of short convolutions": ("SHORT_CONV", 1),
    "states of delta nets and latents": ("GDN_ATTN", 2),
}
LATENTS = ("latent", "sparse", "states of delta nets and latents")

Tables = list[list[int]]  # a request's blocks, by group

init_none_hash(sha256)


def expected_values(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The value of each position: a running digest of all tokens up to it."""
    values, running = np.empty(len(tokens), np.int64), 0
    for position, token in enumerate(tokens):
        running = zlib.crc32(token.to_bytes(4, "little"), running)
        values[position] = running
    return values


def _token_after(value: int) -> int:
    """What the made-up model says after a position of this value."""
    return 2 + value % 990


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any instance must answer."""
    tokens, value = [], int(expected_values(prompt)[-1])
    for _ in range(num_tokens):
        tokens.append(_token_after(value))
        value = zlib.crc32(tokens[-1].to_bytes(4, "little"), value)
    return tokens


class WrongKV(AssertionError):
    """A token was decoded from KV that is not its context's."""


class RankDouble:
    """One worker: its part of the cache and its half of the connector."""

    def __init__(
        self,
        config: VllmConfig,
        attention: str,
        num_blocks: int,
        rank: int,
        *,
        is_on_device: bool,
        draft: str = "",
    ) -> None:
        parallel = config.parallel_config
        stage, tp_rank = divmod(rank, parallel.tensor_parallel_size)
        self.rank, self.windows = rank, (*MODELS[attention], 0)
        self.block_size = config.cache_config.block_size
        stages = parallel.pipeline_parallel_size
        self.layers = _layers_of_stage(attention, *get_pp_indices(NUM_LAYERS, stage, stages))
        num_heads = max(1, NUM_HEADS // parallel.tensor_parallel_size)
        first_head = tp_rank * NUM_HEADS // parallel.tensor_parallel_size
        self.heads = np.arange(first_head, first_head + num_heads)
        if attention in LATENTS:
            self.heads = np.arange(1)
        own = [*self.layers, *([DRAFT] if draft else [])]
        cache_config = make_cache_config(config, attention, num_blocks, own)
        groups = [group.layer_names for group in cache_config.kv_cache_groups]
        self.group_of = [
            next((number for number, names in enumerate(groups) if name in names), -1)
            for name in LAYER_NAMES
        ]
        # A block belongs to one group at a time, so that groups lie in the same memory.
        layout = config.cache_config.kv_cache_layout or "LBHNC"
        kept = [[name for name in names if not _is_indexer(name)] for names in groups]
        sizes = {"L": max(map(len, kept)), "B": num_blocks, "H": len(self.heads),
                 "N": self.block_size, "C": SLOT_WIDTH}  # fmt: skip
        self.cache = _allocate(layout, sizes)
        caches = {
            name: self._view(name, self.cache[place])
            for names in kept
            for place, name in enumerate(names)
        }
        keys = [name for names in groups for name in names if _is_indexer(name)]
        caches |= zip(
            keys, _allocate(layout, {**sizes, "L": len(keys), "C": KEY_WIDTH}), strict=True
        )
        self.pages = {LAYER_NAMES.index(name): cache.numpy() for name, cache in caches.items()}
        self._state_size = state_block_size(config)
        self.device = DeviceDouble(caches) if is_on_device else None
        told = _with_draft(config, draft)
        self.connector = P2pNcclConnector(told, KVConnectorRole.WORKER, cache_config)
        with parallel_rank(tp_rank, stage):
            self.connector.register_kv_caches(self.device.handles if self.device else caches)
        if self.device is not None:
            self.connector.set_host_xfer_buffer_ops(self.device.copy_blocks)

    def _view(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        """A layer's view, as vLLM gives it to a connector: of a state, bytes at a page's start."""
        if self.windows[LAYER_NAMES.index(name)] != STATE:
            return cache
        pages = cache.reshape(len(cache), -1)
        assert pages.data_ptr() == cache.data_ptr(), "not a view: choose another layout"
        return pages[:, None, None, :STATE_NUMBERS].view(torch.int8)

    def advance(self, tables: Tables, layer: int, values: np.ndarray[Any, Any], first: int) -> None:
        """Read the state before the position `first`, and leave the one behind the last position.

        Raises:
            WrongKV: it is not what the tokens before demand.
        """
        table, marks = tables[self.group_of[layer]], self.mark(values, layer)[:, :1]
        states = self.pages[layer].view(np.int64)[:, 0, 0]
        before = states[table[(first - 1) // self._state_size]]
        if first and (before != marks[first - 1]).any():
            raise WrongKV(f"rank {self.rank} layer {layer}: not the state of {first} tokens")
        states[table[(len(values) - 1) // self._state_size]] = marks[-1]

    def write(
        self,
        tables: Tables,
        first: int,
        values: np.ndarray[Any, Any],
        layers: Sequence[int] | None = None,
    ) -> None:
        """Compute the KV of positions from `first` on, in the model's layers or in these."""
        positions = np.arange(first, first + len(values))
        for layer in self.layers if layers is None else layers:
            blocks = np.asarray(tables[self.group_of[layer]])[positions // self.block_size]
            self.pages[layer][blocks, :, positions % self.block_size] = (
                self.mark(values, layer)[..., None]
            )  # fmt: skip

    def compute(self, tables: Tables, layer: int, values: np.ndarray[Any, Any], first: int) -> None:
        """Compute the positions from `first` on in one layer."""
        if layer not in INDEXERS and self.windows[layer] == STATE:
            self.advance(tables, layer, values, first)
        else:
            self.write(tables, first, values[first:], [layer])

    def mark(self, values: np.ndarray[Any, Any], layer: int) -> np.ndarray[Any, Any]:
        """Make the values of each head and layer differ: [tokens, heads]."""
        marks: np.ndarray[Any, Any] = values[:, None] * 100 + self.heads * 10 + layer
        return marks

    def check(self, tables: Tables, values: np.ndarray[Any, Any], first: int, what: str) -> None:
        """Read back all that the positions from `first` on look at.

        Raises:
            WrongKV: a slot does not hold what its tokens demand.
        """
        for layer in self.layers:
            window = 0 if layer in INDEXERS else self.windows[layer]
            if window == STATE:
                continue  # read when it advanced
            start = max(0, first + 1 - window) if window else 0
            wrong = self.wrong_positions(tables, values, layer, start, len(values))
            if wrong:
                raise WrongKV(f"{what}: rank {self.rank} layer {layer} positions {wrong}")

    def wrong_positions(
        self, tables: Tables, values: np.ndarray[Any, Any], layer: int, start: int, end: int
    ) -> list[int]:
        """The positions of a layer that do not hold what their tokens demand."""
        positions = np.arange(start, end)
        blocks = np.asarray(tables[self.group_of[layer]])[positions // self.block_size]
        slots = self.pages[layer][blocks, :, positions % self.block_size]
        right = slots == self.mark(values[start:end], layer)[..., None]
        wrong: list[int] = (start + np.flatnonzero(~right.all(axis=(1, 2)))).tolist()
        return wrong


def _layers_of_stage(attention: str, first: int, end: int) -> list[int]:
    indexers = INDEXERS[first:end] if attention == "sparse" else ()
    return [*range(first, end), *indexers]


def _is_indexer(name: str) -> bool:
    return LAYER_NAMES.index(name) in INDEXERS


def _with_draft(config: VllmConfig, draft: str) -> VllmConfig:
    """The same with what our connector reads of speculation; "": there is none."""
    if not draft:
        return config
    model = copy.copy(config.model_config)
    model.hf_overrides = {"draft": draft}  # another draft is another model
    model.get_total_num_kv_heads = lambda: NUM_HEADS  # type: ignore[method-assign]
    config = copy.copy(config)
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=model)  # type: ignore[assignment]
    return config


def _allocate(layout: str, sizes: dict[str, int]) -> torch.Tensor:
    """Memory in the order of a layout, seen as [layers, blocks, heads, tokens, width]."""
    memory = torch.full([sizes[axis] for axis in layout], -1, dtype=torch.int64)
    return memory.permute([layout.index(axis) for axis in "LBHNC"])


@dataclass
class WorkerRequest:
    """What the worker knows of a request, as vLLM's CachedRequestState."""

    prompt: list[int]
    tables: Tables
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


class InstanceDouble:
    """One instance: call `step` until its requests are finished; a context manager."""

    def __init__(
        self,
        model: Path,
        role: str,
        kv_port: int,
        *,
        num_blocks: int = 100,
        max_tokens_per_step: int = 64,
        tp_size: int = 1,
        pp_size: int = 1,
        policy: str = "fail",
        is_async: bool = False,
        has_prefix_cache: bool = True,
        block_size: int = BLOCK_SIZE,
        layout: str = "LBHNC",
        is_on_device: bool = False,
        max_model_len: int = 2048,
        attention: str = "full",
        dp_rank: int = 0,
        draft: str = "",
        num_speculative_tokens: int = 0,
        num_modules: int = 1,
        max_num_seqs: int = 32,
        connector: str = CONNECTOR,
        **extra: Any,
    ) -> None:
        """`kv_port` is its directory's; a data-parallel rank was configured with a lower one.

        With a `draft`, it computes that one's layer, too, after the connector's report, as vLLM. It
        proposes nothing: of speculation there are only the placeholders of vLLM's scheduler. With
        several modules, what it keeps of a position depends on as many tokens behind it, which are
        guesses behind the prompt.
        """
        settings = {
            "host": "127.0.0.1", "mem_pool_size_gb": 0.01, "kv_buffer_size": 1 << 24, **extra,
        }  # fmt: skip
        self.config = vllm_config.make_config(
            model,
            role,
            kv_port - dp_rank,
            max_tokens_per_step=max_tokens_per_step,
            tp_size=tp_size,
            policy=policy,
            is_async=is_async,
            has_prefix_cache=has_prefix_cache,
            settings=settings,
            block_size=block_size,
            layout=layout,
            max_model_len=max_model_len,
            pp_size=pp_size,
            dp_rank=dp_rank,
            max_num_seqs=max_num_seqs,
            connector=connector,
        )
        self.block_size = block_size
        self.num_modules = num_modules
        ahead = {"num_speculative_tokens": num_speculative_tokens}
        if num_modules > 1:
            ahead["num_prefill_lookahead_tokens"] = num_modules
        self.config.__class__ = type("LookingAhead", (VllmConfig,), ahead)
        self.config.cache_config.num_gpu_blocks = num_blocks
        if STATE in MODELS[attention]:
            self.config.cache_config.mamba_cache_mode = _state_mode(self.config)  # type: ignore[assignment]
            self.config.cache_config.mamba_block_size = state_block_size(self.config)
        self.ranks = [
            RankDouble(
                self.config, attention, num_blocks, rank, is_on_device=is_on_device, draft=draft
            )
            for rank in range(tp_size * pp_size)
        ]
        # vLLM gives its scheduler the first stage's.
        self._draft_layers = [DRAFT] if draft else []
        first_stage = [*self.ranks[0].layers, *self._draft_layers]
        cache_config = generate_scheduler_kv_cache_config(
            [make_cache_config(self.config, attention, num_blocks, first_stage)]
        )
        scheduler_class = AsyncScheduler if is_async else Scheduler
        sizes = resolve_kv_cache_block_sizes(cache_config, self.config)
        scheduler_block_size, self._hash_block_size = sizes
        self.scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block_size,
            hash_block_size=self._hash_block_size,
        )
        self.scheduler.num_spec_tokens = num_speculative_tokens
        self.scheduler.num_lookahead_tokens = num_speculative_tokens
        handshakes = {
            divmod(rank.rank, tp_size): rank.connector.get_handshake_metadata()
            for rank in self.ranks
        }
        known = {place: handshake for place, handshake in handshakes.items() if handshake}
        self.connector.set_xfer_handshake_metadata_pp_aware(known)
        self.address = f"127.0.0.1:{kv_port}"
        self.answers: dict[str, list[int]] = {}
        self.params: dict[str, dict[str, Any] | None] = {}
        self.stats: dict[str, dict[str, float]] = {}  # of the connector, added up
        self.finished: dict[str, RequestStatus] = {}
        self.num_preemptions = 0
        self.num_preemptions_in_flight = 0  # of requests with a step not yet accounted
        self.num_computed_prompt_tokens: dict[str, int] = {}
        self.wrong_draft_positions: dict[str, int] = {}  # by request, when it first samples
        self.num_placeholders: Counter[str] = Counter()  # by request
        self._work: list[tuple[str, int, np.ndarray[Any, Any]]] = []  # of a step, for the draft
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._requests: dict[str, Request] = {}
        self._cached: dict[str, WorkerRequest] = {}
        self._just_sampled: dict[str, int] = {}  # in the last step
        self._is_async = is_async
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._depth = max(pp_size, 2 if is_async else 1)
        # The engine core's aborts, which come while a step runs: before that step is accounted.
        self.before_accounting: Callable[[ModelRunnerOutput], object] | None = None
        self.has_hooks = True  # else a whole graph is replayed
        self.finishes_lost_steps = True  # as model runner V1 does, and V2 does not
        # Called with each layer's number when it is computed, before its hook.
        self.during_forward: Callable[[int], object] = lambda layer: None

    def thrown_away(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What prefill must answer: with states, it computes all but a prompt's last token, if more
        than one is left."""
        if STATE in self.ranks[0].windows and len(prompt) > 2:
            return continuation(prompt[:-1], 1)
        return continuation(prompt, 1 if STATE in self.ranks[0].windows else num_tokens)

    @property
    def connector(self) -> P2pNcclConnector:
        """The scheduler's half."""
        connector = self.scheduler.connector
        assert isinstance(connector, P2pNcclConnector)
        return connector

    def __enter__(self) -> InstanceDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut both halves down."""
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        **more: Any,
    ) -> Request:
        """Add a request, as the engine core does; `more` says how it is sampled."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(self._hash_block_size, sha256),
            cache_salt=cache_salt,
        )
        request.kv_transfer_params = params
        self._requests[request_id] = request
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request

    def refuse(self, request_id: str, params: dict[str, Any]) -> None:
        """Tell the connector of a request that vLLM's front end has refused, as the engine core."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=[0],
            sampling_params=SamplingParams(
                max_tokens=1, extra_args={"kv_transfer_params": dict(params)}
            ),
            pooling_params=None,
            abort_immediately=True,
        )
        self.scheduler.add_request(request)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def params_of(self, request_id: str) -> dict[str, Any]:
        """The transfer parameters with which a request came."""
        return dict(self._requests[request_id].kv_transfer_params or {})

    def abort(self, request_id: str) -> None:
        """Abort a request, as when its client has left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.setdefault(request_id, RequestStatus.FINISHED_ABORTED)

    def evict(self) -> None:
        """Let vLLM evict all that it has cached, as it does when other prompts need the room."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks})

    @property
    def is_idle(self) -> bool:
        """Whether the engine core would sleep now."""
        return not self.scheduler.has_requests() and not self._in_flight

    def step(self) -> None:
        """Schedule, run and account one step; asynchronous schedulers run one step ahead."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            preempted = [self._requests[name] for name in output.preempted_req_ids or ()]
            self.num_preemptions += len(preempted)
            self.num_preemptions_in_flight += sum(r.num_in_flight_tokens > 0 for r in preempted)
            self._in_flight.append((output, self._run(output)))
            if len(self._in_flight) < self._depth:
                return
        if self._in_flight:
            self._account(*self._in_flight.pop(0))

    def _account(self, output: SchedulerOutput, results: ModelRunnerOutput) -> None:
        if self.before_accounting is not None:
            self.before_accounting(results)
        report = results.kv_connector_output
        assert report is not None
        for request in self.scheduler.running:
            # vLLM would take it back to them, under the steps that are in flight.
            for table in self.scheduler.kv_cache_manager.get_block_ids(request.request_id):
                assert report.invalid_block_ids.isdisjoint(table), request.request_id
        for outputs in self.scheduler.update_from_output(output, results).values():
            if outputs.scheduler_stats is not None:
                self._add_up(outputs.scheduler_stats.kv_connector_stats)
            for item in outputs.outputs:
                self.answers[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self.params[item.request_id] = item.kv_transfer_params
                    self.finished[item.request_id] = self._requests[item.request_id].status

    def _add_up(self, reported: dict[str, Any] | None) -> None:
        for metric, by_label in (reported or {"counters": {}})["counters"].items():
            for label, value in by_label.items():
                counted = self.stats.setdefault(metric, {})
                counted[label] = counted.get(label, 0) + value

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The worker's step, its hooks in the model runner's order."""
        metadata = output.kv_connector_metadata
        assert metadata is not None
        for rank in self.ranks:
            rank.connector.handle_preemptions(metadata)
        self._update_states(output)
        for rank in self.ranks:
            rank.connector.bind_connector_metadata(metadata)
        try:
            sampled = self._forward(output)
        except BaseException:
            for rank in self.ranks if self.finishes_lost_steps else ():
                self._report(rank, output)
            raise
        reports = [self._report(rank, output) for rank in self.ranks]
        request_ids = list(sampled)
        results = [
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={name: index for index, name in enumerate(request_ids)},
                sampled_token_ids=[sampled[name] for name in request_ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=report,
            )
            for report in reports
        ]
        aggregated = self._aggregator.aggregate(list(results))
        assert aggregated is not None
        return aggregated

    def _report(self, rank: RankDouble, output: SchedulerOutput) -> KVConnectorOutput:
        connector = rank.connector
        connector.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
        is_drafting = bool(self._draft_layers and output.num_scheduled_tokens)
        if not is_drafting:
            connector.wait_for_save()
        report = KVConnectorOutput()
        if compat.HAS_FAILED_REQUESTS:
            results = connector.get_transfer_results(output.finished_req_ids)
            report.finished_sending = results.finished_sending
            report.finished_recving = results.finished_recving
            report.failed_recving = results.failed_recving
        else:
            finished = connector.get_finished(output.finished_req_ids)
            report.finished_sending, report.finished_recving = finished
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_stats = connector.get_kv_connector_stats()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if is_drafting:
            for name, first, values in self._work:
                tables = self._cached[name].tables
                kept = self._kept_by_draft(name, values)
                rank.write(tables, first, kept[first:], self._draft_layers)
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return report

    def _kept_by_draft(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What the draft's last module keeps of each position: what it has read by then."""
        if self.num_modules == 1:
            return values
        read = expected_values(self._cached[name].prompt)[self.num_modules :]
        guessed = -values[len(read) :] - id(self) % 1000  # each instance guesses otherwise
        kept: np.ndarray[Any, Any] = np.concatenate([read, guessed])
        return kept[: len(values)]

    def _update_states(self, output: SchedulerOutput) -> None:
        """Take over what the scheduler says, as the model runner's method of this name."""
        for request_id in output.finished_req_ids:
            self._cached.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or ())
            tables = [list(table) for table in new.block_ids]
            self._cached[new.req_id] = WorkerRequest(prompt, tables)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known, new_block_ids = self._cached[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                known.tables = [[] for _ in known.tables]
            if new_block_ids is not None:
                for table, added in zip(known.tables, new_block_ids, strict=True):
                    table += added
            num_output = cached.num_output_tokens[index]
            del known.output[num_output:]
            was_absent = request_id in cached.all_token_ids  # from the last step
            if self._is_async and was_absent and num_output > 0:
                known.output = cached.all_token_ids[request_id][-num_output:]

    def _forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        placeholders = output.scheduled_spec_decode_tokens
        work = [
            (name, computed[name], computed[name] + num_new - len(placeholders.get(name, ())))
            for name, num_new in output.num_scheduled_tokens.items()
        ]
        values = {name: self._prepare_input(name, end) for name, _, end in work}
        for rank in self.ranks:
            for layer in rank.layers:
                for name, first, _ in work:
                    rank.compute(self._cached[name].tables, layer, values[name], first)
                if work:
                    self.during_forward(layer)
                    self._tell(rank, layer)
        for name, _, end in work:
            self._fill_placeholders(name, end, len(placeholders.get(name, ())))
        self._work = [(name, first, values[name]) for name, first, _ in work]
        sampled = {name: self._sample(name, first, values[name]) for name, first, _ in work}
        self._just_sampled = {name: tokens[0] for name, tokens in sampled.items() if tokens}
        return sampled

    def _tell(self, rank: RankDouble, layer: int) -> None:
        """Call the hook behind a layer; an indexer's cache and a state have none."""
        if self.has_hooks and layer not in INDEXERS and rank.windows[layer] != STATE:
            cache = torch.empty(0)
            rank.connector.save_kv_layer(LAYER_NAMES[layer], cache, None)

    def _fill_placeholders(self, name: str, end: int, num_tokens: int) -> None:
        """Compute what nobody has proposed: behind the known tokens lies rubbish, then."""
        self.num_placeholders[name] += num_tokens
        for rank in self.ranks if num_tokens else ():
            rank.write(self._cached[name].tables, end, np.full(num_tokens, -1))

    def _prepare_input(self, name: str, end: int) -> np.ndarray[Any, Any]:
        """The values of a request's positions up to `end`, whose tokens must all be known by now.

        The scheduler has not yet been told what the last step sampled, so it comes from here.
        """
        known = self._cached[name]
        tokens = known.tokens[:end]
        if UNKNOWN in tokens:
            assert tokens.index(UNKNOWN) == end - 1, f"{name}: fed {tokens}"
            known.output[end - 1 - len(known.prompt)] = tokens[-1] = self._just_sampled[name]
        assert len(tokens) == end, f"{name}: {len(tokens)} tokens are known, {end} scheduled"
        return expected_values(tokens)

    def _sample(self, name: str, first: int, values: np.ndarray[Any, Any]) -> list[int]:
        """Read the context back, then say the next token, unless more of them are known already.

        A request that resumes computes its answer's first tokens again, chunk by chunk.
        """
        known, end = self._cached[name], len(values)
        num_prompt = len(known.prompt)
        for rank in self.ranks:
            rank.check(known.tables, values, first, f"{name} at {first}")
            for layer in self._draft_layers:
                kept = self._kept_by_draft(name, values)
                wrong = rank.wrong_positions(known.tables, kept, layer, 0, first)
                self.wrong_draft_positions.setdefault(name, len(wrong))
        counts = self.num_computed_prompt_tokens
        counts[name] = counts.get(name, 0) + min(end, num_prompt) - min(first, num_prompt)
        if end < len(known.tokens):
            return []
        token = _token_after(int(values[-1]))
        known.output.append(UNKNOWN if self._is_async else token)
        return [token]


def _state_mode(config: VllmConfig) -> str:
    return "align" if config.cache_config.enable_prefix_caching else "none"


def state_block_size(config: VllmConfig) -> int:
    """The tokens of a state's block, as vLLM's models choose them."""
    is_aligned = _state_mode(config) == "align"
    return config.cache_config.block_size if is_aligned else config.model_config.max_model_len


@contextmanager
def parallel_rank(tp_rank: int, stage: int) -> Iterator[None]:
    """Let vLLM say that this process is a certain rank."""
    originals = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_pp_group
    parallel_state.get_tensor_model_parallel_rank = lambda: tp_rank
    parallel_state.get_pp_group = lambda: SimpleNamespace(rank_in_group=stage)  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        parallel_state.get_tensor_model_parallel_rank, parallel_state.get_pp_group = originals


def make_cache_config(
    config: VllmConfig, attention: str, num_blocks: int, layers: Sequence[int] = range(NUM_LAYERS)
) -> KVCacheConfig:
    """The groups that vLLM makes of the whole model's layers, with those of one stage."""
    num_heads = max(1, NUM_HEADS // config.parallel_config.tensor_parallel_size)
    if attention in LATENTS:
        num_heads = 1
    kind, num_parts = KINDS_OF_STATE.get(attention, ("MAMBA2", 2))
    common: dict[str, Any] = {"block_size": config.cache_config.block_size, "dtype": torch.int64}
    num_retained = max(0, compat.num_lookahead_tokens(config) - 1)  # as vLLM's get_kv_cache_configs
    specs: dict[str, KVCacheSpec] = {}
    windows = [*MODELS[attention], *([0] if DRAFT in layers else [])]
    for name, window in zip(LAYER_NAMES, windows, strict=False):
        if window == STATE:
            specs[name] = MambaSpec(
                shapes=((STATE_NUMBERS // num_parts,),) * num_parts,
                dtypes=(torch.int64,) * num_parts, mamba_type=MambaAttentionBackendEnum[kind],
                block_size=state_block_size(config), mamba_cache_mode=_state_mode(config),
                page_size_padded=2 * num_heads * config.cache_config.block_size * SLOT_WIDTH * 4,
            )  # fmt: skip
        elif attention in LATENTS:
            specs[name] = MLAAttentionSpec(
                num_kv_heads=1, max_tp_shards=1, head_size=SLOT_WIDTH, **common
            )
        elif window:
            specs[name] = SlidingWindowSpec(
                num_kv_heads=num_heads, head_size=SLOT_WIDTH // 2, sliding_window=window,
                extra_retained_tokens=num_retained, **common,
            )  # fmt: skip
        else:
            specs[name] = FullAttentionSpec(
                num_kv_heads=num_heads, head_size=SLOT_WIDTH // 2, **common
            )
    if attention == "sparse":
        for layer in INDEXERS:
            specs[LAYER_NAMES[layer]] = MLAAttentionSpec(
                num_kv_heads=1, max_tp_shards=1, head_size=KEY_WIDTH,
                cache_role=SparseCacheRole.INDEXER, **common,
            )  # fmt: skip
    mine = {LAYER_NAMES[layer] for layer in layers}
    groups = [
        KVCacheGroupSpec([n for n in group.layer_names if n in mine], group.kv_cache_spec)
        for group in get_kv_cache_groups(config, specs)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
