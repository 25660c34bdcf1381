"""Between two engines of one process: the sender copies straight into the receiver's arena."""

from __future__ import annotations

import secrets

from mempool import Arena, Mover
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import LandingArena
from p2p_engine.transports.base import ArenaChannel, Connected, Endpoint, SenderWrites

_arenas: dict[str, LandingArena] = {}  # secret name → the receiver that gave it out
_live_epochs: set[int] = set()  # the engines of this process whose movers may run


class InprocChannel(ArenaChannel):
    """The peer's arena, mapped a second time: the peer may unmap its own whenever it likes."""

    def __init__(self, mover: Mover, arena: Arena) -> None:
        super().__init__(mover, arena.address, arena.nbytes)
        self._arena = arena

    def close(self, timeout: float = 1.0) -> bool:
        """Join the copies, then unmap."""
        if not super().close(timeout):
            return False
        self._arena.close()
        return True


class InprocTransport(SenderWrites):
    """For tests and examples; the same protocol as between processes."""

    name = "inproc"
    checks = True

    def __init__(self, mover: Mover, landing: LandingArena | None, epoch: int) -> None:
        self._mover = mover
        self._epoch = epoch
        self._secret = secrets.token_hex(16)
        _live_epochs.add(epoch)
        if landing is not None:
            _arenas[self._secret] = landing

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Give out the secret name of our arena."""
        return {"secret": self._secret} if self._secret in _arenas else None

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Find the arena by its secret name."""
        landing = _arenas.get(endpoint.get("secret", ""))
        if landing is None:
            connected(TransportError("connect: the peer is not in this process"))
        else:
            arena = Arena.attach(landing.arena.fileno(), landing.arena.nbytes)
            connected(InprocChannel(self._mover, arena))

    def is_gone(self, source_epoch: int) -> bool:
        """Whether the sender's engine was closed, its mover joined."""
        return source_epoch not in _live_epochs

    def forget(self, source_epoch: int) -> None:
        """Nothing is kept for each sender."""

    def close(self) -> None:
        """Take our arena's name back; our mover is stopped."""
        _arenas.pop(self._secret, None)
        _live_epochs.discard(self._epoch)
