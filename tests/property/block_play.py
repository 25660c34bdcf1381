"""Plays prompts through vLLM's own scheduler and block pool, with our scheduler half and workers of
which only the reading is played, and watches every block that they may be reading.

There is no model, no engine and no cache: what is asked is who holds which block, when.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from p2p_engine.config import SendMode
from p2p_engine.connector.groups import layer_groups
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.orders import SendStep
from tests.doubles.vllm_config import make_config

NULL_BLOCK = 0
STATE = -1  # in the place of a window: layers that keep a state
LONGEST = 4096
init_none_hash(sha256)

SEND = {"do_remote_decode": True, "remote_host": "d", "remote_port": 2}


def make_cache(
    groups: Sequence[tuple[int, int]], num_blocks: int, *, has_prefix_cache: bool = True
) -> KVCacheConfig:
    """A cache with these groups: (block size, window or 0 or STATE) of each."""
    specs: list[KVCacheSpec] = []
    for block_size, window in groups:
        common: Any = {
            "block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32,
        }  # fmt: skip
        if window == STATE:
            specs.append(MambaSpec(
                shapes=((8,),), dtypes=(torch.float32,),
                block_size=block_size if has_prefix_cache else LONGEST,
                mamba_cache_mode="align" if has_prefix_cache else "none",
                num_prefill_checkpoint_blocks=int(has_prefix_cache),  # as Mamba2 asks for them
                prefill_checkpoint_alignment=1 if has_prefix_cache else None,
            ))  # fmt: skip
        elif window:
            specs.append(SlidingWindowSpec(sliding_window=window, **common))
        else:
            specs.append(FullAttentionSpec(**common))
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layers.{n}"], s) for n, s in enumerate(specs)],
    )


def make_manager(cache: KVCacheConfig, *, has_prefix_cache: bool) -> KVCacheManager:
    """vLLM's cache manager, whatever this release wants to be told."""
    sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
    settings: dict[str, Any] = {
        "kv_cache_config": cache, "max_model_len": 1 << 16, "enable_caching": has_prefix_cache,
        "hash_block_size": min(sizes), "scheduler_block_size": max(sizes),
        "max_in_flight_tokens": 1 << 16, "max_num_batched_tokens": 1 << 16,
    }  # fmt: skip
    known = inspect.signature(KVCacheManager).parameters
    return KVCacheManager(**{name: value for name, value in settings.items() if name in known})


def make_request(
    name: str, prompt: Sequence[int], max_tokens: int, hash_block_size: int, **more: Any
) -> Request:
    """A request whose KV is sent away."""
    request = Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
        **more,
    )
    request.kv_transfer_params = {**SEND, "transfer_id": name}
    return request


