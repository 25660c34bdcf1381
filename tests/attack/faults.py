"""Faults: instances that say nothing, a proxy that stands still, clients that leave."""

from __future__ import annotations

import signal
import time

from tests.attack.crowds import HEAD, REQUEST
from tests.attack.play import Assault
from tests.attack.stage import AttackStage

LIMIT_SECONDS = 2.0
PAUSE_SECONDS = 3.0
SHORT = {
    **dict.fromkeys(
        ("prefill_timeout_seconds", "first_byte_timeout_seconds", "response_timeout_seconds"),
        LIMIT_SECONDS,
    ),
    "probe_timeout_seconds": 0.5,
    "breaker_seconds": 0.5,
}
# What an instance does while its client leaves, by role.
STAGES = (
    ("prefill computes", "prefill", {"hang": True}),
    ("decode computes", "decode", {"hang": True}),
    ("the answer has begun", "decode", {"hang_after": 1}),
)


def silent_instance(stage: AttackStage) -> str:
    """An instance takes requests and says nothing."""
    count, told = stage.count(100), []
    for role in ("prefill", "decode"):
        stage.instances.ask("behave", role, {"hang": True})
        seen = stage.clients().ask("post", ["text"], 100, count, count)
        stage.instances.ask("behave", role, {})
        assert seen == {"504": count}, seen
        told.append(f"{role}: {count} got 504")
        _wait_until_served(stage)
    _wait_for_legs(stage)
    return f"{', '.join(told)} after {LIMIT_SECONDS:g} s, both legs ended"


def stopped_instances(stage: AttackStage) -> str:
    """Both instances of a model are stopped (SIGSTOP) while requests come."""
    count = stage.count(100)
    stage.instances.stop()
    try:
        seen = stage.clients().ask("post", ["text"], 100, count, count)
        assert set(seen) <= {"502", "503", "504"}, seen
    finally:
        stage.instances.wake()
    _wait_until_served(stage)
    _wait_for_legs(stage)
    return f"{dict(seen)}; woken, they answer again"


def stopped_proxy(stage: AttackStage) -> str:
    """The proxy is stopped (SIGSTOP) again and again while requests come."""
    for _ in range(2):
        stage.process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        stage.process.send_signal(signal.SIGCONT)
        time.sleep(PAUSE_SECONDS / 3)
    return f"stopped twice for {PAUSE_SECONDS:g} s, every request answered"


def restarted_proxy(stage: AttackStage) -> str:
    """The proxy ends and starts again at the same addresses while requests come."""
    began = time.monotonic()
    stage.restart()
    _wait_until_served(stage)
    return f"serves again {time.monotonic() - began:.1f} s after it was told to stop"


def leaving_clients(stage: AttackStage) -> str:
    """Clients leave at each stage of a request."""
    crowd, count, told = stage.strangers(), stage.count(200), []
    for data in (b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{", REQUEST, REQUEST + REQUEST):
        crowd.ask("open", count, data)
        crowd.ask("hang_up")
        told.append(count)
    for _, role, how in STAGES:
        before = stage.instances.ask("num_received", role)
        stage.instances.ask("behave", role, how)
        crowd.ask("open", count, REQUEST)
        stage.wait_until(
            lambda role=role, before=before: (  # type: ignore[misc]
                stage.instances.ask("num_received", role) >= before + count
            ),
            "they have come so far",
        )
        crowd.ask("hang_up")
        _wait_for_legs(stage)
        stage.instances.ask("behave", role, {})
        told.append(count)
    return f"{sum(told)} left at {len(told)} stages, both legs of each ended"


def _wait_until_served(stage: AttackStage) -> None:
    """Wait until requests are answered again: breakers open for a while."""
    clients = stage.clients()
    stage.wait_until(lambda: clients.ask("post", ["text"], 100, 1, 1) == {"200": 1}, "it answers")


def _wait_for_legs(stage: AttackStage) -> None:
    """Wait until no instance works for a request that has ended."""
    for role in ("prefill", "decode"):
        stage.wait_until(
            lambda role=role: not stage.instances.ask("num_open", role),  # type: ignore[misc]
            f"every leg of {role} has ended",
        )


ASSAULTS = (
    Assault("an instance that says nothing", silent_instance, SHORT, spares_instances=False),
    Assault("stopped instances", stopped_instances, SHORT, spares_instances=False),
    Assault("a proxy that is stopped", stopped_proxy, SHORT),
    Assault("a proxy that restarts", restarted_proxy, spares_others=False, spares_instances=False),
    Assault("clients that leave at each stage", leaving_clients),
)
