"""Worker half: on one rank, carries out the orders of each step with the engine.

It needs no thread of its own, and nothing here blocks, but PUT and the withdrawal of a preempted
request's blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.connector.layer_hooks import LayerHooks
from p2p_engine.connector.loads import Loads
from p2p_engine.connector.orders import StepOrders
from p2p_engine.connector.sends import Sends
from p2p_engine.connector.stashing import Stashing
from p2p_engine.errors import TransferTimeout
from p2p_engine.peers.directory import RankAddress
from p2p_engine.wire.identity import pack

# How long a step that computes nothing waits for a transfer. vLLM makes such steps one after the
# other while KV is awaited or held, and its worker spins in between, which takes the core of the
# thread that moves KV. A new request waits for the end of such a step.
LINGER_SECONDS = 0.002
STOP_SECONDS = 5.0  # until memory must be free; a copy stops at its next slice
ASLEEP = "none (asleep)"  # stands for the weights' name: contents of all others are refused

if TYPE_CHECKING:
    from p2p_engine.connector.layer_group import GroupCache
    from p2p_engine.engine import P2pNcclEngine
    from p2p_engine.wire.messages import CacheSpec, TransferKey


@dataclass(frozen=True)
class StepResults:
    """This rank's report after a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


class WorkerHalf:
    """Owns the engine of one rank, and carries out vLLM's orders group by group."""

    def __init__(
        self,
        engine: P2pNcclEngine,
        spec: CacheSpec,
        caches: Sequence[GroupCache],
        *,
        can_fail_requests: bool,
        names_lost_blocks: bool = True,
        linger_seconds: float = 0.0,
    ) -> None:
        """`Loads` explains the two flags. A step that computes nothing waits for `linger_seconds`
        for a transfer that vLLM waits for."""
        self.engine = engine
        self._spec = spec
        self._sends = [Sends(engine, cache) for cache in caches]
        self._loads = [
            Loads(
                engine,
                cache,
                can_fail_requests=can_fail_requests,
                names_lost_blocks=names_lost_blocks,
            )
            for cache in caches
        ]
        self._stashing = [Stashing(engine, cache) for cache in caches]
        self.layers = LayerHooks(self._sends)
        self._sent = Tally(len(caches))
        self._loaded = Tally(len(caches))
        self._failed: set[str] = set()  # in a group, while others have not ended
        self._linger_seconds = linger_seconds
        self._was_empty = False  # the last step
        self._number = 0  # of the step that runs
        self._num_finished = 0  # the last one's that has finished
        self._weights = ""  # their name
        self._is_asleep = False

    @property
    def location(self) -> RankAddress:
        """The address at which peers find this rank."""
        engine, spec = self.engine, self._spec
        identity = pack(engine.identity)
        return RankAddress(spec.rank, engine.zmq_address, engine.epoch, spec, identity)

    def withdraw(self, metadata: StepOrders) -> None:
        """Take back the chunks of preempted requests; call it before the step."""
        if metadata.preempted:
            for sends in self._sends:
                sends.withdraw(metadata.preempted)

    def start_step(self, metadata: StepOrders) -> None:
        """Offer the blocks that the forward will complete; call it before the forward."""
        # vLLM says nothing of a pause. While paused, it computes nothing, and begins no load.
        begins = metadata.computes or bool(metadata.loads) or metadata.awaits_grammar
        self.engine.step_began(has_work=begins or any(loads.is_awaited for loads in self._loads))
        if metadata.number > self._num_finished + 1:  # vLLM's runner V2 stops in a step that raises
            self.lose_step()
        self._number = metadata.number
        if metadata.is_renamed or metadata.weights != self._weights:
            self._use_weights(metadata.weights)
        reason = f"vLLM has reset its caches; weights: {self._weights}"
        if metadata.is_reset:
            self.engine.drop_landed()
        for loads in self._loads:
            loads.keep(metadata.kept)
        for sends in self._sends:
            sends.end(metadata.ended_sends)  # before this step: its id may be a new request's now
            if metadata.is_reset:
                sends.give_up(reason)
            sends.start_step(metadata.sends)
            sends.spill(metadata.spills)
        for stashing in self._stashing:
            stashing.start(metadata.stashes)  # first: they finished before the reset
            if metadata.is_reset:
                stashing.give_up(reason)
        self.layers.open()

    def _use_weights(self, name: str) -> None:
        """Refuse KV of other weights from now on, and load nothing of those before. A reset, which
        comes with each change, ends what was to be sent."""
        before, self._weights = self._weights, name
        if not self._is_asleep:  # vLLM may step then: with nothing to compute
            self.engine.use_weights(name)
        for loads in self._loads:
            loads.give_up(f"weights: {name} here now, {before} before")

    def fall_asleep(self) -> None:
        """End all transfers by name, and refuse new ones until `wake_up`: vLLM's blocks are about
        to lose their memory. Blocks until nothing reads or writes it, for at most STOP_SECONDS.
        Idempotent.

        Raises:
            TransferTimeout: a copy does not stop.
        """
        self._is_asleep, reason = True, "the instance has been put to sleep"
        self.engine.use_weights(ASLEEP)
        self.engine.drop_landed()
        parts: tuple[Loads | Sends | Stashing, ...]
        parts = (*self._loads, *self._sends, *self._stashing)
        for part in parts:
            part.give_up(reason)
        deadline = time.monotonic() + STOP_SECONDS
        for transfer in [item for part in parts for item in part.open_transfers()]:
            if not transfer.wait_released(deadline - time.monotonic()):
                self.wake_up()  # vLLM does not call it: it believes that nobody sleeps
                raise TransferTimeout(f"{transfer.key}: a copy does not stop, memory must stay")

    def wake_up(self) -> None:
        """Take part again: the blocks have memory, at the addresses that they had. Idempotent."""
        if self._is_asleep:
            self._is_asleep = False
            self.engine.use_weights(self._weights)

    def start_loads(self, metadata: StepOrders) -> None:
        """Start the step's loads; call it after the forward, which may still zero the blocks."""
        ordered = {load.party.request_id for load in metadata.loads}
        cancelled = set(metadata.cancelled_loads)
        for loads in self._loads:
            loads.drop(metadata.dropped)  # first: kept KV passes to the next request for it
            loads.cancel(cancelled - ordered)  # first: a new request may load the same content
            loads.discard(metadata.unwanted)
            loads.start(metadata.loads)
            loads.cancel(cancelled & ordered)  # 0.33 may tell of a load when it is over

    def finish_step(self) -> None:
        """Let computed blocks leave; call it after the forward."""
        self._num_finished = self._number
        self.layers.close()
        for sends in self._sends:
            sends.finish_step()

    def lose_step(self) -> None:
        """Send nothing from now on but what has finished, because a forward has raised: vLLM has
        cached its blocks when it ordered the step, and takes them for later prompts, too."""
        self.layers.close()
        for sends in self._sends:
            sends.refuse_all("a forward of this instance failed")

    def take_results(self, *, is_empty: bool = False) -> StepResults:
        """Return the requests that ended since the last step, in all groups; call it after the
        step. A step that `is_empty` may wait for one to end."""
        self._num_finished = self._number  # with a draft, runner V1 says no more on early stages
        self.engine.step_ended()
        self.engine.poll()
        results = self._results()
        # In vLLM's process, the tokens of a step wait for the return of the step behind it.
        is_alone = is_empty and self._was_empty
        self._was_empty = is_empty
        if is_alone and self._linger_seconds and self._is_awaited and results == StepResults():
            self.engine.wait_for_change(self._linger_seconds)
            results = self._results()
        return results

    @property
    def _is_awaited(self) -> bool:
        """Whether vLLM waits for the report of a transfer."""
        parts: tuple[Loads | Sends | Stashing, ...]
        parts = (*self._loads, *self._sends, *self._stashing)
        return any(part.is_awaited for part in parts)

    def _results(self) -> StepResults:
        results = StepResults()
        for sends in self._sends:
            results.finished_sending.update(self._sent.add(sends.take_released()))
        for stashing in self._stashing:
            results.finished_sending.update(self._sent.add(stashing.take_released()))
        for loads in self._loads:
            ended = loads.take_results()
            self._fail(ended.failed)
            results.invalid_block_ids.update(ended.invalid_block_ids)
            results.finished_recving.update(self._loaded.add(ended.finished))
        results.failed_recving.update(self._failed & results.finished_recving)
        self._failed -= results.finished_recving
        return results

    def take_ended_stashes(self) -> tuple[TransferKey, ...]:
        """Return the keys of the stashes that have ended since the last step, in any group."""
        return tuple(key for stashing in self._stashing for key in stashing.take_ended())

    def _fail(self, request_ids: set[str]) -> None:
        """Cancel requests in all groups: after a failure in one, the others are of no use."""
        self._failed |= request_ids
        for loads in self._loads:
            loads.cancel(request_ids, "another group of layers failed")

    def close(self) -> None:
        """Close the engine: bounded, idempotent."""
        self.engine.close()


class Tally:
    """Counts in how many groups a request has ended."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._counts: Counter[str] = Counter()

    def add(self, request_ids: Iterable[str]) -> list[str]:
        """Count requests that ended in one more group; return those that ended in all."""
        self._counts.update(request_ids)
        ended = [name for name in request_ids if self._counts[name] == self._num_groups]
        for name in ended:
            del self._counts[name]
        return ended