class Watch:
    """What the workers may be reading, and whom vLLM gives blocks to.

    A worker reads all of what it is ordered to send, as if the peer were never ready, until it
    reports or withdraws the request.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[LayerGroup], mode: SendMode) -> None:
        self._pool, self._groups, self._mode = pool, groups, mode
        self._reading: dict[str, set[int]] = {}
        self._handed: set[int] = set()
        self._withdrawn: set[str] = set()
        self._has_state = any(group.is_state for group in groups)
        self._complete: set[str] = set()  # of which all is read
        self._wrap()

    def _wrap(self) -> None:
        hand_out, pool = self._pool.get_new_blocks, self._pool

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = hand_out(*args, **kwargs)
            self._handed |= {block.block_id for block in blocks}
            return blocks

        pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]

    def withdraw(self, metadata: P2pConnectorMetadata) -> None:
        """What a worker does before anything of a step runs."""
        for name in metadata.preempted:
            self._withdrawn.add(name)
            self.forget(name)
        self.check()

    def compute(self, names: Iterable[str]) -> None:
        """A step computes tokens of these requests: a state that is read would be overwritten."""
        torn = self._complete.intersection(names) if self._has_state else ()
        assert not torn, f"{torn} go on, and their states are being read"

    def start(self, steps: Sequence[SendStep]) -> None:
        """Read what these steps complete; GET holds a prompt only when it is whole."""
        for step in steps:
            num_tokens, name = step.party.num_tokens, step.party.request_id
            is_last = step.num_computed_tokens == num_tokens
            if self._mode is SendMode.GET and not is_last:
                continue
            for group, table in zip(self._groups, step.tables, strict=True):
                end = len(table) if is_last else group.num_full_blocks(step.num_computed_tokens)
                wanted = table[group.first_block(num_tokens) : end].tolist()
                if NULL_BLOCK in wanted and name in self._withdrawn:
                    break  # the worker fails it: it resumes behind its prompt's window
                self._reading.setdefault(name, set()).update(wanted)
            if is_last:
                self._complete.add(name)
        self._handed.clear()  # to whom vLLM has given them before may fill them in this step
        self.check()

    def forget(self, name: str) -> None:
        """The worker reads nothing of it any more."""
        self._reading.pop(name, None)
        self._complete.discard(name)

    def check(self) -> None:
        """No block that is read is free, nobody's, or by now somebody else's."""
        for name, block_ids in self._reading.items():
            assert NULL_BLOCK not in block_ids, f"{name}: what vLLM has dropped is sent"
            free = {number for number in block_ids if self._pool.blocks[number].ref_cnt <= 0}
            assert not free, f"{name}: {sorted(free)} are free, and being read"
            taken = block_ids & self._handed
            assert not taken, f"{name}: {sorted(taken)} are another request's, and being read"


class Wants:
    """Whether the scheduler half wants as many blocks as vLLM, when that refuses to start a
    request."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager, half = scheduler.kv_cache_manager, scheduler.connector._scheduler  # type: ignore[union-attr]
        self._manager, self._coordinator = manager, manager.coordinator
        self._needed, self._wanted, self.num_refused = 0, 0, 0
        self._refused: dict[str, int] = {}  # how many vLLM wanted
        self._count, self._allocate = (
            self._coordinator.get_num_blocks_to_allocate,
            manager.allocate_slots,
        )
        self._want = half._pressure.want
        self._coordinator.get_num_blocks_to_allocate = self._noted_count  # type: ignore[method-assign]
        manager.allocate_slots = self._noted_allocate  # type: ignore[method-assign]
        half._pressure.want = self._noted_want

    def _noted_count(self, *args: Any, **kwargs: Any) -> int:
        self._needed = self._count(*args, **kwargs)
        return self._needed

    def _noted_allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, **kwargs)
        # vLLM claims to want more than there are if it wants to wait for the next step.
        is_lack = self._needed <= self._manager.block_pool.num_gpu_blocks
        if blocks is None and is_lack and request.status is not RequestStatus.RUNNING:
            self._refused[request.request_id] = self._needed
        return blocks

    def _noted_want(self, num_blocks: int | None = None) -> None:
        self._wanted = max(self._wanted, num_blocks or 0)
        self._want(num_blocks)

    def check(self) -> None:
        """Look at a step that vLLM has just scheduled."""
        for name, needed in self._refused.items():
            assert self._wanted >= needed, f"vLLM lacks more for {name} than is made room for"
        self.num_refused += len(self._refused)
        self._refused.clear()
        self._wanted = 0


@dataclass
class StepInFlight:
    """A step that has been scheduled and not been accounted."""

    output: SchedulerOutput
    report: KVConnectorOutput
    sampled: list[str]


