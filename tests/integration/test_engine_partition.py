"""A network that really drops packets: two engines in network namespaces of their own, joined by a
pair of virtual interfaces, one of which goes down and comes back."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_engine import EngineConfig
from p2p_engine.errors import P2pError
from tests.processes import Child, start_fork_server
from tests.rigs.engines import MIB, PeerEngine, settings
from tests.support import eventually

CLONE_NEWNET = 0x40000000
HOSTS = ("10.77.0.1", "10.77.0.2")


def may_make_namespaces() -> bool:
    """Whether this user may make network namespaces, and has the tool."""
    tools = shutil.which("ip") and shutil.which("unshare")
    probe = ["unshare", "--net", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    return bool(tools) and subprocess.run(probe, capture_output=True, check=False).returncode == 0


class LonelyEngine(PeerEngine):
    """The commands: first in an empty network, then with an engine."""

    def __init__(self, config: EngineConfig) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        self._config = config

    def ip(self, *words: str) -> None:
        """Run ip(8)."""
        subprocess.run(["ip", *words], check=True)

    def start(self) -> str:
        """Make the engine; its address."""
        super().__init__(self._config)
        return self.address()

    def send(self, name: str, nbytes: int, peer: str) -> None:
        """Begin to send a tensor, if anybody can be told of it."""
        with contextlib.suppress(P2pError):
            super().send(name, nbytes, peer)

    def moves(self, name: str, nbytes: int, peer: str, timeout: float) -> bool | str:
        """Receive a tensor; whether it is the right one, or the name of the error."""
        try:
            return self.receive(name, nbytes, peer, timeout)
        except P2pError as error:
            return type(error).__name__


needs_namespaces = pytest.mark.skipif(
    not may_make_namespaces(), reason="may not make network namespaces"
)


class LonelyHost(Child):
    """A process with a network of its own."""

    def __init__(self, host: str, **changes: float) -> None:
        config = settings("tcp", host=host, peer_timeout_seconds=1.5, **changes)
        super().__init__(LonelyEngine, config)

    def ip(self, text: str) -> None:
        """Run ip(8) in its network."""
        self.ask("ip", *text.split())


@contextlib.contextmanager
def two_hosts(**changes: float) -> Iterator[list[LonelyHost]]:
    """Two processes, each in a network of its own; a wire joins them."""
    start_fork_server()
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(LonelyHost(host, **changes)) for host in HOSTS]
        hosts[0].ip("link set lo up")  # it has its own network by now
        hosts[1].ip("link set lo up")
        hosts[0].ip(f"link add wire type veth peer name wire netns {hosts[1].pid}")
        for host, party in zip(HOSTS, hosts, strict=True):
            party.ip(f"addr add {host}/24 dev wire")
            party.ip("link set wire up")
        yield hosts


def assert_sound(*parties: LonelyHost) -> None:
    """No bug was met, and no wait outlived its deadline."""
    for party in parties:
        stats = party.ask("stats")
        assert (stats["control_errors"], stats["overdue_waits"]) == (0, 0)
        assert stats["healthy"]


@needs_namespaces
def test_packets_that_are_dropped_cost_what_was_on_its_way() -> None:
    with two_hosts(transfer_timeout_seconds=3, connect_timeout_seconds=1) as (east, west):
        here, there = east.ask("start"), west.ask("start")

        def moves(name: str) -> Any:
            east.ask("send", name, MIB, there)
            return west.ask("moves", name, MIB, here, 3.0)

        assert moves("before") is True
        west.ip("link set wire down")
        assert moves("during") in ("PeerLost", "PeerUnreachable", "TransferTimeout")
        eventually(lambda: east.ask("stats")["open_transfers"] == 0, timeout=10)
        west.ip("link set wire up")
        attempts = iter(range(100))
        eventually(lambda: moves(f"after {next(attempts)}") is True, timeout=30)
        assert_sound(east, west)


@needs_namespaces
def test_connection_that_the_network_forgets_costs_what_was_on_its_way() -> None:
    """As a firewall does with one that was idle: both are there, its packets go nowhere, and
    nobody is told. What had left already is lost; the rest goes over a new one."""
    with two_hosts(transfer_timeout_seconds=600) as (east, west):
        here, there = east.ask("start"), west.ask("start")

        def moves(name: str) -> Any:
            east.ask("send", name, MIB, there)
            return west.ask("moves", name, MIB, here, 20.0)

        assert moves("before") is True
        (port,) = data_ports(east, here, there)
        east.ip(f"rule add pref 1 ipproto tcp sport {port} blackhole")
        assert moves("during") in (True, "TransferRejected")
        assert moves("after") is True
        assert_sound(east, west)


def data_ports(host: LonelyHost, *control: str) -> set[int]:
    """The ports of a host's end of its data connections: those that no control connection has."""
    known = {int(address.rpartition(":")[2]) for address in control}
    lines = Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]
    established = [line.split()[1:3] for line in lines if line.split()[3] == "01"]
    ends = [[int(end.rpartition(":")[2], 16) for end in pair] for pair in established]
    return {local for local, remote in ends if not known & {local, remote}}
