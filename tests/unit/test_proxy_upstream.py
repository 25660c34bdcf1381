"""What a failure of the HTTP client becomes: a status, a code, a note at the instance."""

from __future__ import annotations

import pytest

from p2p_engine.wire.messages import Heartbeat
from proxy.fleet.instances import Instance, Role
from proxy.fleet.registry import Registry
from proxy.fleet.upstream import leg_failed
from proxy.http.client import Broken, ClientError, ConnectTimedOut, TimedOut, Unreachable


@pytest.fixture
def instance() -> Instance:
    instance, _ = Registry().observe(Heartbeat("PD", "secret:1", "secret:2"), 0.0)
    instance.record_answer(200)
    return instance


@pytest.mark.parametrize(
    ("error", "status", "kind", "stays_ready"),
    [
        (Unreachable("refused by secret:1"), 502, "failed", False),
        (ConnectTimedOut("secret:1"), 504, "timeout", False),
        (TimedOut("secret:1"), 504, "timeout", True),
        (Broken("half of secret:1"), 502, "failed", True),
    ],
)
def test_each_failure_has_its_name(
    instance: Instance, error: ClientError, status: int, kind: str, stays_ready: bool
) -> None:
    failure = leg_failed(instance, Role.DECODE, error)
    assert (failure.status, failure.code) == (status, f"decode_{kind}")
    assert "decode instance" in str(failure)
    assert "secret" not in str(failure)
    assert instance.is_ready is stays_ready
