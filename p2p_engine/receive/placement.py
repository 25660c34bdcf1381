"""Placement: chooses where a granted chunk's bytes land, and accounts for that memory.

A chunk lands straight in the sink's final memory if our own process writes it and none of its
blocks has arrived yet. Otherwise it lands in the arena, where a sender that writes by itself ends
with a completion word. Spills of holds lie in the arena too; like any chunk that no receive waits
for, they may not use the reserve. The engine's lock guards everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError, TransferTooLarge, TransportError
from p2p_engine.memory.arena import LandingArena, Space, round_up
from p2p_engine.memory.jobs import Copier, Job
from p2p_engine.memory.layout import Regions, ask, one_region, packed_pages
from p2p_engine.receive.credit import Credit, Reserve
from p2p_engine.receive.ledger import BLOCKS, Landing, LandingId, Receive
from p2p_engine.transfer import lane_of
from p2p_engine.transports.base import Arrival

JobEnded = Callable[[Job], None]


class Placement:
    """The memory of all landings and spills of one engine, accounted exactly."""

    def __init__(
        self,
        config: EngineConfig,
        arena: LandingArena | None,
        copier: Copier,
        clock: Callable[[], float],
        *,
        receives: bool = True,
    ) -> None:
        """An engine that never `receives` needs no reserve."""
        self.arena = self._arena = arena
        self._credit = Credit(config, clock)
        self._reserve = Reserve(arena) if arena is not None and receives else None
        self._copier = copier
        self._live_block_bytes = 0

    def place(
        self, landing: Landing, receive: Receive | None, quarantined_bytes: int, ended: JobEnded
    ) -> str:
        """Reserve memory for a landing; `ended` is called when our own I/O into it has ended.

        Returns why there is none now, or "". `quarantined_bytes` of the same sender are out of use,
        because it might still write there.

        Raises:
            TransportError: the sender has no data connection.
            TransferTooLarge: there will never be room.
            P2pError: the sink failed.
        """
        if not landing.nbytes:
            return ""  # nothing is written; DONE alone makes it whole
        if not landing.transport.receiver_writes and landing.transport.is_gone(landing.id[0]):
            raise TransportError("the sender has no data connection")
        if receive is None or not _may_go_straight(landing, receive):
            return self._place_in_arena(landing, receive, quarantined_bytes, ended)
        manifest = landing.manifest
        regions = receive.regions(manifest, manifest.first_block, manifest.num_blocks)
        _expect(landing, regions, ended, keep=receive)
        self._live_block_bytes += landing.nbytes
        return ""

    def wait(self, landing: Landing, *, is_awaited: bool) -> float:
        """Remember a denied landing; returns the seconds after which it is to be offered again."""
        return self._credit.wait(landing.id, landing.nbytes, is_awaited=is_awaited)

    def wait_no_more(self, landing_id: LandingId) -> None:
        """Forget a denied chunk that will not be offered again; idempotent."""
        self._credit.discard(landing_id)

    def is_waited_for(self) -> bool:
        """Whether a chunk was denied, and its sender is to offer it again."""
        return self._credit.is_waited_for()

    def sender_lost(self, epoch: int) -> None:
        """Forget the waiting chunks of a sender that is gone."""
        self._credit.forget(epoch)

    def give_back(self, landing: Landing) -> None:
        """Free a landing's memory. Nobody may be able to write into it any more."""
        if landing.word is not None and self._arena is not None:
            self._arena.words.give_back(landing.word)
        if landing.space is not None:
            self._release(landing.space)
            self._credit.give_back(landing.id, landing.space.nbytes)
        else:
            self._live_block_bytes -= landing.nbytes

    def spare(self, sizes: Sequence[int], place: str) -> list[Space]:
        """Reserve a space of each size in one place, for a spill. Returns [] if there is no room
        for all of them beside the reserve."""
        spaces: list[Space] = []
        for nbytes in sizes:
            space = self._spare(nbytes, place)
            if space is None:
                self.take_back(spaces)
                return []
            spaces.append(space)
        return spaces

    def take_back(self, spaces: list[Space]) -> None:
        """Free the spaces of a spill, and empty the list. Nobody may use them any more."""
        while spaces:
            self._release(spaces.pop())

    def _spare(self, nbytes: int, place: str) -> Space | None:
        if self._arena is None or self._credit.is_awaited():
            return None
        if self._reserve is not None and not self._reserve.can_spare(nbytes):
            return None
        return self._arena.reserve(nbytes, (place,))

    def _release(self, space: Space) -> None:
        if self._arena is not None:
            self._arena.release(space)
        if self._reserve is not None:
            self._reserve.relax()

    def is_whole(self, landing: Landing) -> bool:
        """Whether every byte of a landing has arrived."""
        if not landing.nbytes:
            return landing.done_heard
        if landing.transport.receiver_writes:
            return landing.job is not None and landing.job.state == "done"
        if self._arena is None or landing.word is None:
            return False
        return self._arena.words.is_published(landing.word)

    def take_written(self) -> list[Landing]:
        """Return the landings whose completion word has been published since the last call."""
        return self._arena.words.take_published() if self._arena is not None else []

    def awaits_words(self) -> bool:
        """Whether a completion word is lent and not published: only polling finds it."""
        return self._arena is not None and self._arena.words.num_awaited > 0

    def checksum(self, landing: Landing, ended: JobEnded) -> int | None:
        """Return the CRC-32C of a whole landing. None: it is being computed; ask again when `ended`
        is called."""
        job = landing.job
        if job is not None and (job.checksum is not None or landing.space is None):
            return job.checksum
        if landing.space is None or self._arena is None:
            return None
        if landing.checking is None:
            regions = one_region(self._arena.address(landing.space), landing.nbytes)
            landing.checking = self._copier.check(
                regions.addresses,
                regions.lengths,
                lane=lane_of(landing.content[0]),
                tag=ended,
                keep=self._arena,
            )
        return landing.checking.checksum

    def packed(self, landing: Landing, first: int, num: int) -> Regions | None:
        """Return where these blocks lie in the arena; None if they are in their final memory."""
        if landing.space is None or self._arena is None:
            return None
        base = self._arena.address(landing.space)
        return packed_pages(base, landing.manifest, first, num)

    def word_offset(self, landing: Landing) -> int:
        """Return the offset at which the sender writes the completion word; 0: it writes none."""
        if landing.word is None or self._arena is None:
            return 0
        return self._arena.words.offset(landing.word)

    def live_bytes(self) -> dict[str, int]:
        """Return the bytes that are reserved now, by place."""
        arena = dict(self._arena.live_bytes) if self._arena is not None else {}
        if self._reserve is not None and self._reserve.place is not None:
            arena[self._reserve.place] -= self._reserve.nbytes  # reserved, but not in use
        return {BLOCKS: self._live_block_bytes, **arena}

    def _take_space(
        self, arena: LandingArena, landing: Landing, size: int, *, is_awaited: bool
    ) -> str:
        """Reserve a landing's space; returns why it may have none, or "". Only a landing that a
        receive waits for may use the reserve."""
        reserve = self._reserve
        spare = reserve.nbytes if reserve is not None and is_awaited else 0
        refusal = self._credit.refusal(
            landing.id, size, arena.free_bytes + spare, is_awaited=is_awaited
        )
        if refusal or reserve is None:
            return refusal
        if is_awaited:
            landing.space = reserve.reserve(size)
        elif not reserve.can_spare(size):
            return "the rest of buffer and pool is kept for chunks that a receive waits for"
        else:
            landing.space = arena.reserve(size)
        return ""

    def _place_in_arena(
        self, landing: Landing, receive: Receive | None, quarantined_bytes: int, ended: JobEnded
    ) -> str:
        arena, size = self._arena, round_up(landing.nbytes)
        needs_it = not landing.transport.scatters or (
            receive is not None and receive.has_delivered(landing.manifest)
        )
        if needs_it and (arena is None or not arena.fits(size)):
            text = f"a chunk of {landing.nbytes} bytes fits neither the buffer nor the pool"
            raise TransferTooLarge(text)
        if arena is None or quarantined_bytes > sum(arena.budgets.values()) / 4:
            return "no landing memory, or too much of it is in quarantine"
        refusal = self._take_space(arena, landing, size, is_awaited=receive is not None)
        if landing.space is None:
            return refusal or "buffer and pool are full"
        if not landing.transport.receiver_writes:
            if not arena.is_touched(landing.space):
                arena.release(landing.space)
                progress = arena.arena.report()["prefault"]
                return f"landing memory is still being taken from the system: {progress}"
            landing.word = arena.words.take(landing, landing.trailer)
            if landing.word is None:
                arena.release(landing.space)
                return "all completion words are lent"
            self._credit.take(landing.id, size)
            return ""
        regions = one_region(arena.address(landing.space), landing.nbytes)
        try:
            _expect(landing, regions, ended, keep=arena)
        except P2pError:
            arena.release(landing.space)
            raise
        self._credit.take(landing.id, size)
        return ""


def _may_go_straight(landing: Landing, receive: Receive) -> bool:
    """Whether the bytes may land in final memory. A stream that is cut off ends in zeros, so this
    is allowed only if no block has arrived yet and no other landing writes there."""
    touched = receive.has_delivered(landing.manifest) or receive.writers_of(landing.manifest)
    return landing.transport.scatters and not touched


def _expect(landing: Landing, regions: Regions, ended: JobEnded, *, keep: object) -> None:
    arrival = Arrival(*landing.id, regions.coalesced(), landing.checked, tag=ended, keep=keep)
    landing.job = ask(lambda: landing.transport.expect(arrival))