@dataclass
class Play:
    """One instance: requests come, are cut short, preempted and sent, by chance.

    `depth` steps are in flight at a time; above 1, vLLM's asynchronous scheduler runs.
    """

    model: Path
    rng: random.Random
    groups: Sequence[tuple[int, int]]
    mode: SendMode = SendMode.PUT_ASYNC
    num_blocks: int = 400
    max_tokens_per_step: int = 64
    depth: int = 1
    has_prefix_cache: bool = True
    num_speculative_tokens: int = 0
    tp_size: int = 1
    ended: set[str] = field(default_factory=set)  # and not yet reported by all
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        cache = make_cache(self.groups, self.num_blocks, has_prefix_cache=self.has_prefix_cache)
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        config = make_config(
            self.model, "kv_producer", 20001, max_tokens_per_step=self.max_tokens_per_step,
            tp_size=self.tp_size, is_async=self.depth > 1, max_model_len=LONGEST,
            has_prefix_cache=self.has_prefix_cache, block_size=self.groups[0][0],
            settings={"host": "127.0.0.1", "send_type": self.mode.value},
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.__class__ = type(
            "Speculating", (VllmConfig,), {"num_speculative_tokens": self.num_speculative_tokens}
        )
        if STATE in dict(self.groups).values() and self.has_prefix_cache:
            config.cache_config.mamba_cache_mode = "align"
        self.hash_block_size = min(sizes)
        settings: dict[str, Any] = {
            "vllm_config": config, "kv_cache_config": cache, "log_stats": False,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": max(sizes), "hash_block_size": min(sizes),
        }  # fmt: skip
        kind = AsyncScheduler if self.depth > 1 else Scheduler
        known = inspect.signature(Scheduler).parameters
        self.scheduler = kind(**{k: v for k, v in settings.items() if k in known})
        self.scheduler.num_spec_tokens = self.num_speculative_tokens
        self.scheduler.num_lookahead_tokens = self.num_speculative_tokens
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.watch = Watch(self.pool, layer_groups(cache), self.mode)
        self.wants = Wants(self.scheduler)
        self._flights: deque[StepInFlight] = deque()
        self._requests: dict[str, Request] = {}

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 1) -> None:
        """Ask for one more."""
        request = make_request(name, prompt, max_tokens, self.hash_block_size)
        self._requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its client has left."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.watch.check()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be done."""
        return not self.scheduler.has_requests() and not self._flights

    def step(self, *, may_report: bool = True) -> None:
        """Schedule a step, run it, and account the oldest that is in flight."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.wants.check()
            self.num_preemptions += len(output.preempted_req_ids or ())
            self._flights.append(self._run(output, may_report=may_report))
            if len(self._flights) < self.depth:
                return
        if self._flights:
            self._account(self._flights.popleft())

    def _run(self, output: SchedulerOutput, *, may_report: bool) -> StepInFlight:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, P2pConnectorMetadata)
        self.watch.withdraw(metadata)
        self.watch.compute(output.num_scheduled_tokens)
        self.watch.start(metadata.sends)
        for item in metadata.ended_sends:
            if item.is_held:
                self.ended.add(item.party.request_id)
            else:
                self.watch.forget(item.party.request_id)
        done = {name for name in self.ended if may_report and self.rng.random() < 0.3}
        self.ended -= done
        for name in done:
            self.watch.forget(name)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            name
            for name, count in output.num_scheduled_tokens.items()
            if computed[name] + count >= self._requests[name].num_prompt_tokens
            and computed[name] + count >= self._requests[name].num_tokens
        ]
        return StepInFlight(output, KVConnectorOutput(finished_sending=done), sampled)

    def _account(self, flight: StepInFlight) -> None:
        names = list(flight.output.num_scheduled_tokens)
        results = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if name in flight.sampled else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=flight.report,
        )
        self.scheduler.update_from_output(flight.output, results)
        self.watch.check()

    def check_whole(self) -> None:
        """Every block has been given back, exactly once."""
        assert not self.scheduler.requests
        assert {block.ref_cnt for block in self.pool.blocks if not block.is_null} == {0}
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        half = self.scheduler.connector._scheduler  # type: ignore[union-attr]
        assert not half._sending
        assert not half._pins
