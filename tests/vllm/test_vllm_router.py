"""vllm-router in place of our proxy, unmodified: it finds our instances by their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from benchmarks.routers import VLLM_ROUTER, ensure_script
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.processes import ChildProcess
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all
from tests.support import eventually
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, check_nothing_held, check_transferred

HOST = "127.0.0.1"

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def router_command() -> str:
    """Install the router in an environment of its own: its requirements are not ours."""
    return ensure_script(VLLM_ROUTER, "vllm-router")


@pytest.fixture(scope="module")
def ports() -> Iterator[PortPlan]:
    with PortPlan(HOST) as plan:
        yield plan


class VllmRouter:
    """The process, and what its log says of the instances that it has found."""

    def __init__(self, command: str, ports: PortPlan, log_path: Path) -> None:
        self.port, self.discovery_port = ports.take(), ports.take()
        self.process = ChildProcess(
            "vllm-router",
            [
                *(command, "--host", HOST, "--port", str(self.port)),
                *("--prometheus-port", str(ports.take()), "--policy", "round_robin"),
                "--vllm-pd-disaggregation",
                *("--vllm-discovery-address", f"{HOST}:{self.discovery_port}"),
            ],
            log_path=log_path,
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def has_found(self, member: Member) -> bool:
        found = self.process.log_path.read_text(errors="replace")
        return any(
            "Add " in line and member.http_address in line and kv_address(member) in line
            for line in found.splitlines()
        )


def kv_address(member: Member) -> str:
    assert member.plan is not None
    return member.plan.kv_address


def test_router_serves_the_same_tokens(
    load: list[Question],
    answers_alone: Callable[[], list[Answer]],
    router_command: str,
    ports: PortPlan,
    tmp_path: Path,
) -> None:
    fleet = Fleet(ensure_tiny_model(), vllm_args=VLLM_ARGS, env=ENVIRONMENT, log_dir=tmp_path)
    router = VllmRouter(router_command, ports, tmp_path / "router.log")
    with ExitStack() as stack:
        stack.callback(router.process.stop)
        stack.enter_context(fleet)
        config = {EXTRA: {"proxy_ip": HOST, "proxy_port": router.discovery_port}}
        for role in (MemberRole.PREFILL, MemberRole.DECODE):
            fleet.start(role, transfer_config=config)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        for member in fleet.instances:
            eventually(partial(router.has_found, member), what=member.name)
        answers = ask_all(router.url, load, concurrency=CONCURRENCY)
        check_transferred(fleet.instances, load)
        check_nothing_held(fleet.instances)
    assert answers == answers_alone()
