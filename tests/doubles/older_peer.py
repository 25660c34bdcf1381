"""An engine that speaks the protocol's version before, in a process of its own."""

from __future__ import annotations

from p2p_engine import TransferKey
from p2p_engine.config import EngineConfig
from p2p_engine.memory.layout import TensorSource
from tests.doubles.older_protocol import speak_as_before
from tests.processes import Child
from tests.rigs.engines import PeerEngine
from tests.rigs.tensors import pattern


class OlderEngine(PeerEngine):
    """The commands of an OlderPeer."""

    def __init__(self, config: EngineConfig) -> None:
        speak_as_before()
        super().__init__(config)

    def hold(self, name: str, nbytes: int) -> None:
        """Hold a tensor for any peer that asks."""
        source = TensorSource(pattern(name, nbytes))
        self._kept.append(self.engine.hold(TransferKey(name), source))


class OlderPeer(Child):
    """An older engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(OlderEngine, config, through=())
        self.address: str = self.ask("address")
