"""A fleet whose processes are cheap doubles."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.cli.fleet import Fleet

if TYPE_CHECKING:
    from p2p_engine.cli.commands import InstancePlan
    from p2p_engine.cli.members import Member

MEMBER_DOUBLE = [sys.executable, "-S", str(Path(__file__).with_name("member.py"))]


class FleetDouble(Fleet):
    """Starts doubles; `vllm_args` are the behaviours of an instance."""

    registers = True  # whether the proxy comes to know the instances

    def _instance_command(self, plan: InstancePlan, overrides: Mapping[str, Any]) -> list[str]:
        return [*MEMBER_DOUBLE, "--port", str(plan.http_port), "--behave", *plan.vllm_args]

    def _proxy_command(
        self, port: int, registration_port: int, arguments: Sequence[str]
    ) -> list[str]:
        return [*MEMBER_DOUBLE, "--port", str(port), "--status", '{"instances": []}']

    def _what_is_missing(self, member: Member) -> str:
        return "" if self.registers else super()._what_is_missing(member)


def grandchild_of(log_path: Path) -> int | None:
    """The process id of the stubborn grandchild that a double has started."""
    for line in log_path.read_text().splitlines():
        if line.startswith("grandchild="):
            return int(line.partition("=")[2])
    return None
