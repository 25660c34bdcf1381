"""An instance whose ranks are on several hosts: network namespaces, each with an address."""

from __future__ import annotations

import pytest

from tests.hosts.network import run_in_namespaces, why_not


@pytest.mark.timeout(300)
def test_ranks_on_two_hosts_serve_a_third() -> None:
    """Pushed, pulled; by tcp, also where shm is offered and does not reach; and a host is lost."""
    reason = why_not()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    run_in_namespaces()
