"""Fan-out: makes one shipment to each rank of an instance that the plan names.

No shipment starts before the instance's directory has answered. The engine's lock guards everything
here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from p2p_engine.errors import P2pError, TransferCancelled
from p2p_engine.health import Counters
from p2p_engine.memory.jobs import Moment
from p2p_engine.memory.layout import Source
from p2p_engine.memory.plan import takers
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.peers.locator import Locator
from p2p_engine.send.sender import Sender
from p2p_engine.transfer import Transfer, TransferGroup
from p2p_engine.wire.messages import MAX_LAYERS, CacheSpec, ContentKey, TransferKey


@dataclass(frozen=True)
class Delivery:
    """One source on its way to an instance."""

    key: TransferKey
    instance: InstanceAddress
    source: Source
    binding: bytes
    deadline: float
    generation: int
    transfer: TransferGroup
    ready_layers: ReadyLayers
    by_layer: bool


class Fanout:
    """The deliveries to instances, on top of the sender."""

    def __init__(
        self,
        changed: threading.Condition,
        locator: Locator,
        sender: Sender,
        spec: CacheSpec | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._changed = changed
        self._locator = locator
        self._sender = sender
        self._spec = spec
        self._counters = counters
        self._clock = clock
        self._waiting: dict[TransferGroup, Delivery] = {}  # for a directory

    def send(
        self,
        key: TransferKey,
        instance: InstanceAddress,
        source: Source,
        binding: bytes,
        timeout: float,
        *,
        ready_layers: ReadyLayers,
        generation: int = 0,
        by_layer: bool = False,
    ) -> TransferGroup:
        """Queue a shipment to each rank that needs some of the source; never blocks.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        transfer = TransferGroup(key, 0, self._changed, self._cancel)
        delivery = Delivery(
            key, instance, source, binding, self._clock() + timeout, generation, transfer,
            ready_layers, by_layer,
        )  # fmt: skip
        self._waiting[transfer] = delivery
        try:
            self._locator.ask(instance, lambda answer: self._dispatch(delivery, answer))
        except P2pError as error:
            del self._waiting[transfer]
            self._end(transfer, error)
            raise
        return transfer

    def mark_ready(
        self,
        transfer: TransferGroup,
        moments: tuple[Moment, ...] = (),
        num_layers: int = MAX_LAYERS,
    ) -> None:
        """Let the bytes of the first layers move: they are valid from now on, or after all
        `moments`."""
        delivery = self._waiting.get(transfer)
        if delivery is not None:
            delivery.ready_layers.mark(num_layers, moments)
        for member in transfer.members or ():
            self._sender.mark_ready(member, moments, num_layers)

    def abandon(
        self, content: ContentKey, instance: InstanceAddress, reason: str, generation: int = 0
    ) -> None:
        """Tell each rank that needs some of this content that it will not be completed."""

        def tell(answer: CacheSpec | P2pError) -> None:
            for rank in takers(self._spec, content[0], answer):
                self._sender.abandon(content, instance.rank(rank), reason, generation)

        self._locator.ask(instance, tell)

    def num_open(self) -> int:
        """Return how many deliveries wait for a directory."""
        return len(self._waiting)

    def _dispatch(self, delivery: Delivery, answer: CacheSpec | P2pError) -> None:
        transfer = delivery.transfer
        if self._waiting.pop(transfer, None) is None:
            return  # cancelled meanwhile
        if isinstance(answer, P2pError):
            self._end(transfer, answer)
            return
        timeout = delivery.deadline - self._clock()
        shipments = [
            self._sender.send(
                delivery.key,
                delivery.instance.rank(rank),
                delivery.source,
                delivery.binding,
                timeout,
                ready_layers=delivery.ready_layers.copy(),
                generation=delivery.generation,
                by_layer=delivery.by_layer,
            )
            for rank in takers(self._spec, delivery.key, answer)
        ]
        transfer.join([shipment.transfer for shipment in shipments])

    def _end(self, transfer: TransferGroup, error: P2pError) -> None:
        """End a delivery of which no shipment was made: the sender counts shipments only."""
        self._counters.count("sent", error)
        transfer.end(error)

    def _cancel(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            if not isinstance(transfer, TransferGroup):
                return
            if self._waiting.pop(transfer, None) is not None:
                text = f"{transfer.key} was withdrawn: {reason or 'no reason given'}"
                self._end(transfer, TransferCancelled(text))
            for member in transfer.members or ():
                member.cancel(reason)
