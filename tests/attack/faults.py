"""Faults: instances that say nothing, a proxy that stands still, clients that leave."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import ExitStack

from tests.attack.crowds import HEAD, REQUEST
from tests.attack.instances import Instances
from tests.attack.play import Assault
from tests.attack.stage import HOST, AttackStage
from tests.attack.strangers import Strangers
from tests.processes import Child

LIMIT_SECONDS = 2.0
PAUSE_SECONDS = 3.0
# The proxy excuses only the first of several pauses in a row: this long it runs before the next.
AWAKE_SECONDS = 1.0
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
        _pause(stage.proxy.process)
        _wait_until_served(stage)
    return f"stopped twice for {PAUSE_SECONDS:g} s, every request answered"


def stopped_at_each_stage(stage: AttackStage) -> str:
    """The proxy is stopped (SIGSTOP) while requests are at the same stage; all are answered."""
    count, told = stage.count(100), 0
    half, begun = REQUEST[: len(HEAD)], REQUEST[:-5]
    for before, after in ((half, REQUEST[len(half) :]), (begun, REQUEST[-5:]), (REQUEST, b"")):
        if not after:
            stage.instances.ask("behave", "decode", {"pace": 0.2})
        crowd = stage.strangers()
        crowd.ask("open", count, before)
        _pause(stage.proxy.process)
        crowd.ask("say", after)
        heard = crowd.ask("hear", 20.0)
        assert heard == {b"HTTP/1.1 200 OK": count}, heard
        told += count
        stage.dismiss()
    stage.instances.ask("behave", "decode", {})
    return f"{told} requests at 3 stages, stopped for {PAUSE_SECONDS:g} s at each, all answered"


def peer_proxy(stage: AttackStage) -> str:
    """Instances are known by way of another proxy, which is crowded, stopped, killed, restarted."""
    known = stage.status()["instances"]
    with ExitStack() as parts:
        peer = stage.start_peer()
        far = parts.enter_context(Child(Instances, "far", through=()))
        far.ask("beat", peer.registration_address)
        _wait_for_instances(stage, len(known) + 2)
        crowd = Child(Strangers, (HOST, peer.port), through=())
        parts.callback(crowd.close)
        crowd.ask("open", stage.count(1000), HEAD)
        _pause(peer.process)
        _wait_for_instances(stage, len(known) + 2)
        peer.kill()
        _wait_for_instances(stage, len(known))
        peer.start()
        _wait_for_instances(stage, len(known) + 2)
        peer.stop()
        _wait_for_instances(stage, len(known))
    return "its instances stay while it is crowded or stopped, go when it is killed, and come back"


def _pause(process: subprocess.Popen[bytes]) -> None:
    time.sleep(AWAKE_SECONDS)
    process.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    process.send_signal(signal.SIGCONT)


def _wait_for_instances(stage: AttackStage, count: int) -> None:
    def are_there() -> bool:
        states = [each["state"] for each in stage.status()["instances"]]
        return states == ["ready"] * count

    stage.wait_until(are_there, f"{count} instances are ready")


def restarted_proxy(stage: AttackStage) -> str:
    """The proxy ends and starts again at the same addresses while requests come."""
    began = time.monotonic()
    stage.proxy.stop()
    stage.proxy.start()
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
    Assault("a proxy that is stopped at each stage", stopped_at_each_stage),
    Assault("a proxy that other instances are known by", peer_proxy),
    Assault("a proxy that restarts", restarted_proxy, spares_others=False, spares_instances=False),
    Assault("clients that leave at each stage", leaving_clients),
)
