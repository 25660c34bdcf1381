"""What a failure of the HTTP client becomes: a status, a code, a note at the instance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from p2p_engine.messages import Heartbeat
from proxy.instances import Instance, Role
from proxy.registry import Registry
from proxy.upstream import leg_failed

KEY: Any = SimpleNamespace(ssl=False, host="secret", port=1)


@pytest.fixture
def instance() -> Instance:
    instance, _ = Registry().observe(Heartbeat("PD", "secret:1", "secret:2"), 0.0)
    instance.record_answer(200)
    return instance


@pytest.mark.parametrize(
    ("error", "status", "kind", "stays_ready"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(111, "refused")), 502, "failed", False),
        (aiohttp.ConnectionTimeoutError("secret:1"), 504, "timeout", False),
        (aiohttp.SocketTimeoutError("secret:1"), 504, "timeout", True),
        (aiohttp.ServerDisconnectedError("secret:1"), 502, "failed", True),
        (aiohttp.ClientOSError(104, "reset by secret:1"), 502, "failed", True),
        (aiohttp.ClientPayloadError("half of secret:1"), 502, "failed", True),
    ],
)
def test_each_failure_has_its_name(
    instance: Instance, error: Exception, status: int, kind: str, stays_ready: bool
) -> None:
    failure = leg_failed(instance, Role.DECODE, error)
    assert (failure.status, failure.code) == (status, f"decode_{kind}")
    assert "decode instance" in str(failure)
    assert "secret" not in str(failure)
    assert instance.is_ready is stays_ready
