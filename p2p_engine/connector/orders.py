"""Orders: the scheduler half's instructions to all worker halves for one step.

Plain data, pickled once per step; needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from p2p_engine.config import SendMode
from p2p_engine.wire.messages import ContentKey, TransferKey

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Party:
    """One request's part in a transfer: its name, its content and its peer.

    `peer` is the other instance's address; None if a producer was not told it. `held_tokens` end
    with a block, on the side that sends. Without a binding, nothing that comes under the name is of
    use: vLLM's front end has refused the request, and passes on nothing of its prompt, or prefill's
    prompt was longer.
    """

    request_id: str
    key: TransferKey
    peer: str | None
    binding: bytes
    send_type: SendMode
    num_tokens: int  # whose KV is sent
    held_tokens: int = 0  # of its first ones the KV is pushed only if it is asked for
    is_recalled: bool = False  # its peer has said that it has stashed it

    @property
    def is_refused(self) -> bool:
        """Whether nothing that comes under the name is of use."""
        return not self.binding

    @property
    def content(self) -> ContentKey:
        """The content of the transfer, over all groups."""
        return self.key, self.binding

    def key_of(self, group: int) -> TransferKey:
        """Return the transfer key of one group's KV."""
        return msgspec.structs.replace(self.key, group=group)


@dataclass(frozen=True)
class BlockRange:
    """A request's blocks in one group, from `first_block` to the end of what is loaded."""

    first_block: int
    block_ids: Int64s


@dataclass(frozen=True)
class Load:
    """Fill these blocks, for each group; with a `refusal`, report them as not loaded."""

    party: Party
    ranges: tuple[BlockRange, ...]
    refusal: str = ""


@dataclass(frozen=True)
class SendStep:
    """After this step `num_computed_tokens` of the prompt lie in these whole tables, by group.

    Behind a group's window its table may name blocks that are no longer the request's, or none.
    """

    party: Party
    tables: tuple[Int64s, ...]
    num_computed_tokens: int


@dataclass(frozen=True)
class EndedSend:
    """The request has finished. With `failure`, its KV will not be completed: the peer is told,
    unless the same content `is_sent_again` by another request.

    If `is_held`, vLLM keeps its blocks until every rank has reported it, exactly once.
    """

    party: Party
    failure: str | None
    is_held: bool
    is_sent_again: bool = False


@dataclass(frozen=True)
class Stash:
    """The request has finished: copy these whole tables, by group, for its session's next turn.
    `marks` are the bindings of what a peer may pull of it, by length in tokens."""

    party: Party
    tables: tuple[Int64s, ...]
    marks: Mapping[int, bytes]
    seconds: float


@dataclass
class StepOrders:
    """One step's orders from the scheduler half to every worker half."""

    number: int = 0  # of the step; vLLM's first is 1
    preempted: list[str] = field(default_factory=list)
    sends: list[SendStep] = field(default_factory=list)
    ended_sends: list[EndedSend] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stashes: list[Stash] = field(default_factory=list)
    spills: list[str] = field(default_factory=list)  # held requests whose blocks vLLM needs
    cancelled_loads: list[str] = field(default_factory=list)
    unwanted: list[Party] = field(default_factory=list)  # KV that no request here will load
    kept: list[Party] = field(default_factory=list)  # KV that will be loaded, later
    dropped: list[Party] = field(default_factory=list)  # KV that is no longer kept
    weights: str = ""  # the name of those that compute from this step on
    is_renamed: bool = False  # since the last step, perhaps to the same name again
    is_reset: bool = False  # vLLM reset its caches: landed and held KV is out of date
    computes: bool = False  # the step computes tokens
    awaits_grammar: bool = False  # a request that is to load does: nothing need run meanwhile
