"""vLLM's own engine core and executor, as far as they pause, sleep and wake up, over a simulated
instance. Its worker's part is played in the order of vLLM 0.33 (`Worker.sleep`, `wake_up` and
`discard`), with all releases."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import RequestStatus

from p2p_engine.connector import compat
from tests.doubles.instance import InstanceDouble, RankDouble

NO_MEMORY = -(1 << 62)  # no token's KV: it must be neither read nor overwritten
FRESH = -1
ASKS_AGAIN = compat.TELLS_OF_SLEEP  # this vLLM does, whatever a test says of it


class ExecutorDouble(Executor):
    """vLLM's executor; its workers are the ranks of an instance."""

    def __init__(self, instance: InstanceDouble) -> None:
        self._ranks, self._asleep = instance.ranks, set[int]()
        self.calls: list[str] = []
        self.sleeping_tags = set()
        if not hasattr(Executor, "is_sleeping"):
            vars(self)["is_sleeping"] = False  # before 0.31

    def _init_executor(self) -> None:
        """Never called: there is no model to load."""

    def check_health(self) -> None:
        """All workers live."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Let each rank do what vLLM's worker does."""
        self.calls.append(method)
        given = kwargs.get("kwargs") or {}
        if method == "sleep" or (method == "discard" and "kv_cache" in kwargs["args"][0]):
            for rank in self._ranks:
                self._take_memory(rank)
        elif method == "wake_up" and (given["tags"] is None or "kv_cache" in given["tags"]):
            for rank in self._ranks:
                self._give_memory(rank)
        elif method == "get_kv_connector_handshake_metadata":
            size = max(rank.rank for rank in self._ranks) + 1
            return [
                {divmod(rank.rank, size): rank.connector.get_handshake_metadata()}
                for rank in self._ranks
            ]
        return [None for _ in self._ranks]

    def _take_memory(self, rank: RankDouble) -> None:
        rank.connector.unregister_kv_caches()
        self._asleep.add(rank.rank)
        rank.cache.fill_(NO_MEMORY)

    def _give_memory(self, rank: RankDouble) -> None:
        if rank.rank in self._asleep:
            assert (rank.cache == NO_MEMORY).all(), "a block was written to while it had no memory"
            self._asleep.remove(rank.rank)
            rank.cache.fill_(FRESH)
        rank.connector.restore_kv_caches()


class CoreDouble(EngineCoreProc):
    """vLLM's engine core, without a process: the test steps its instance."""

    def __init__(self, instance: InstanceDouble) -> None:
        self._instance = instance
        self.scheduler = instance.scheduler
        self.model_executor = ExecutorDouble(instance)
        self.batch_queue = instance._in_flight  # type: ignore[assignment]
        self.engines_running = self.reject_new_requests = False
        self.mm_receiver_cache = None
        self.output_queue = queue.Queue()
        self.input_queue, self.aborts_queue = queue.Queue(), queue.Queue()
        self._idle_state_callbacks: list[Callable[..., Any]] = []

    def fall_asleep(self, level: int = 1, mode: Any = "abort") -> Callable[[], bool]:
        """Ask vLLM to sleep; returns whether it does, to be asked after each step, as vLLM's loop
        does."""
        known = list(self._instance.scheduler.requests.values())
        future: Future[Any] | None = self.sleep(level, mode)
        for request in known:
            if request.status is RequestStatus.FINISHED_ABORTED:
                self._instance.finished.setdefault(request.request_id, request.status)

        def sleeps() -> bool:
            if future is None:
                return True
            if not self.has_work():
                self._notify_idle_state_callbacks()
            return future.done() and future.result() is None

        return sleeps

    def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up as vLLM 0.33, which asks for the ranks' addresses again."""
        is_awake = super().wake_up(tags)
        if not ASKS_AGAIN and (tags is None or "kv_cache" in tags):
            found = self.model_executor.collective_rpc("get_kv_connector_handshake_metadata")
            metadata = {place: item for each in found for place, item in each.items()}
            self._instance.connector.set_xfer_handshake_metadata_pp_aware(metadata)
        return is_awake
