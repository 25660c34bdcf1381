"""The campaign's side of its children."""

from __future__ import annotations

import contextlib
import multiprocessing

from p2p_engine import EngineConfig
from tests.chaos.turns import TurnsEngine
from tests.processes import Child


def settings(transport: str, port: int = 0) -> EngineConfig:
    """Little memory and short waits, so that a round is over soon."""
    return EngineConfig(
        port=port,
        transports=(transport,),
        kv_buffer_size=4 << 20,
        mem_pool_size_gb=4 / 1024,
        checksum=True,
        transfer_timeout_seconds=1.5,
        lease_seconds=1.0,
        connect_timeout_seconds=0.8,
        peer_timeout_seconds=0.6,
        retry_seconds=0.05,
    )


class ChaosChild(Child):
    """One child; `control` and `data` are where peers dial it."""

    PATIENCE = 20.0

    def __init__(self, transport: str, port: int = 0, config: EngineConfig | None = None) -> None:
        """Start it; `config` replaces the campaign's settings."""
        self.transport = transport
        self.trap, theirs = multiprocessing.get_context("forkserver").Pipe()
        super().__init__(TurnsEngine, config or settings(transport, port), theirs)
        theirs.close()
        self.is_killed = False  # by us: whoever ends otherwise breaks a promise
        try:
            addresses: tuple[str, str] = self.ask("addresses")
        except AssertionError:
            self.close()
            raise
        self.control, self.data = addresses

    def successor(self, *, is_elsewhere: bool = False) -> ChaosChild:
        """Close it, and start another one at its address, or at any."""
        self.close()
        return ChaosChild(self.transport, 0 if is_elsewhere else int(self.control.split(":")[-1]))

    def let_go(self) -> None:
        """Open the trap."""
        with contextlib.suppress(OSError):
            self.trap.send(None)

    def kill(self) -> float:
        """As any child, and remember it."""
        self.is_killed = True
        return super().kill()

    def close(self) -> None:
        """End it, whatever it is doing, and give back what it took here; idempotent."""
        super().close()
        self.trap.close()
