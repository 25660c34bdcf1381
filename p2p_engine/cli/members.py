"""One process of a fleet: its address, its stage, and its loss."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2p_engine.cli.commands import InstancePlan
from p2p_engine.cli.processes import ChildProcess
from p2p_engine.cli.stages import READY, STARTING, StageReader
from p2p_engine.errors import P2pError

_PROBE_SECONDS = 2.0
_ORDER_SECONDS = 30.0

# Ignore proxies of the environment: all addresses are on this machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MemberLost(P2pError):
    """A process of the fleet ended by itself; the message has its exit and the end of its log."""

    def __init__(self, member: Member) -> None:
        """Describe the end of this member."""
        self.member = member
        super().__init__(
            f"{member.name} {member.process.end} while {member.stage}; the end of "
            f"{member.process.log_path}:\n{member.process.log_tail()}"
        )


@dataclass(eq=False)
class Member:
    """One process of a fleet. `plan` is None for the proxy."""

    name: str
    http_address: str
    process: ChildProcess
    plan: InstancePlan | None = None
    slot: int | None = None
    stage: str = STARTING
    started_at: float = field(default_factory=time.monotonic)
    answers_since: float | None = None
    ready_at: float | None = None

    def __post_init__(self) -> None:
        """Follow the log from its beginning."""
        self._stages = StageReader(self.process.log_path)

    @property
    def url(self) -> str:
        """The base URL for requests."""
        return f"http://{self.http_address}"

    @property
    def is_ready(self) -> bool:
        """Whether it has been seen to serve."""
        return self.ready_at is not None

    @property
    def elapsed_seconds(self) -> float:
        """From its start to when it was ready, or until now."""
        return (self.ready_at or time.monotonic()) - self.started_at

    @property
    def refusal(self) -> str:
        """Why a proxy does not take it, as far as its log says so; else ""."""
        return self._stages.refusal

    def look(self, *, unregistered: Callable[[Member], str]) -> None:
        """Update the stage; a member is ready when it answers and nothing says that the proxy does
        not know it."""
        self.stage = self._stages.update()
        if fetch_text(f"{self.url}/health") is None:
            return
        self.answers_since = self.answers_since or time.monotonic()
        self.stage = unregistered(self) or READY
        if self.stage == READY:
            self.ready_at = time.monotonic()


def fetch_text(url: str, timeout: float = _PROBE_SECONDS) -> str | None:
    """Return the body of a successful GET, else None."""
    try:
        with _direct.open(url, timeout=timeout) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):  # refused, timed out, an error status, or not HTTP at all
        return None


def post_json(url: str, content: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    """Post a JSON object and return the JSON answer.

    Raises:
        OSError: no answer in time, or an error status.
        ValueError: the answer is not JSON.
    """
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, data=body, headers=dict(headers))
    with _direct.open(request, timeout=_ORDER_SECONDS) as answer:
        return json.load(answer)
