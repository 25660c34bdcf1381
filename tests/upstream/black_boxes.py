"""Upstream's tests that only speak HTTP, over our launcher, proxy and connector."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.members import Member
from tests.compat.fleet import BOOT_SECONDS, VersionFleet
from tests.upstream import suites
from tests.upstream.results import FAILED, PASSED, Result, read_report

_TEST_SECONDS = 300.0


def run(python: Path, work: Path, model: Path) -> list[Result]:
    """Boot what the tests need with the vLLM of `python`, run them, and stop everything."""
    outputs = work / "baseline.json"
    with VersionFleet(model, python, log_dir=work / "logs") as fleet:
        single = fleet.start(MemberRole.SINGLE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        baseline = _accuracy(python, work, "baseline", single, model, outputs)
        fleet.stop(single)
        if baseline.outcome == FAILED:
            return [baseline]
        proxy = fleet.start_proxy()
        prefill = fleet.start(MemberRole.PREFILL)
        decode = fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        return [
            baseline,
            _accuracy(python, work, "disagg", proxy, model, outputs),
            *_edge_cases(python, work, prefill, decode, proxy),
        ]


def _accuracy(
    python: Path, work: Path, mode: str, server: Member, model: Path, outputs: Path
) -> Result:
    """A script, not a pytest file: it passes when it ends without an error."""
    command = [str(python), suites.ACCURACY, f"--service_url={server.url}", f"--mode={mode}"]
    command += [f"--model_name={model}", f"--file_name={outputs}"]
    status = subprocess.run(command, cwd=work, timeout=_TEST_SECONDS, check=False).returncode
    name = Path(suites.ACCURACY).stem
    return Result(name, f"--mode={mode}", FAILED if status else PASSED)


def _edge_cases(
    python: Path, work: Path, prefill: Member, decode: Member, proxy: Member
) -> list[Result]:
    report = work / "edge_cases.xml"
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    members = {"PREFILL": prefill, "DECODE": decode, "PROXY": proxy}
    subprocess.run(
        [*command, suites.EDGE_CASES],
        cwd=work,
        env={**os.environ, **_addresses(members)},
        timeout=_TEST_SECONDS,
        check=False,
    )
    return read_report(report)


def _addresses(members: Mapping[str, Member]) -> dict[str, str]:
    split = {name: member.http_address.rpartition(":") for name, member in members.items()}
    hosts = {f"{name}_HOST": host for name, (host, _, _) in split.items()}
    return hosts | {f"{name}_PORT": port for name, (_, _, port) in split.items()}
