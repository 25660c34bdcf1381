"""Hosts of a network of their own: network namespaces that a bridge joins, without any privilege.

A Network lives in a child that UNSHARE makes root of new user, network and mount namespaces, which
end with it, and with them all that it has made.
"""

from __future__ import annotations

import subprocess

from tests.hosts.rank import NUM_RANKS, HostRank
from tests.processes import Child

TOOLS = "ip link add name probe0 type veth peer name probe1 && nsenter --version >/dev/null"
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--fork", "--kill-child"]
PORT = 14579


def why_not() -> str:
    """Why this machine cannot have such hosts; empty: it can."""
    try:
        tried = subprocess.run(
            [*UNSHARE, "sh", "-c", TOOLS], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError as error:
        return f"no {error.filename}"
    return "" if tried.returncode == 0 else tried.stderr.strip() or "not permitted"


class RankHost(Child):
    """A rank's process on a host of its own, `10.77.0.NUMBER`."""

    PATIENCE = 120.0

    def __init__(self, number: int, role: str, rank: int) -> None:
        self.number, self.ip = number, f"10.77.0.{number}"
        _ip(f"netns add host{number}")
        _ip(f"link add name bridge{number} type veth peer name eth0 netns host{number}")
        _ip(f"link set bridge{number} master bridge up")
        for change in ("link set lo up", f"addr add {self.ip}/24 dev eth0", "link set eth0 up"):
            _ip(f"-n host{number} {change}")
        entering = ["nsenter", f"--net=/run/netns/host{number}"]
        super().__init__(HostRank, self.ip, role, rank, through=entering)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


class Network:
    """A prefill instance of two ranks on two hosts, and a decode instance on a third."""

    def __init__(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        _ip("link add name bridge type bridge")
        _ip("link set bridge up")
        ranks = range(NUM_RANKS["prefill"])
        self.prefill = [RankHost(1 + rank, "prefill", rank) for rank in ranks]
        self.decode = RankHost(9, "decode", 0)
        self.port = PORT

    def open(self, transports: str) -> tuple[str, str]:
        """Start engines and directories, on each instance's first host, as vLLM's scheduler is;
        returns the directories' addresses."""
        self.port += 1
        for instance in (self.prefill, [self.decode]):
            for host in instance:
                host.tell("open", transports)
            addresses = [host.answer() for host in instance]
            hosts = [address.partition(":")[0] for address, _ in addresses]
            assert hosts == [host.ip for host in instance], addresses
            instance[0].ask("serve", self.port, addresses)
        return f"{self.prefill[0].ip}:{self.port}", f"{self.decode.ip}:{self.port}"

    def transfer(self, transports: str, pull: bool) -> None:
        """Each host's heads reach decode, by the address that its own rank has told."""
        prefill, decode = self.open(transports)
        self.decode.tell("receive", prefill, pull)
        for host in self.prefill:
            host.tell("hold" if pull else "send", decode)
        for host in (self.decode, *self.prefill):
            assert (outcome := host.answer()) == "", (host.ip, outcome)
        for host in self.prefill:
            assert host.ask("sent_bytes") > 0
        for host in (self.decode, *self.prefill):
            host.ask("close")

    def lose_a_host(self) -> None:
        """A cable is pulled: half of the heads are no KV, and the error says who is missing."""
        prefill, decode = self.open("tcp")
        self.prefill[0].ask("send", decode)
        lost = self.prefill[1]
        _ip(f"link set bridge{lost.number} down")
        error = self.decode.ask("receive", prefill, False)
        assert "rank 1" in error or lost.ip in error, error

    def close(self) -> None:
        """Let everybody end."""
        for host in (self.decode, *self.prefill):
            host.end()
