"""Awaited: what this engine waits for from a named peer. It pulls (GET), and it notices that the
peer is gone, refuses, or no longer has it. The engine's lock guards everything here.

A peer is an engine, or those ranks of an instance that the plan names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError, PeerLost, PeerRefused, RemoteProtocolError
from p2p_engine.holders import givers, keepers
from p2p_engine.instances import Instances
from p2p_engine.messages import CacheSpec, ContentKey, Release, TransferKey, Want
from p2p_engine.peers import InstanceAddress, Link, Links, PeerAddress
from p2p_engine.recent import Recent
from p2p_engine.transfer import Transfer

MAX_ACCUSATIONS = 4096


@dataclass(eq=False)
class Asked:
    """One rank that sends what is expected."""

    link: Link
    offered: bool = False
    resend_at: float = 0.0
    num_wants: int = 0


@dataclass(eq=False)
class Expected:
    """One receive whose sender is known; `asked` follows when its directory has answered.

    So do the `idle` ranks there, which hold it too, or what we have no place for, for nobody.
    """

    transfer: Transfer
    binding: bytes
    pull: bool
    asked: list[Asked] = field(default_factory=list)
    idle: list[tuple[TransferKey, PeerAddress]] = field(default_factory=list)

    @property
    def epochs(self) -> set[int]:
        """Of those who send it; 0: of one that has not been met yet."""
        return {asked.link.epoch for asked in self.asked}


@dataclass(frozen=True)
class Accusation:
    """An ABANDON that counts if its speaker turns out to be who sends the key."""

    error: P2pError
    until: float


class Awaited:
    """All receives whose sender is known."""

    def __init__(
        self,
        config: EngineConfig,
        links: Links,
        instances: Instances,
        spec: CacheSpec | None,
        clock: Callable[[], float],
        *,
        fail: Callable[[TransferKey, P2pError], None],
        bereave: Callable[[TransferKey, P2pError], None],
        abandoned: Callable[[TransferKey, int, P2pError], None],
        introduced: Callable[[TransferKey], None],
    ) -> None:
        """`fail(key, error)` ends the receives of a key, `bereave` unless all of it is here.
        `abandoned(key, epoch, error)` takes an ABANDON of a key that is awaited from no named peer;
        `introduced(key)` is told when the epoch of such a peer becomes known."""
        self._config = config
        self._links = links
        self._instances = instances
        self._spec = spec
        self._clock = clock
        self._fail = fail
        self._bereave = bereave
        self._abandoned = abandoned
        self._introduced = introduced
        self._expected: dict[TransferKey, Expected] = {}
        self._to_release: list[tuple[Link, ContentKey]] = []
        self._accused: Recent[tuple[TransferKey, int], Accusation] = Recent(MAX_ACCUSATIONS)

    def add(
        self,
        transfer: Transfer,
        peer: PeerAddress | InstanceAddress,
        binding: bytes,
        *,
        pull: bool,
    ) -> None:
        """Watch the peer until the transfer has ended; with `pull`, ask it for the key, without,
        ask it when nothing has come for a while: it may hold what we take for pushed."""
        item = Expected(transfer, binding, pull)
        self._expected[transfer.key] = item
        if isinstance(peer, PeerAddress):
            self._watch(item, [peer])
        else:
            self._instances.ask(peer, partial(self._found, item, peer))

    def release(self, content: ContentKey, peer: PeerAddress | InstanceAddress) -> None:
        """Tell the holders once, soon, that nothing is wanted; a lease covers a lost message."""
        if isinstance(peer, PeerAddress):
            self._release(content, peer)
            return

        def found(answer: CacheSpec | P2pError) -> None:
            key, binding = content
            sources = [(key, rank) for rank in givers(self._spec, key, answer)]
            for name, rank in [*sources, *keepers(self._spec, key, answer)]:
                self._release((name, binding), peer.rank(rank))

        self._instances.ask(peer, found)

    def on_offer(self, key: TransferKey, epoch: int) -> None:
        """A peer has answered."""
        item = self._expected.get(key)
        for asked in item.asked if item is not None else ():
            asked.offered = asked.offered or asked.link.epoch == epoch

    def is_from(self, key: TransferKey, epoch: int) -> bool:
        """Whether a key is awaited from the engine of this epoch."""
        item = self._expected.get(key)
        return item is not None and epoch in item.epochs

    def on_gone(self, key: TransferKey, epoch: int, error: P2pError) -> None:
        """A peer does not have it.

        Raises:
            RemoteProtocolError: it was not asked for it.
        """
        item = self._expected.get(key)
        if item is None:
            return  # it has ended by now
        if epoch not in item.epochs:
            raise RemoteProtocolError(f"GONE of {key} from {epoch:x}, which was not asked for it")
        del self._expected[key]
        self._fail(key, error)
        self._let_go((key, item.binding), item)

    def on_abandon(self, key: TransferKey, epoch: int, error: P2pError) -> None:
        """A peer will not complete a key. It is believed if the key is awaited from it, or from
        nobody by name. Until it is known who that is, it is remembered.

        Raises:
            RemoteProtocolError: the key is awaited from another peer, or another one sends it.
        """
        item = self._expected.get(key)
        if item is None:
            self._abandoned(key, epoch, error)
        elif epoch in item.epochs:
            self._fail(key, error)
            return
        elif item.epochs and 0 not in item.epochs:
            raise RemoteProtocolError(f"ABANDON of {key} from {epoch:x}, which does not send it")
        until = self._clock() + self._config.lease_seconds
        self._accused.put((key, epoch), Accusation(error, until))

    def link_ready(self, link: Link) -> None:
        """Ask what could not be asked before."""
        for item in self._expected.values():
            for asked in item.asked:
                if asked.link is link:
                    self._meet(item, asked)
        for _, content in self._take_releases(link):
            self._links.send(link, Release, *content)

    def link_closed(self, link: Link) -> None:
        """Nothing will come from there any more."""
        self._take_releases(link)
        for key, item in list(self._expected.items()):
            if any(asked.link is link for asked in item.asked):
                del self._expected[key]
                if not item.transfer.done:
                    self._bereave(key, link.error or PeerLost(f"peer {link.target} is gone"))

    def tick(self, now: float) -> None:
        """Ask again; let go of what has ended."""
        for key, item in list(self._expected.items()):
            if item.transfer.done:
                del self._expected[key]
                self._let_go((key, item.binding), item)
                continue
            for asked in item.asked:
                if now >= asked.resend_at:
                    self._ask(item, asked, now)

    def _found(self, item: Expected, peer: InstanceAddress, answer: CacheSpec | P2pError) -> None:
        key = item.transfer.key
        if self._expected.get(key) is not item or item.transfer.done:
            return
        if isinstance(answer, P2pError):
            del self._expected[key]
            self._fail(key, answer)
            return
        item.idle = [(name, peer.rank(rank)) for name, rank in keepers(self._spec, key, answer)]
        sources = givers(self._spec, key, answer)
        self._watch(item, [peer.rank(rank) for rank in sources])
        if not sources:
            self._fail(key, PeerRefused(f"peer {peer}: there are no such layers there"))

    def _watch(self, item: Expected, peers: list[PeerAddress]) -> None:
        patient_until = 0.0 if item.pull else self._clock() + self._config.retry_seconds
        item.asked = [
            Asked(self._links.get(peer, data=False), resend_at=patient_until) for peer in peers
        ]
        for asked in item.asked:
            self._meet(item, asked)

    def _meet(self, item: Expected, asked: Asked) -> None:
        """Ask one who sends it, if it is there; and hear what it has said before it was known."""
        if not asked.link.ready:
            return
        key = item.transfer.key
        self._introduced(key)
        accusation = self._accused.pop((key, asked.link.epoch))
        if accusation is not None and accusation.until > self._clock():
            self._fail(key, accusation.error)
        else:
            self._ask(item, asked, self._clock())

    def _let_go(self, content: ContentKey, item: Expected) -> None:
        for key, peer in item.idle if item.pull else ():
            self._release((key, item.binding), peer)
        for asked in item.asked:
            if item.transfer.error is not None and asked.link.ready and asked.num_wants:
                self._links.send(asked.link, Release, *content)

    def _release(self, content: ContentKey, peer: PeerAddress) -> None:
        link = self._links.get(peer, data=False)
        if link.ready:
            self._links.send(link, Release, *content)
        else:
            self._to_release.append((link, content))

    def _take_releases(self, link: Link) -> list[tuple[Link, ContentKey]]:
        taken = [item for item in self._to_release if item[0] is link]
        self._to_release = [item for item in self._to_release if item[0] is not link]
        return taken

    def _ask(self, item: Expected, asked: Asked, now: float) -> None:
        if asked.offered or not asked.link.ready or now < asked.resend_at:
            return
        asked.resend_at = now + self._pause(item, asked)
        asked.num_wants += 1
        self._links.send(asked.link, Want, item.transfer.key, item.binding, not item.pull)

    def _pause(self, item: Expected, asked: Asked) -> float:
        """How soon to ask again; what is pushed comes by itself, so more and more seldom."""
        pause = self._config.retry_seconds
        if item.pull:
            return pause
        return max(pause, min(pause * 2.0**asked.num_wants, asked.link.lease / 4))
