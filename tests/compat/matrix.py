"""Boots real vLLM versions and compares their tokens: `make test-vllm VLLM=0.29.0`.

Each version gets an environment of its own with this package installed in it. A single instance
answers first; then a prefill and a decode instance behind our proxy answer the same requests.
One line of JSON is printed for each version.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests.compat.environments import GRAFTS, VERSIONS, ensure_environment, install_ours
from tests.compat.fleet import BOOT_SECONDS, VersionFleet
from tests.compat.workload import (
    Answer,
    Question,
    ask_all,
    mixed_questions,
    prompt_tokens_by_source,
)
from tests.upstream.sdist import CACHE

_CONCURRENCY = 4
# Without a cache of its own, a decode instance needs every token of a prompt sent.
_VLLM_ARGS = ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Row:
    """What came of one version."""

    vllm: str
    binaries: str
    ours: str
    python: str
    send_type: str
    seed: int
    requests: int
    identical: int
    transferred_tokens: int
    recomputed_tokens: int  # on decode, though prefill had computed them

    @property
    def is_good(self) -> bool:
        """Whether every token was the same and no KV was computed twice."""
        is_moved = self.transferred_tokens > 0 and self.recomputed_tokens == 0
        return self.identical == self.requests and is_moved


def check_version(version: str, send_type: str, seed: int) -> Row:
    """Boot one version as a single instance and as a pair, and compare; blocks for minutes."""
    python = ensure_environment(version)
    install_ours(python)
    model = ensure_tiny_model()
    questions = mixed_questions(str(model), seed)
    logs = CACHE / "logs" / version
    expected = _ask_single(model, python, logs, questions)
    with VersionFleet(
        model, python, send_type=send_type, vllm_args=_VLLM_ARGS, log_dir=logs
    ) as fleet:
        proxy = fleet.start_proxy()
        fleet.start(MemberRole.PREFILL)
        decode = fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        actual = ask_all(proxy.url, questions, concurrency=_CONCURRENCY)
        tokens = prompt_tokens_by_source(decode.url)
    return Row(
        vllm=version,
        binaries=GRAFTS.get(version, version),
        ours=importlib.metadata.version("p2p-kv-engine"),
        python=platform.python_version(),
        send_type=send_type,
        seed=seed,
        requests=len(questions),
        identical=sum(one == other for one, other in zip(expected, actual, strict=True)),
        transferred_tokens=tokens["external_kv_transfer"],
        recomputed_tokens=tokens["local_compute"] - sum(q.num_lone_tokens for q in questions),
    )


def _ask_single(model: Path, python: Path, logs: Path, questions: list[Question]) -> list[Answer]:
    with VersionFleet(model, python, log_dir=logs) as fleet:
        single = fleet.start(MemberRole.SINGLE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        return ask_all(single.url, questions, concurrency=_CONCURRENCY)


def main() -> int:
    """Check the versions named, or all; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="default: all")
    parser.add_argument("--send-type", default="PUT_ASYNC")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    is_good = True
    for version in args.versions:
        row = check_version(version, args.send_type, args.seed)
        is_good &= row.is_good
        sys.stdout.write(json.dumps({**asdict(row), "is_good": row.is_good}) + "\n")
        sys.stdout.flush()
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
