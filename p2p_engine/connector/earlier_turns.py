"""EarlierTurns: a session's KV between two of its turns.

The instance that has decoded an answer stashes the KV of prompt and answer. On the next turn, the
one that prefills recalls it as far as its own prompt begins with the same tokens, and computes the
rest. It compares digests of the beginnings, and the holder compares the one that is pulled. The
scheduler half's part: it moves no bytes and never blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import RequestStatus

from p2p_engine.config import SendMode
from p2p_engine.connector.adapters import Adapters
from p2p_engine.connector.binding import bindings_at
from p2p_engine.connector.intent import Earlier, stash_key
from p2p_engine.connector.orders import Party, Stash
from p2p_engine.connector.weights import Weights
from p2p_engine.wire.messages import TransferKey

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from p2p_engine.connector.layer_group import LayerGroup
    from p2p_engine.peers.directory import Directory
    from p2p_engine.peers.stash_notes import Recalling

FINISHED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class EarlierTurns:
    """The stashes that are made here, and the questions for those of other instances."""

    def __init__(
        self,
        weights: Weights,
        adapters: Adapters,
        groups: Sequence[LayerGroup],
        stash_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `stash_seconds` of 0 nothing is stashed or recalled."""
        self.directory: Directory | None = None
        self._weights, self._adapters = weights, adapters
        self._groups = groups
        self._stash_seconds = stash_seconds
        self._clock = clock
        self._asking: dict[str, tuple[Earlier, Recalling]] = {}  # by request

    def __len__(self) -> int:
        return len(self._asking)

    # On prefill

    def recall(self, request: Request, earlier: Earlier | None) -> None:
        """Ask where the KV of an earlier turn can be cut."""
        if earlier is None or self.directory is None or not self._can_recall(request):
            return
        asking = self.directory.recall(earlier.peer, earlier.key)
        self._asking[request.request_id] = earlier, asking

    def _can_recall(self, request: Request) -> bool:
        # A hash of media stands for the whole prompt only.
        return self._stash_seconds > 0 and not request.mm_features

    def is_asking(self, request_id: str) -> bool:
        """Tell whether the answer to a request's question may still come."""
        _, asking = self._asking.get(request_id, (None, None))
        return asking is not None and asking.marks is None and self._clock() < asking.deadline

    def take_found(self, request: Request) -> Party | None:
        """Return the part in the transfer that brings the earlier turn's KV; None if there is none.
        A request is answered once."""
        earlier, asking = self._asking.pop(request.request_id, (None, None))
        if earlier is None or asking is None:
            return None
        told = dict(asking.marks or ())
        ends = [end for end in told if 0 < end <= request.num_prompt_tokens]
        ours = bindings_at(request, self._weights.name, self._adapters.name_of(request), ends)
        shared = max((end for end in ends if ours[end] == told[end]), default=0)
        if not shared:
            return None
        return Party(
            request.request_id, earlier.key, earlier.peer, ours[shared], SendMode.GET, shared,
            is_recalled=True,
        )  # fmt: skip

    def forget(self, request_id: str) -> None:
        """Forget the question of a request that has ended; idempotent."""
        self._asking.pop(request_id, None)

    # On decode

    def stash(
        self,
        request: Request,
        key: TransferKey,
        tables: Sequence[Sequence[int]],
        *,
        is_salted: bool,
    ) -> Stash | None:
        """Return the order to stash what a finished request leaves; None if there is nothing."""
        unit = math.lcm(*(group.block_size for group in self._groups))
        # The last token was sampled, and not yet computed.
        num_computed = min(request.num_tokens - 1, request.num_computed_tokens)
        if not self._can_recall(request) or request.status not in FINISHED_WELL:
            return None
        if self._adapters.obstacle_to(request):  # since the request came
            return None
        ends = [end * unit for end in cuts(num_computed // unit, request.num_prompt_tokens // unit)]
        if not ends:
            return None
        adapter = self._adapters.name_of(request)
        found = bindings_at(request, self._weights.name, adapter, ends, is_salted=is_salted)
        key, end = stash_key(key), ends[-1]
        party = Party(request.request_id, key, None, found[end], SendMode.GET, end)
        whole = tuple(
            np.asarray(table[: group.num_blocks(end)], np.int64)
            for group, table in zip(self._groups, tables, strict=True)
        )
        if self.directory is not None:
            self.directory.stashed.note(key, list(found.items()), self._stash_seconds)
        return Stash(party, whole, found, self._stash_seconds)

    def stashes_ended(self, keys: Iterable[TransferKey]) -> None:
        """Forget stashes that have ended on a rank, however they did: all ranks' parts are pulled
        together."""
        if self.directory is not None:
            for key in keys:
                self.directory.stashed.drop(key)

    def reset(self) -> None:
        """Forget what is stashed."""
        if self.directory is not None:
            self.directory.stashed.clear()


def cuts(end: int, prompt_end: int) -> list[int]:
    """Return where a stash of so many blocks can be cut, in order: at its end, at its prompt's end,
    and at distances from its end that double. What is shared is lost over at most twice the
    distance at which two prompts differ."""
    steps = {end - (1 << power) for power in range(end.bit_length())}
    return sorted(cut for cut in {*steps, end, prompt_end} if 0 < cut <= end)
