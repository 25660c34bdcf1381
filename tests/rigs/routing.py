"""Fleet: instances as the router sees them, without any process or socket."""

from __future__ import annotations

import random
from typing import Any

import pytest

from p2p_engine.wire.messages import PROTOCOL_VERSION, Heartbeat
from proxy.config import ProxyConfig
from proxy.fleet.instances import Instance, Role
from proxy.fleet.registry import Registry
from proxy.openai.prompt import Prompt
from proxy.routing.router import InstancePair, NoInstance, Router

NOW = 1.0


class RoutingFleet:
    """Instances that are ready, named by the order of their making, and a router for them."""

    def __init__(self, **settings: Any) -> None:
        self.registry = Registry()
        config = ProxyConfig(**settings)
        self.router = Router(config, self.registry, lambda: NOW, random.Random(1))

    def add(self, kind: str, **more: Any) -> Instance:
        """Add an instance at an address of its own."""
        return self.add_at(f"h:{1000 + len(self.registry.instances())}", kind, **more)

    def add_at(
        self, address: str, kind: str, *, protocol: int | None = PROTOCOL_VERSION, **more: Any
    ) -> Instance:
        """Add an instance, or the next incarnation of one."""
        zmq_address = address.replace("h", "z")
        heartbeat = Heartbeat(kind, address, zmq_address, protocol=protocol, **more)
        instance, _ = self.registry.observe(heartbeat, NOW)
        instance.record_answer(200)
        return instance

    def pair(self, prompt: Prompt) -> InstancePair:
        """Choose for a prompt."""
        return self.router.choose(prompt)

    def choose(self, model: str | None = None) -> tuple[Instance, Instance]:
        """Choose for some prompt, and take no leg."""
        pair = self.pair(Prompt(model=model))
        assert pair.prefill is not None
        return pair.prefill, pair.decode

    def missing(self, model: str | None = None) -> list[Role]:
        """Choose in vain and return the roles that are missing."""
        with pytest.raises(NoInstance) as caught:
            self.choose(model)
        assert all(role.label in str(caught.value) for role in caught.value.missing)
        return caught.value.missing
