"""NixlTransport: one-sided writes between hosts, through NIXL over UCX.

Beside NIXL's own connections, each sender keeps one TCP connection to the receiver. It begins with
the token of a WELCOME; only then the receiver introduces its memory. Its end and what is said on it
prove when a sender has stopped:

    FAREWELL, then the end    nothing of the sender is on its way
    the end without FAREWELL  something may be; the sender is gone only after a fence (landing.py)

So a sender's word that one write has ended (CANCELLED, or the next attempt) counts only if its
connection is INTACT after that: a write that has failed breaks it first.

A new connection carries KV only after a proof that what is written there arrives (`proof.py`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import struct
from collections.abc import Callable

from mempool import Mover
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.memory.arena import LandingArena
from p2p_engine.transports.base import (
    Connected,
    ConnectionInterrupted,
    Endpoint,
    SenderWrites,
)
from p2p_engine.transports.handshake import (
    ACCEPTED,
    PREAMBLE,
    Dials,
    Door,
    Tokens,
    dial,
    end_by_silence,
    listen,
)
from p2p_engine.transports.nixl.landing import NixlLanding
from p2p_engine.transports.nixl.library import NixlAgent, load_nixl
from p2p_engine.transports.nixl.proving import PROOF_SECONDS, Proving
from p2p_engine.transports.nixl.sending import (
    FAREWELL,
    INTACT,
    PROBE,
    NixlChannel,
    NixlWriter,
    RemoteArena,
    heard,
)
from p2p_engine.transports.proof import ProofDesk
from p2p_engine.wire.addresses import family_of, join_address, split_address

logger = logging.getLogger(__name__)

# The arena's address and bytes, where in it proofs are written, and the metadata's bytes.
INTRODUCTION = struct.Struct("<QQQI")
MAX_METADATA_BYTES = 48 << 10  # with one UCX device it has 300 bytes
SOCKET_BUFFER_BYTES = 256 << 10  # an introduction fits
MAX_LOST = 256  # senders; then a fence comes without need
PATIENCE_SECONDS = 10.0  # a receiver may have to fence an older connection first
CLOSE_SECONDS = 2.0


class Introducing:
    """A sender's side, after its token was accepted: it reads the introduction."""

    def __init__(
        self,
        control: ControlPlane,
        connection: socket.socket,
        told: Callable[[RemoteArena | TransportError], None],
    ) -> None:
        """`told` is called once; on success, the connection is its own."""
        self._control = control
        self._connection = connection
        self._told = told
        self._received = bytearray()
        self._missing = INTRODUCTION.size
        control.watch(connection.fileno(), self._read)

    def close(self) -> None:
        """Close the connection and tell nothing."""
        self._control.unwatch(self._connection.fileno())
        self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(self._missing)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail(ConnectionInterrupted("the peer closed the connection"))
            return
        self._received += data
        self._missing -= len(data)
        if self._missing:
            return
        base, nbytes, proof_offset, metadata_bytes = INTRODUCTION.unpack_from(self._received)
        self._missing = INTRODUCTION.size + metadata_bytes - len(self._received)
        if not 0 < metadata_bytes <= MAX_METADATA_BYTES:
            self._fail(TransportError(f"the peer's metadata has {metadata_bytes} bytes"))
        elif not self._missing:
            self._control.unwatch(self._connection.fileno())
            metadata = bytes(self._received[INTRODUCTION.size :])
            self._told(RemoteArena(metadata, base, nbytes, proof_offset))

    def _fail(self, error: TransportError) -> None:
        self.close()
        self._told(error)


