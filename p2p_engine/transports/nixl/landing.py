"""NixlLanding: the landing memory as NIXL sees it, and its fence.

Nothing that a sender says, and no end of its connection, proves that bytes of a write that failed
are not still on their way: in a socket of ours, or in the network. The end of our own agent does:
its sockets and queue pairs are gone when it is, and with them the registration of our memory. So a
fence closes the agent and makes a new one. All senders connect again then; it happens only if one
has been lost in the middle of a write.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import LandingArena
from p2p_engine.transports.nixl.library import NixlAgent
from p2p_engine.transports.nixl.sending import PAUSE_SECONDS, WORD, RemoteArena, mark_of
from p2p_engine.transports.proof import PATTERN_BYTES, make_pattern

logger = logging.getLogger(__name__)

FENCE_SECONDS = 5.0  # for close to wait for a fence
NOTICE_SECONDS = 2.0  # for a notification, when its sender has said that it is on its way


class NixlLanding:
    """The receiving agent of one engine."""

    def __init__(self, memory: LandingArena, make_agent: Callable[[], NixlAgent]) -> None:
        """Register the memory. Blocks.

        Raises:
            TransportError: it cannot be registered.
        """
        self._memory = memory
        self._make_agent = make_agent
        self._come: collections.deque[bytes] = collections.deque()  # notifications
        self._mark = 0  # of the proof whose notification came last
        self._thread: threading.Thread | None = None
        self._agent: NixlAgent | None = self._register()

    @property
    def is_fencing(self) -> bool:
        """Whether a fence is under way."""
        return self._thread is not None

    def introduction(self) -> RemoteArena | None:
        """Return what a sender needs; None if the agent could not be made again.

        Raises:
            TransportError: the library does not tell.
        """
        if self._agent is None:
            return None
        arena, proof_offset = self._memory.arena, self._memory.proof_offset
        return RemoteArena(self._agent.metadata(), arena.address, arena.nbytes, proof_offset)

    def look(self) -> None:
        """Publish the words that senders have notified us of. Under the engine's lock."""
        self._collect()
        while self._come:
            self._memory.words.publish(*WORD.unpack(self._come.popleft()))

    def has_arrived(self, seed: bytes) -> bool:
        """Whether a sender's notification says in time that it has written a seed's pattern, and
        the pattern lies in our memory. In any thread; blocks.

        Raises:
            TransportError: nothing can be received any more.
        """
        memory, until = self._memory, time.monotonic() + NOTICE_SECONDS
        while self._mark != mark_of(seed):
            if self._agent is None:
                raise TransportError("nothing can be received any more")
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE_SECONDS)
            self._collect()
        pattern = make_pattern(seed).tobytes()
        with memory.arena.view(memory.proof_offset, PATTERN_BYTES) as found:
            return bool(found == pattern)

    def fence(self, fenced: Callable[[], None]) -> None:
        """End all that senders have on its way, in a thread, which calls `fenced` then."""

        def renew() -> None:
            restore_affinity()
            self._end_agent()
            try:
                self._agent = self._register()
            except TransportError as error:
                logger.error("nixl: nothing can be received any more: %s", str(error))
            fenced()

        self._thread = threading.Thread(target=renew, name="p2p-nixl-fence", daemon=True)
        self._thread.start()

    def fence_ended(self) -> None:
        """Note that `fenced` was called."""
        self._thread = None

    def close(self) -> bool:
        """End all writes into the memory; idempotent. Returns False if a fence does not end."""
        if self._thread is not None:
            self._thread.join(FENCE_SECONDS)
            if self._thread.is_alive():
                return False
        self._end_agent()
        return True

    def _register(self) -> NixlAgent:
        agent = self._make_agent()
        try:
            agent.register(self._memory.arena.address, self._memory.arena.nbytes)
        except TransportError:
            agent.close()
            raise
        return agent

    def _end_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            self._take(agent.close())

    def _collect(self) -> None:
        agent = self._agent
        if agent is not None:
            self._take(agent.notifications())

    def _take(self, come: list[bytes]) -> None:
        for message in come:
            if len(message) != WORD.size:
                continue
            offset, value = WORD.unpack(message)
            if offset == self._memory.proof_offset:
                self._mark = value or self._mark  # 0: the first half
            else:
                self._come.append(message)
