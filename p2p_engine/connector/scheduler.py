"""Scheduler half: decides each request's part, and turns vLLM's schedule into orders for workers.

It moves no bytes, never blocks, and raises for no input of a client.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import Request, RequestStatus

from p2p_engine.config import SendMode
from p2p_engine.connector.adapters import Adapters
from p2p_engine.connector.binding import binding_of
from p2p_engine.connector.earlier_turns import EarlierTurns
from p2p_engine.connector.intent import (
    HELD_TOKENS,
    NUM_TOKENS,
    ONLY_CHOICE,
    UNSALTED,
    Direction,
    Intent,
    InvalidParams,
    Stashes,
    ThisInstance,
    read_intent,
)
from p2p_engine.connector.layer_group import NULL_BLOCK, LayerGroup
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.orders import BlockRange, EndedSend, Int64s, Load, Party, SendStep
from p2p_engine.connector.pins import Pins
from p2p_engine.connector.pressure import Pressure
from p2p_engine.connector.refused import RefusedPeers
from p2p_engine.connector.states import (
    check_prefill,
    end_before_last_token,
    num_tokens_before_last,
)
from p2p_engine.connector.stats import ours_in
from p2p_engine.connector.untransferred import Reason, Untransferred
from p2p_engine.connector.wanted import Wanted
from p2p_engine.connector.weights import UNKNOWN, Weights, hear_of_resets
from p2p_engine.errors import named
from p2p_engine.transfer import note_stage
from p2p_engine.wire.bindings import renamed
from p2p_engine.wire.messages import ContentKey, TransferKey
from p2p_engine.wire.request_ids import is_one_of_several

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from p2p_engine.peers.directory import Directory

logger = logging.getLogger(__name__)

GIVEN_UP = (
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_IGNORED,
    RequestStatus.FINISHED_ERROR,
)


@dataclass
class _Sending:
    """A request whose KV leaves this instance, from its arrival to its end."""

    party: Party
    request: Request
    adapter: str  # to whose name its KV is bound
    tables: list[list[int]] = field(default_factory=list)  # by group
    has_steps: bool = False  # a worker may hold chunks of it
    is_planned: bool = False  # the steps given out so far cover the whole prompt
    failure: str = ""  # why they will not


@dataclass
class _Loading:
    """A request whose KV comes from another instance.

    vLLM asks again after a failed load and after a preemption; by then `is_decided` says no.
    """

    party: Party
    num_tokens: int  # that are loaded, those included that are here already
    adapter: str  # to whose name its KV is bound
    intent: Intent | None = None  # None: it recalls an earlier turn's
    is_decided: bool = False  # given to the workers, or declined
    is_open: bool = False  # given to the workers, and not reported yet
    num_present: int = 0  # tokens that were here when vLLM asked last
    num_more_blocks: int = 0  # that it wants beside those of what is loaded
    request: Request | None = None  # None: as for the intent


class SchedulerHalf:
    """The state of each request, and the orders for the next step."""

    def __init__(
        self,
        instance: ThisInstance,
        weights: Weights,
        groups: Sequence[LayerGroup],
        tp_size: int,
        *,
        pp_size: int = 1,
        num_lookahead_tokens: int = 0,
        num_speculative_tokens: int = 0,
        num_watermark_blocks: int = 0,
        stash_seconds: float = 0.0,
        has_host_buffer: bool = False,
        identifies_media: bool = True,
    ) -> None:
        """`num_lookahead_tokens`: how far a draft's layers read ahead of what they compute.
        `num_watermark_blocks`: how many vLLM leaves free when it starts a request."""
        self._instance = instance
        self._weights = weights
        self._groups = groups
        self._has_window = any(group.window for group in groups)
        self._has_state = any(group.is_state for group in groups)
        self._tp_size, self._pp_size = tp_size, pp_size
        self._num_lookahead_tokens = num_lookahead_tokens
        spare = [group.num_spare_blocks(num_speculative_tokens) for group in groups]
        self._num_spare_blocks = sum(spare) + num_watermark_blocks
        self._has_host_buffer = has_host_buffer
        self._identifies_media = identifies_media
        self._sending: dict[str, _Sending] = {}
        self._sent: Counter[ContentKey] = Counter()  # by how many of them
        self._loading: dict[str, _Loading] = {}
        self._adapters = Adapters()
        self._wanted = Wanted()
        self._next = P2pConnectorMetadata()
        # Requests that want blocks, and how many: in this step; and behind a load that is over.
        self._asked: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._pressure = Pressure()
        self._pins = Pins()
        self._turns = EarlierTurns(weights, self._adapters, groups, stash_seconds)
        self.untransferred = Untransferred(instance.role)
        self._refused = RefusedPeers()
        self._directory: Directory | None = None
        self._empty_cache: Callable[[], object] = lambda: None

    def bind_pool(self, pool: BlockPool) -> None:
        """Count free blocks, hold blocks, and look for resets, in this pool of vLLM's."""
        hear_of_resets(pool, self._on_reset)
        self._empty_cache = pool.reset_prefix_cache
        self._pressure.bind(pool)
        self._pins.bind(pool)

    def use_directory(self, directory: Directory) -> None:
        """Use its address from now on: with `kv_port: 0` it is known only after the port is bound.
        Tell and ask other instances by it."""
        self._instance = dataclasses.replace(self._instance, address=directory.address)
        self._directory = self._turns.directory = directory
        self.untransferred.tell = partial(self._warn, "transfers")
        self._tell_of_weights()

    def _tell_of_weights(self) -> None:
        if self._directory is not None:
            weights = self._weights
            self._directory.name_weights(weights.name, have_changed=weights.have_changed)
        self._warn("weights", "" if self._weights.is_known else UNKNOWN)

    def _warn(self, subject: str, text: str) -> None:
        if self._directory is not None:
            self._directory.warn(subject, text)

    # A request arrives, is given blocks, ends

    def on_new_request(self, request: Request) -> None:
        """Decide the request's part, once."""
        request_id, params = request.request_id, request.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            # vLLM itself treats it as a map from here on, and would crash.
            request.kv_transfer_params = None
        intent, obstacle = None, self._adapters.obstacle_to(request)
        try:
            intent = read_intent(request_id, params, self._instance)
            if intent is None:
                self.untransferred.leave_alone(params)
                return
            self._refuse_unsupported(request)
            if obstacle:
                raise InvalidParams(obstacle, Reason.UNSUPPORTED)
            if self._has_state and intent.direction is Direction.SEND:
                check_prefill(request)
        except InvalidParams as error:
            self.untransferred.refuse(request_id, error.reason, named(error))
            if intent is not None and intent.direction is Direction.SEND:  # its peer need not wait
                party = self._party(request, intent)
                self._next.ended_sends.append(EndedSend(party, named(error), is_held=False))
            elif intent is not None:  # nor need prefill hold it
                party = self._party(request, intent)
                self._wanted.add(party)
                self._wanted.remove(party, was_ordered=False)
            return
        party, adapter = self._party(request, intent), self._adapters.name_of(request)
        note_stage(party.key, f"request to {intent.direction.value} arrives")
        if intent.direction is Direction.LOAD:
            num_tokens = self._num_loaded_of(request, party)
            self._loading[request_id] = _Loading(
                party, num_tokens, adapter, intent, request=request
            )
            self._wanted.add(party)  # vLLM may not ask for it before a slot is free
        else:
            self._sending[request_id] = _Sending(party, request, adapter)
            self._count_sent(party, 1)
            if self._has_state:
                end_before_last_token(request)
            self._turns.recall(request, intent.earlier)

    def _party(self, request: Request, intent: Intent) -> Party:
        """Return the request's part in the transfer. If prefill has answered that its prompt was
        shorter, that one is loaded: this one may go on with it."""
        num_tokens = request.num_prompt_tokens
        # Of a prompt with states, prefill gives all but the last token.
        num_shared = intent.num_tokens + self._has_state if intent.num_tokens else num_tokens
        is_refused = _is_refused(request) or intent.num_tokens > num_tokens
        if num_shared < num_tokens:
            num_tokens = intent.num_tokens
        elif self._has_state:
            num_tokens = num_tokens_before_last(request)
        names = self._weights.name, self._adapters.name_of(request)
        binding = binding_of(request, *names, num_shared, is_salted=intent.is_salted)
        return Party(
            request.request_id,
            intent.key,
            intent.peer,
            b"" if is_refused else binding,
            intent.send_type,
            num_tokens,
            self._held_tokens(request, intent),
        )

    def _num_loaded_of(self, request: Request, party: Party) -> int:
        """How many tokens of a request's prompt are loaded; none of one that is not prefill's."""
        if not party.is_refused:
            is_whole = self._has_state and party.num_tokens == request.num_prompt_tokens
            # whole: the state has read the last token
            return 0 if is_whole else self._num_loaded(party.num_tokens + self._has_state)
        if not _is_refused(request):
            why = "prefill's prompt was longer"
            self.untransferred.refuse(request.request_id, Reason.OTHER_PROMPT, why)
        return 0

    def _held_tokens(self, request: Request, intent: Intent) -> int:
        """Of how many of a request's first tokens the KV is not pushed: whole blocks in all groups,
        and not the last one."""
        if intent.direction is Direction.LOAD:
            return intent.held_tokens
        if self._has_window or self._has_state or self._has_host_buffer:
            return 0  # what is held must be the prompt's beginning, and in vLLM's own blocks
        unit = math.lcm(*(group.block_size for group in self._groups))
        return min(intent.held_tokens, request.num_prompt_tokens - 1) // unit * unit

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after the computed ones come from the other instance; None while
        that is not known."""
        if self._turns.is_asking(request.request_id):
            return None
        recalled = self._turns.take_found(request)
        if recalled is not None:
            self._loading[request.request_id] = _Loading(
                recalled, self._num_loaded(recalled.num_tokens), self._adapters.name_of(request)
            )
            self._wanted.add(recalled)
        self._asked[request.request_id] = self._num_blocks(request.num_tokens)
        loading = self._loading.get(request.request_id)
        if loading is None or loading.is_decided or request.skip_reading_prefix_cache:
            return 0
        if obstacle := self._adapters.obstacle_to(request, loading.adapter):
            if loading.request is not None:
                self.untransferred.refuse(request.request_id, Reason.UNSUPPORTED, obstacle)
            self._decline(loading)
            return 0
        loading.num_present = num_computed_tokens
        return max(0, loading.num_tokens - num_computed_tokens)

    def _decline(self, loading: _Loading) -> None:
        """Have vLLM compute what was to be loaded."""
        self._wanted.remove(loading.party, was_ordered=False)
        loading.is_decided = True

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Order the load of the last `num_tokens` that come; 0 means that vLLM computes them."""
        self._asked.pop(request.request_id, None)
        loading = self._loading.get(request.request_id)
        if loading is None or loading.is_decided:
            return
        loading.is_decided = True
        if num_tokens == 0:
            self._wanted.remove(loading.party, was_ordered=False)
            return
        loading.is_open, party = True, loading.party
        note_stage(party.key, "load ordered")
        end, refusal = loading.num_present + num_tokens, ""
        if end != loading.num_tokens:  # its states and windows are those of another token
            refusal = f"vLLM loads {end} tokens, and {loading.num_tokens} can come"
        loading.num_more_blocks = self._num_blocks(request.num_tokens) - self._num_blocks(end)
        ranges = [
            _wanted(group, table, loading.num_present, end)
            for group, table in zip(self._groups, blocks.get_block_ids(), strict=True)
        ]
        self._next.loads.append(Load(party, tuple(ranges), refusal))

    def request_finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks must outlive the request, and the response's transfer
        parameters."""
        loading = self._loading.pop(request.request_id, None)
        self._loaded.pop(request.request_id, None)
        if loading is not None:
            self._end_load(loading)
        self._turns.forget(request.request_id)
        sending = self._sending.pop(request.request_id, None)
        if sending is None:
            return self._stash(request, loading, block_ids)
        note_stage(sending.party.key, "prefill ends")
        self._count_sent(sending.party, -1)
        is_complete = sending.is_planned and request.status not in GIVEN_UP
        why = sending.failure or f"the request ended as {request.status.name}"
        failure = None if is_complete else why
        self._next.ended_sends.append(EndedSend(sending.party, failure, sending.has_steps))
        if is_complete and (num_held := self._num_held_blocks(sending.party, block_ids)):
            self._pressure.hold(request.request_id, num_held)
        answer = self._answer(request, sending.party, block_ids) if is_complete else None
        return sending.has_steps, answer

    def _num_held_blocks(self, party: Party, block_ids: Sequence[list[int]]) -> int:
        """How many blocks wait for the peer to ask for them."""
        if party.send_type is SendMode.GET:
            return sum(block != NULL_BLOCK for group in block_ids for block in group)
        return sum(group.num_full_blocks(party.held_tokens) for group in self._groups)

    def _stash(
        self, request: Request, loading: _Loading | None, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Order the KV of a request that was loaded here to be kept for its session's next turn.
        vLLM keeps the blocks until they are copied."""
        intent = loading.intent if loading is not None else None
        if intent is None or intent.stashes is Stashes.NO:
            return False, None
        order = self._turns.stash(request, intent.key, block_ids, is_salted=intent.is_salted)
        if order is None:
            return False, None
        self._next.stashes.append(order)
        if intent.stashes is Stashes.QUIETLY:
            return True, None
        party = dataclasses.replace(order.party, key=intent.key)
        turned = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": None}
        return True, self._answer(request, party, block_ids) | turned

    def _end_load(self, loading: _Loading) -> None:
        if loading.is_open:
            self._next.cancelled_loads.append(loading.party.request_id)
        if loading.is_open or not loading.is_decided:
            self._wanted.remove(loading.party, was_ordered=loading.is_open)

    def _answer(
        self, request: Request, party: Party, block_ids: Sequence[list[int]]
    ) -> dict[str, Any]:
        """Return the parameters that a router passes to the decode side.

        All that NixlConnector answers is among them, and MoRIIOConnector's ports: routers look for
        these, and some pass on only what is complete.
        """
        host, _, port = self._instance.address.rpartition(":")
        is_held = party.send_type is SendMode.GET
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": party.key.transfer_id,
            "remote_host": host,
            "remote_port": int(port),
            "remote_handshake_port": int(port),
            "remote_notify_port": int(port),
            "remote_request_id": party.key.transfer_id,
            "remote_block_ids": [list(group) for group in block_ids],
            NUM_TOKENS: party.num_tokens,
            "remote_blocks_expiry_time": None,  # decode renews them
            "remote_registration_generation": 0,
            "remote_engine_id": self._instance.address,
            "tp_size": self._tp_size,
            "pp_size": self._pp_size,
            "dcp_size": 1,
            "transfer_mode": "pull" if is_held else "push",
            "send_type": party.send_type.value,
            ONLY_CHOICE: not is_one_of_several(request.request_id),
            UNSALTED: request.cache_salt is None,
            HELD_TOKENS: party.held_tokens,
        }

    # A step

    def build_metadata(self, output: SchedulerOutput) -> P2pConnectorMetadata:
        """Return the orders of one step: all changes since the last one, and the tokens it
        computes."""
        metadata, self._next = self._next, P2pConnectorMetadata()
        metadata.weights = self._weights.name
        metadata.computes = output.total_num_scheduled_tokens > 0
        if not metadata.computes:
            metadata.awaits_grammar = any(map(_awaits_grammar, self._loading.values()))
        self._wanted.take_orders(metadata)
        metadata.ended_sends = [
            dataclasses.replace(item, is_sent_again=item.party.content in self._sent)
            for item in metadata.ended_sends
        ]
        self._order_spills(output)
        metadata.spills = self._pressure.take_orders()
        ended = {item.party.request_id for item in metadata.ended_sends}
        for request_id in output.preempted_req_ids or ():
            sending = self._sending.get(request_id)
            if sending is None and request_id in ended:  # preempted by a reset, then aborted
                metadata.preempted.append(request_id)
            if sending is not None:
                sending.is_planned = False
                metadata.preempted.append(request_id)
                self._pins.release(request_id)  # the workers withdraw before they run this step
        for new in output.scheduled_new_reqs if self._loading else ():
            if (loading := self._loading.get(new.req_id)) is not None:
                note_stage(loading.party.key, "decode scheduled")
        for sending, num_computed in self._scheduled(output):
            if not self._is_of_another(sending, num_computed):
                metadata.sends.append(self._step(sending, num_computed))
        return metadata

    def _is_of_another(self, sending: _Sending, num_computed_tokens: int) -> bool:
        """Whether the prompt's last part must not leave: workers may have computed some of it with
        another adapter than the one that its KV is bound to. Without that part, none is of use."""
        if num_computed_tokens < sending.party.num_tokens:
            return False
        obstacle = self._adapters.obstacle_to(sending.request, sending.adapter)
        if obstacle and not sending.failure:
            request_id, sending.failure = sending.request.request_id, obstacle
            self.untransferred.refuse(request_id, Reason.UNSUPPORTED, obstacle)
        return bool(obstacle)

    def _order_spills(self, output: SchedulerOutput) -> None:
        """Make room for requests that vLLM had no blocks for. It asks nothing about one whose load
        is over, and it reserves what each load in flight wants for its rest."""
        for request_id in self._loaded.keys() & output.num_scheduled_tokens.keys():
            del self._loaded[request_id]
        lacking = max((*self._asked.values(), *self._loaded.values()), default=None)
        self._asked.clear()
        if lacking is not None:
            rests = [item.num_more_blocks for item in self._loading.values() if item.is_open]
            num_spare = self._num_spare_blocks * (1 + len(rests))
            self._pressure.want(lacking + sum(rests) + num_spare)

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[_Sending, int]]:
        """Yield the requests that send after this step, with the tokens computed by then.

        A decode step has no new KV to send. A request that starts or resumes always has, even if
        its whole prompt is in the prefix cache.
        """
        if not self._sending:
            return
        num_scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            sending = self._sending.get(new.req_id)
            if sending is not None:
                sending.tables = [list(table) for table in new.block_ids]
                yield sending, new.num_computed_tokens + num_scheduled[new.req_id]
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            sending = self._sending.get(request_id)
            if sending is None:
                continue
            new_block_ids = cached.new_block_ids[index]
            is_resumed = request_id in cached.resumed_req_ids
            if is_resumed:
                sending.tables = [[] for _ in self._groups]
            if new_block_ids is not None:  # None: the tokens fit the blocks that it has
                for table, added in zip(sending.tables, new_block_ids, strict=True):
                    table.extend(added)
            num_computed = cached.num_computed_tokens[index]
            if is_resumed or num_computed < sending.party.num_tokens:
                yield sending, num_computed + num_scheduled[request_id]

    def _step(self, sending: _Sending, num_computed_tokens: int) -> SendStep:
        party = sending.party
        sending.has_steps = True
        sending.is_planned = num_computed_tokens >= party.num_tokens
        if sending.is_planned:
            self._pin_last_blocks(sending)
        tables = tuple(
            _int64s(group.blocks_of(table, party.num_tokens))
            for group, table in zip(self._groups, sending.tables, strict=True)
        )
        return SendStep(party, tables, min(num_computed_tokens, party.num_tokens))

    def _pin_last_blocks(self, sending: _Sending) -> None:
        """Pin the blocks of windows, and the states, that are sent: vLLM frees them from the next
        token on, or at the end."""
        num_tokens = sending.party.num_tokens
        for group, table in zip(self._groups, sending.tables, strict=True):
            if group.window or group.is_state:
                blocks = group.blocks_of(table, num_tokens)[group.first_block(num_tokens) :]
                self._pins.pin(sending.party.request_id, blocks)

    def workers_reported(self, output: KVConnectorOutput) -> None:
        """Note what has moved, which loads have ended, and which blocks are free, on every rank."""
        told = ours_in(output.kv_connector_stats).data
        self.untransferred.hear(told["counters"])
        if told["refused"]:
            self._warn("peers", self._refused.hear(told["refused"]))
        for request_id in output.finished_sending or ():
            self._pressure.release(request_id)
            self._pins.release(request_id)
        reported = output.finished_recving or set()
        # From now on vLLM takes a new request under such an id: its load must not be cancelled.
        cancelled = self._next.cancelled_loads
        self._next.cancelled_loads = [name for name in cancelled if name not in reported]
        for request_id in reported:
            loading = self._loading.get(request_id)
            if loading is not None and loading.is_open:
                loading.is_open = False
                self._loaded[request_id] = loading.num_more_blocks
                note_stage(loading.party.key, "load known")
                self._wanted.remove(loading.party, was_ordered=True)

    def stashes_ended(self, keys: Iterable[TransferKey]) -> None:
        """Note which stashes have ended on a rank."""
        self._turns.stashes_ended(keys)

    def has_orders_for_idle_workers(self) -> bool:
        """Whether vLLM should step though it has nothing to run: while it is paused, requests come
        and go, and the workers must know what to keep; after a reset, what comes later is new."""
        return self._wanted.has_orders or self._next.is_reset

    def can_wait_for_blocks(self) -> bool:
        """Tell whether vLLM, which lacks blocks for a running request, will have some soon."""
        self._pressure.want()
        return self._pressure.is_easing

    def _on_reset(self, is_empty: bool) -> None:
        if is_empty:
            self._adapters.reset()
        self._drop_others()
        if self._weights.reset(is_empty=is_empty):
            self._rename()

    def _drop_others(self) -> None:
        """Make the workers drop landed KV that no request has claimed, and held KV."""
        self._next.is_reset = True
        self._turns.reset()

    def weights_labelled(self, label: str) -> None:
        """Call the weights by this name from now on. If vLLM's prefix cache may have KV of others,
        empty it before; if that fails, the name stays unknown."""
        if self._weights.is_stale:
            self._empty_cache()
        if self._weights.label(label):
            self._drop_others()
            self._rename()

    def weights_changed(self, reset_encoder_cache: Callable[[], object] | None = None) -> None:
        """Note that vLLM may have other weights now, whatever the setting says: as a reset in
        vain. The next one that is not in vain calls `reset_encoder_cache`, too."""
        self._weights.discard(reset_encoder_cache)
        self._on_reset(False)

    def weights_discarded(self) -> None:
        """Forget the weights' name at the next reset, whatever the setting says."""
        self._weights.discard()

    def adapter_loaded(self, adapter: LoRARequest) -> None:
        """Name an adapter that vLLM's workers have just loaded."""
        self._adapters.note_load(adapter)

    def adapter_failed(self, adapter: LoRARequest) -> None:
        """Forget an adapter that vLLM's workers could not load, or not as a whole."""
        self._adapters.forget(adapter)

    def _rename(self) -> None:
        """Bind to the weights' new name what is not computed yet: it will be, with these weights.
        The workers end what has begun, and a prompt that was to be loaded is computed here."""
        self._tell_of_weights()
        self._next.is_renamed = True
        # What has recalled KV, or may have, is of both weights: the workers refuse its old name.
        recalled = {name for name, loading in self._loading.items() if loading.is_open}
        recalled |= self._loaded.keys()
        for request_id, sending in self._sending.items():
            if not sending.has_steps and request_id not in recalled:
                self._count_sent(sending.party, -1)
                sending.party = self._renamed(sending.party)
                self._count_sent(sending.party, 1)
        for loading in self._loading.values():
            loading.intent = None  # its KV may be of both: it is not stashed
            if not loading.is_decided:
                self._decline(loading)

    def _renamed(self, party: Party) -> Party:
        if party.is_refused:
            return party
        return dataclasses.replace(party, binding=renamed(party.binding, self._weights.name))

    def _count_sent(self, party: Party, number: int) -> None:
        self._sent[party.content] += number
        if not self._sent[party.content]:
            del self._sent[party.content]

    def _num_loaded(self, num_prompt_tokens: int) -> int:
        """How many tokens of a prompt are loaded, those included that are here already.

        vLLM computes the last one again. With a window it must know that before: else it would make
        room only for what the token after it looks at, and could lack the first that this one does.
        A state must not have read that token yet.

        The second and later modules of an MTP draft read more than one token ahead: at the end of
        the prompt they have read tokens that prefill guessed. vLLM computes such positions again
        only behind a rejection of its own, so they are not loaded. A single module's one position
        is the last, which is computed again in any case.
        """
        if self._num_lookahead_tokens > 1:
            return max(0, num_prompt_tokens - self._num_lookahead_tokens)
        is_last_computed = self._has_window or self._has_state
        return num_prompt_tokens - 1 if is_last_computed else num_prompt_tokens

    def _num_blocks(self, num_tokens: int) -> int:
        return sum(group.num_blocks(num_tokens) for group in self._groups)

    def _refuse_unsupported(self, request: Request) -> None:
        if not self._weights.is_known:
            raise InvalidParams(UNKNOWN, Reason.UNKNOWN_WEIGHTS)
        if request.pooling_params is not None or request.prompt_token_ids is None:
            raise InvalidParams("only prompts of tokens are transferred", Reason.UNSUPPORTED)
        if request.prompt_embeds is not None or request.resumable:
            raise InvalidParams(
                "neither prompt embeddings nor streamed prompts are transferred", Reason.UNSUPPORTED
            )
        if request.mm_features and not self._identifies_media:
            raise InvalidParams(
                "media have no identifiers: prefix caching and the cache of media are off",
                Reason.UNSUPPORTED,
            )


def _wanted(
    group: LayerGroup, table: Sequence[int], num_present: int, num_tokens: int
) -> BlockRange:
    """The blocks of a group that must be filled; behind its window vLLM has made none."""
    first = group.num_full_blocks(num_present)
    wanted = _int64s(group.blocks_of(table, num_tokens))
    while group.window and first < len(wanted) and wanted[first] == NULL_BLOCK:
        first += 1
    return BlockRange(first, wanted[first:])


def _awaits_grammar(loading: _Loading) -> bool:
    """Whether vLLM still compiles a request's grammar, and therefore asks nothing about it."""
    grammar = loading.request.structured_output_request if loading.request is not None else None
    return grammar is not None and not grammar.is_grammar_ready


def _is_refused(request: Request) -> bool:
    """Whether vLLM's front end has refused it, and only wants the connector to know (0.32)."""
    return bool(getattr(request, "abort_immediately", False))


def _int64s(block_ids: Sequence[int]) -> Int64s:
    return np.asarray(block_ids, np.int64)