class NixlTransport(SenderWrites):
    """One-sided writes between hosts; the receiver's processor takes no part with RDMA."""

    name = "nixl"
    checks = True

    def __init__(
        self,
        mover: Mover,
        landing: LandingArena | None,
        control: ControlPlane,
        epoch: int,
        host: str,
        silence_seconds: float,
        ucx_tls: str,
    ) -> None:
        """Load NIXL and register the landing memory. A connection breaks when the other host has
        acknowledged nothing for `silence_seconds`. UCX may use the transports `ucx_tls`. Blocks.

        Raises:
            ConfigError: NIXL or its devices cannot be used; says why.
            OSError: host cannot be bound.
        """
        self._control = control
        self._epoch = epoch
        self._silence_seconds = silence_seconds
        library = load_nixl()
        if "tcp" in ucx_tls.split(","):
            logger.warning(
                "nixl: with UCX_TLS=%s, whoever reaches UCX's ports can write to any memory of "
                "this process", ucx_tls,
            )  # fmt: skip
        self._mover = mover
        self._tokens = Tokens()
        self._dials = Dials()
        self._introducing: set[Introducing] = set()
        self._proving: set[Proving] = set()
        self._writer = NixlWriter(mover, lambda: NixlAgent(library, ucx_tls, progresses=False))
        self._landing: NixlLanding | None = None
        self._desk: ProofDesk | None = None
        self._senders: dict[int, socket.socket] = {}
        self._parted: set[int] = set()  # of these, those that have said farewell
        self._lost: set[int] = set()  # ended without it
        self._waiting: dict[int, socket.socket] = {}  # for the proof that their last one has ended
        self._asked: dict[int, collections.deque[Callable[[], None]]] = {}  # by PROBE
        if landing is not None:
            try:
                make = lambda: NixlAgent(library, ucx_tls, progresses=True)  # noqa: E731
                self._landing = NixlLanding(landing, make)
            except TransportError as error:
                raise ConfigError(f"transports: 'nixl' cannot be used here: {error}") from error
            self._desk = ProofDesk(control, self._landing.has_arrived, self.is_gone)
            listener = listen(family_of(host), (host, 0))
            self._address = join_address(host, listener.getsockname()[1])
            self._door = Door(control, listener, self._tokens, self._admit)
        control.watch_time(self._look)

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return the address and a token; the memory is introduced on that connection."""
        if self._landing is None:
            return None
        # An engine that proves nothing knows another name, and takes the next transport.
        return {"proven_address": self._address, "token": self._tokens.make(source_epoch)}

    def patience(self, endpoint: Endpoint) -> float:
        """Return how long the peer may need to prove the end of an older connection, and that our
        writes arrive."""
        return PATIENCE_SECONDS + PROOF_SECONDS

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Dial, read the introduction, then let the writer connect NIXL."""
        try:
            host, port = split_address(endpoint["proven_address"])
            preamble = PREAMBLE.pack(self._epoch, bytes.fromhex(endpoint["token"]))
        except (KeyError, ValueError, struct.error) as error:
            connected(TransportError(f"connect: bad nixl endpoint: {error!r}"))
            return

        def answered(connection: socket.socket, _: list[int]) -> None:
            def told(arena: RemoteArena | TransportError) -> None:
                self._introducing.discard(introducing)
                if isinstance(arena, TransportError):
                    connected(arena)
                else:
                    self._make_channel(connection, arena, connected)

            introducing = Introducing(self._control, connection, told)
            self._introducing.add(introducing)

        dial(self._dials, self._control, host, port, preamble, answered, connected)

    def is_gone(self, source_epoch: int) -> bool:
        """Whether nothing of the sender is on its way. If only a fence proves that, it begins."""
        if source_epoch in self._lost:
            self._control.call_soon(self._fence)
        return source_epoch not in self._senders and source_epoch not in self._lost

    def confirm(self, source_epoch: int, confirmed: Callable[[], None]) -> None:
        """Ask the sender whether its connection is intact."""
        if self.is_gone(source_epoch):
            confirmed()
        elif source_epoch in self._senders:
            with contextlib.suppress(OSError):
                self._senders[source_epoch].send(PROBE)
                self._asked[source_epoch].append(confirmed)

    def look(self) -> None:
        """Publish the words of what has come."""
        if self._landing is not None:
            self._landing.look()

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Refuse new connections of this epoch, and close the old one unless its end is awaited as
        a proof."""
        self._tokens.forget(source_epoch)
        if not may_write and source_epoch in self._senders:
            # Nothing but a proof is under way: else no fence is needed.
            is_proving = self._desk is not None and self._desk.has_lent_to(source_epoch)
            self._drop(source_epoch, has_parted=not is_proving)
        waiting = self._waiting.pop(source_epoch, None)
        if waiting is not None:
            waiting.close()

    def close(self) -> bool:
        """End all writes, from here and to here, then every connection; idempotent. Returns False
        if something did not end, and its memory is still in use."""
        has_ended = self._writer.close()
        self._control.unwatch_time(self._look)
        for proving in self._proving:
            proving.close()
        self._proving.clear()
        if self._landing is not None:
            has_ended = self._landing.close() and has_ended
            self._door.close()
        if self._desk is not None:
            has_ended = self._desk.close(CLOSE_SECONDS) and has_ended
        self._dials.close()
        for introducing in self._introducing:
            introducing.close()
        self._introducing.clear()
        for connection in self._senders.values():
            self._control.unwatch(connection.fileno())
        for connection in [*self._senders.values(), *self._waiting.values()]:
            connection.close()
        self._senders.clear()
        self._waiting.clear()
        return has_ended

    def _make_channel(
        self, connection: socket.socket, arena: RemoteArena, connected: Connected
    ) -> None:
        end_by_silence(connection, self._silence_seconds)

        def told(peer: str | TransportError) -> None:
            self._control.call_soon(lambda: make(peer))

        def make(peer: str | TransportError) -> None:
            if isinstance(peer, TransportError):  # a fence may have ended the agent meanwhile
                connection.close()
                connected(ConnectionInterrupted(str(peer)))
                return
            try:
                channel = NixlChannel(self._writer, self._control, connection, peer, arena)
            except OSError as error:  # it cannot be watched
                self._writer.forget(peer)
                connection.close()
                connected(TransportError(f"watch: {error}"))
                return
            self._proving.add(Proving(channel, connected))

        self._writer.connect(arena, told)

    def _admit(self, connection: socket.socket, epoch: int) -> None:
        """Let a sender in, as soon as its last connection is proven to have ended."""
        older = self._waiting.pop(epoch, None)
        if older is not None:
            older.close()
        self._waiting[epoch] = connection
        if epoch in self._senders:
            self._hear(epoch)  # its end may not have been read yet
        self._let_in()

    def _let_in(self) -> None:
        if self._waiting and self._lost:
            self._fence()  # else it might come while NIXL connects
        for epoch in list(self._waiting):
            is_fencing = self._landing is None or self._landing.is_fencing
            if not is_fencing and self.is_gone(epoch):
                self._introduce(self._waiting.pop(epoch), epoch)

    def _introduce(self, connection: socket.socket, epoch: int) -> None:
        try:
            arena = self._landing.introduction() if self._landing is not None else None
            if arena is None or len(arena.metadata) > MAX_METADATA_BYTES:
                raise TransportError("there is no metadata, or too much")
            numbers = INTRODUCTION.pack(
                arena.base, arena.nbytes, arena.proof_offset, len(arena.metadata)
            )
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            end_by_silence(connection, self._silence_seconds)
            self._control.watch(connection.fileno(), lambda: self._hear(epoch))
            connection.sendall(ACCEPTED + numbers + arena.metadata)  # last: it may write then
        except (OSError, TransportError) as error:
            logger.warning("nixl: sender %x is not introduced: %s", epoch, str(error))
            self._control.unwatch(connection.fileno())
            connection.close()
            return
        self._senders[epoch] = connection
        self._asked[epoch] = collections.deque()

    def _hear(self, epoch: int) -> None:
        """Take what a sender says, or its end."""
        said = heard(self._senders[epoch])
        if said is None:
            return
        if FAREWELL in said:
            self._parted.add(epoch)
        if self._desk is not None:
            self._desk.hear(epoch, self._senders[epoch], said)
        for _ in range(said.count(INTACT)):
            if self._asked[epoch]:
                self._asked[epoch].popleft()()
        if not said:
            self._drop(epoch, has_parted=epoch in self._parted)
            self._let_in()

    def _look(self, now: float) -> None:
        self._proving -= {proving for proving in list(self._proving) if proving.look(now)}
        if self._desk is not None:
            self._desk.look(now)

    def _drop(self, epoch: int, *, has_parted: bool) -> None:
        connection = self._senders.pop(epoch)
        self._control.unwatch(connection.fileno())
        connection.close()
        self._parted.discard(epoch)
        del self._asked[epoch]
        if not has_parted:
            self._lost.add(epoch)
        if len(self._lost) > MAX_LOST:
            self._fence()

    def _fence(self) -> None:
        """End what lost senders have on its way; all others have to connect again."""
        if self._landing is None or self._landing.is_fencing or not self._lost:
            return
        logger.warning(
            "nixl: %d senders were lost while they wrote; %d others connect again",
            len(self._lost), len(self._senders),
        )  # fmt: skip
        self._landing.fence(lambda: self._control.call_soon(self._fenced))

    def _fenced(self) -> None:
        if self._landing is not None:
            self._landing.fence_ended()
        for epoch in list(self._senders):
            self._drop(epoch, has_parted=True)
        self._lost.clear()
        self._let_in()
