"""A fleet of real vLLM that changes under load: one instance speaks the version of the protocol
before ours, a decode instance joins, one drains, a prefill instance is killed and returns, one
changes its role, and the old release is replaced. Only what was open on the killed one may be
lost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Row, machine, versions
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member, fetch_text, post_json
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from tests import marks
from tests.compat.fleet import BOOT_SECONDS
from tests.compat.workload import Question
from tests.support import eventually
from tests.vllm.leaving import check_at_rest
from tests.vllm.load import ENVIRONMENT, Asked, VllmLoad, answers_of_one, landed_bytes
from tests.vllm.other_models import ensure_model
from tests.vllm.restarts import ARGUMENTS, NUM_CLIENTS, SETTINGS

KEY = "open sesame"
NUM_RIGHT = 12  # answers between two changes
NUM_ASKED = 24
SECONDS = 300.0  # for a change that boots nothing
OUTPUT = "P2P_CHANGES_OUTPUT"  # the variable that names the file to which figures are appended
OLDER = {"kv_connector_module_path": "tests.vllm.older_connector"}
pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(3000)]


class ChangingFleet:
    """A prefill instance, and one of both roles and of the release before, behind a proxy that
    takes orders."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        key_file = folder / "admin.key"
        key_file.write_text(KEY)
        key_file.chmod(0o600)
        self._fleet = fleet
        self.proxy = fleet.start_proxy(arguments=("--admin-key-file", str(key_file)))
        self.prefill = fleet.start(MemberRole.PREFILL)
        self.older = fleet.start(MemberRole.BOTH, transfer_config=OLDER)
        fleet.wait_ready(timeout=BOOT_SECONDS)

    def join(self, role: MemberRole, successor_of: Member | None = None) -> Member:
        """Start one more, and wait until it serves."""
        member = self._fleet.start(role, successor_of=successor_of)
        self._fleet.wait_ready(member, timeout=BOOT_SECONDS)
        return member

    def leave(self, member: Member) -> None:
        """Let an instance finish what it has, then end it."""
        self._order("remove", member)
        self._wait_for(member, "state", "drained")
        self._fleet.stop(member)

    def give_role(self, member: Member, role: MemberRole) -> None:
        self._order("role", member, type=role.value)
        self._wait_for(member, "roles", [role.value])

    def versions(self, *members: Member) -> list[int]:
        """The protocol versions of instances, as the proxy shows them."""
        return [self._shown(member)["protocol"] for member in members]

    def _shown(self, member: Member) -> dict[str, Any]:
        """What the proxy shows of an instance."""
        known = json.loads(fetch_text(f"{self.proxy.url}/status") or "{}")["instances"]
        return next((item for item in known if item["http_address"] == member.http_address), {})

    def _order(self, verb: str, member: Member, **more: str) -> None:
        asked = {"instance": member.http_address, **more}
        post_json(f"{self.proxy.url}/instances/{verb}", asked, {"X-Api-Key": KEY})

    def _wait_for(self, member: Member, name: str, value: object) -> None:
        what = f"{member.name}: {name} is {value}"
        eventually(lambda: self._shown(member).get(name) == value, SECONDS, what)


def wait_until_more_lands(member: Member) -> None:
    """Wait until an instance gets KV that it did not have at the time of the call."""
    before = landed_bytes([member]).total()
    eventually(lambda: landed_bytes([member]).total() > before, SECONDS, f"{member.name} gets KV")


def test_only_what_was_open_on_a_killed_instance_is_lost(
    load: list[Question], tmp_path: Path
) -> None:
    questions = load[:NUM_ASKED]
    expected = answers_of_one(questions, tmp_path / "alone")
    fleet = Fleet(
        ensure_model("llama"),
        vllm_args=ARGUMENTS,
        transfer_config={EXTRA: SETTINGS},
        env=ENVIRONMENT,
        log_dir=tmp_path,
        planned_instances=3,
    )
    with fleet:
        changing = ChangingFleet(fleet, tmp_path)
        asking = VllmLoad(changing.proxy.url, questions, expected, concurrency=NUM_CLIENTS)
        try:
            rows = _change(fleet, changing, asking)
        finally:
            asking.stop()
        assert wrong_among(asking.take()) == []
        check_at_rest(fleet.instances)
    if OUTPUT in os.environ:
        record(rows, Path(os.environ[OUTPUT]))


def _change(fleet: Fleet, changing: ChangingFleet, asking: VllmLoad) -> list[Row]:
    """Change the fleet step by step; returns what each step saw."""
    prefill, older, steps = changing.prefill, changing.older, Steps(asking)
    assert changing.versions(prefill, older) == [PROTOCOL_VERSION, OLDEST_VERSION]
    wait_until_more_lands(older)
    steps.end(f"version {OLDEST_VERSION} decodes, and computes beside version {PROTOCOL_VERSION}")

    decode = changing.join(MemberRole.DECODE)
    wait_until_more_lands(decode)
    steps.end("a decode instance joins")

    changing.give_role(older, MemberRole.PREFILL)
    wait_until_more_lands(decode)
    steps.end("the older one changes its role to prefill")

    fleet.kill(prefill)
    killed_at = time.monotonic()
    wait_until_more_lands(decode)  # from the older one, which alone is left
    prefill = changing.join(MemberRole.PREFILL, successor_of=prefill)
    steps.end("a prefill instance is killed and returns", killed_at=killed_at)

    changing.give_role(older, MemberRole.DECODE)
    wait_until_more_lands(older)
    steps.end("the older one changes its role to decode")

    changing.leave(older)
    wait_until_more_lands(decode)
    steps.end("the older one drains and ends: the release is rolled")
    assert changing.versions(prefill, decode) == [PROTOCOL_VERSION, PROTOCOL_VERSION]
    return steps.rows


class Steps:
    """What became of the requests during each step."""

    def __init__(self, asking: VllmLoad) -> None:
        self._asking = asking
        self._began_at = time.monotonic()
        self.rows: list[Row] = []

    def end(self, step: str, *, killed_at: float | None = None) -> None:
        """Go on for some more answers. Nothing may be lost but, if an instance was killed, what had
        begun by then: at most one request of each client."""
        self._asking.wait_for(NUM_RIGHT, SECONDS)
        asked, now = self._asking.take(), time.monotonic()
        failed = wrong_among(asked)
        if killed_at is None:
            assert [item.said for item in failed] == []
        else:
            assert len(failed) <= NUM_CLIENTS
            late = [item for item in failed if item.began_at > killed_at or not item.error]
            assert [item.said for item in late] == []
        slowest = max(item.ended_at - item.began_at for item in asked)
        self.rows.append({
            "step": step, "seconds": round(now - self._began_at, 1), "answers": len(asked),
            "lost": len(failed), "slowest_seconds": round(slowest, 2),
        })  # fmt: skip
        self._began_at = now


def wrong_among(asked: Sequence[Asked]) -> list[Asked]:
    """Those that got an error or other tokens than one instance alone says."""
    return [item for item in asked if not item.is_right]


def record(rows: list[Row], path: Path) -> None:
    """Append what was seen."""
    line = {
        "command": "make changes", "machine": machine(), "versions": versions(), "rows": rows,
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
