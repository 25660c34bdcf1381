"""vllm-router in place of our proxy, unmodified: it finds our instances by their heartbeats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from p2p_engine.cli.commands import EXTRA, Role
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.processes import ChildProcess
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, ask_all, mixed_questions, prompt_tokens_by_source
from tests.support import eventually
from tests.upstream.sdist import CACHE

ROUTER = "vllm-router==0.1.17"
HOST = "127.0.0.1"

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def router_command() -> str:
    """Install the router in an environment of its own: its requirements are not ours."""
    folder = CACHE / "vllm-router"
    script = folder / "bin" / "vllm-router"
    if not script.exists():
        uv = [sys.executable, "-m", "uv", "--quiet"]
        subprocess.run([*uv, "venv", "--clear", str(folder)], check=True, timeout=60)
        install = [*uv, "pip", "install", "--python", str(folder / "bin" / "python"), ROUTER]
        subprocess.run(install, check=True, timeout=300)
    return str(script)


@pytest.fixture(scope="module")
def ports() -> Iterator[PortPlan]:
    with PortPlan(HOST) as plan:
        yield plan


class Router:
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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    args = (*VLLM_ARGS, "--no-enable-prefix-caching")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with Fleet(ensure_tiny_model(), vllm_args=args, env=env, log_dir=tmp_path) as fleet:
        yield fleet


def test_router_serves_the_same_tokens(
    fleet: Fleet, router_command: str, ports: PortPlan, tmp_path: Path
) -> None:
    questions = mixed_questions(str(ensure_tiny_model()), seed=7)
    expected = answers_of_a_single_instance(fleet, seed=7)
    router = Router(router_command, ports, tmp_path / "router.log")
    try:
        config = {EXTRA: {"proxy_ip": HOST, "proxy_port": router.discovery_port}}
        prefill = fleet.start(Role.PREFILL, transfer_config=config)
        decode = fleet.start(Role.DECODE, transfer_config=config)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        for member in (prefill, decode):
            eventually(partial(router.has_found, member), what=member.name)
        assert ask_all(router.url, questions, concurrency=4) == expected
        tokens = prompt_tokens_by_source(decode.url)
        assert tokens["external_kv_transfer"] > 0
        assert tokens["local_compute"] == sum(question.num_lone_tokens for question in questions)
    finally:
        router.process.stop()


def answers_of_a_single_instance(fleet: Fleet, seed: int) -> list[Answer]:
    single = fleet.start(Role.SINGLE)
    fleet.wait_ready(timeout=BOOT_SECONDS)
    answers = ask_all(single.url, mixed_questions(str(ensure_tiny_model()), seed), concurrency=4)
    fleet.stop(single)
    return answers
