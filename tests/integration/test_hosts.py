"""An instance whose ranks are on several hosts: network namespaces, each with an address."""

from __future__ import annotations

import pytest

from tests.hosts.network import UNSHARE, Network, why_not
from tests.processes import Child


@pytest.mark.timeout(300)
def test_ranks_on_two_hosts_serve_a_third() -> None:
    """Pushed, pulled; by tcp, also where shm is offered and does not reach; and a host is lost."""
    reason = why_not()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    with Child(Network, through=UNSHARE) as network:
        network.PATIENCE = 240
        for transports in ("tcp", "shm,tcp"):
            for pull in (False, True):
                network.ask("transfer", transports, pull)
        network.ask("lose_a_host")
        network.end()
