"""A chat on real vLLM: the time to the first token of each turn, what moves, and who computes it.

One instance alone, whose prefix cache is warm, and a pair behind our proxy: with and without
`stash_seconds`, and with session affinity and bypass. A stage brings up one of them, with a core
for each instance, and ends it before the next. All stages hold the same chats and must say what
one instance alone says. A stage is written as soon as it ends; `--resume` plays those that the
last run lacks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.harness import Row, append, arguments, progress, show
from benchmarks.serving_client import ANSWER_SECONDS, Stream, check_answer, question, take_event
from benchmarks.serving_report import lines_of
from benchmarks.vllm_servers import BLOCK_TOKENS, MODEL
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests.vllm.observing import by_label, prompt_tokens

REFERENCE = "alone"
NUM_TURNS, NUM_ANSWERED = 5, 64
THINKING_SECONDS = 0.5  # between two turns
OTHER_TOKENS, QUIET_SECONDS = 4000, 1.0
STASH_SECONDS = 120.0
VLLM_ARGS = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=8192", "--max-num-batched-tokens=8192",
    f"--block-size={BLOCK_TOKENS}", "--enable-prefix-caching",
)  # fmt: skip
FAILURES = (RuntimeError, TimeoutError, OSError, aiohttp.ClientError)


@dataclass(frozen=True)
class Setup:
    """A way to serve the chats: one instance (None), or a pair in this mode, whether it stashes,
    and further arguments of the proxy."""

    send_type: str | None = "PUT_ASYNC"
    stashes: bool = False
    proxy: tuple[str, ...] = ()


STAGES = {
    REFERENCE: Setup(None),
    "stash": Setup(stashes=True),
    "stash, GET": Setup("GET", stashes=True),
    "no stash": Setup(),
    "bypass": Setup(proxy=("--decode-policy", "session_affinity", "--bypass-tokens", "2048")),
}


@dataclass
class ChatPlay:
    """One stage being played."""

    name: str
    fleet: Fleet
    options: argparse.Namespace
    expected: Mapping[tuple[int, int], int]  # digests of answers, by round and turn
    rows: list[Row] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where clients ask."""
        first = self.fleet.proxy or self.fleet.instances[0]
        return first.url

    @property
    def prefill(self) -> Member:
        """The instance that prefills."""
        return self.fleet.instances[0]

    @property
    def decode(self) -> Member:
        """The instance that decodes."""
        return self.fleet.instances[-1]


@contextlib.contextmanager
def fleet_of(stage: Setup) -> Iterator[Fleet]:
    """Bring up a stage's processes."""
    logs = Path(tempfile.mkdtemp(prefix="bench-chat-"))
    progress(f"logs in {logs}")
    settings: dict[str, Any] = {EXTRA: {"stash_seconds": STASH_SECONDS}} if stage.stashes else {}
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} if stage.stashes else {}
    with Fleet(
        MODEL.path,
        send_type=stage.send_type or "PUT_ASYNC",
        vllm_args=VLLM_ARGS,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        log_dir=logs,
    ) as fleet:
        if stage.send_type is None:
            fleet.start(MemberRole.SINGLE)
        else:
            fleet.start_proxy(arguments=stage.proxy)
            fleet.start(MemberRole.PREFILL, transfer_config={**settings, **both})
            fleet.start(MemberRole.DECODE, transfer_config=settings)
        fleet.wait_ready()
        yield fleet


async def play(going: ChatPlay) -> None:
    """Hold all chats, the first one to warm up, and the last one beside another answer."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
        for number in range(going.options.repetitions + 1):
            await hold_chat(going, session, number)
        await note_beside(going, session)


async def hold_chat(going: ChatPlay, session: aiohttp.ClientSession, number: int) -> None:
    """Play the turns of one chat and note a row for each."""
    source = random.Random(f"{going.options.seed} {number}")
    said: list[int] = []
    for turn in range(1, NUM_TURNS + 1):
        said += [source.randrange(2, 900) for _ in range(going.options.tokens - NUM_ANSWERED)]
        await asyncio.sleep(THINKING_SECONDS)
        before = counts_of(going)
        stream = await ask(session, going.address, said, NUM_ANSWERED, f"chat {number}")
        after = counts_of(going)
        digest = zlib.crc32(json.dumps(stream.tokens).encode())
        expected = going.expected.get((number, turn), digest)
        going.rows.append({
            "what": "turn", "who": going.name, "round": number, "turn": turn, "tokens": len(said),
            "first_ms": round(stream.first * 1e3, 1),
            **{name: after[name] - before[name] for name in after},
            "digest": digest, "same": digest == expected,
        })  # fmt: skip
        said += stream.tokens


async def ask(
    session: aiohttp.ClientSession,
    address: str,
    prompt: list[int],
    num_tokens: int,
    chat: str,
    into: Stream | None = None,
) -> Stream:
    """Ask as a client does, one turn of a chat; the answer comes as a stream.

    Raises:
        RuntimeError: an error status, or an error in the stream.
    """
    found = into or Stream()
    body = {**question(prompt, num_tokens), "model": str(MODEL.path), "stream": True}
    found.begin()
    async with session.post(
        f"{address}/v1/completions", json=body, headers={"X-Session-Id": chat}
    ) as answer:
        await check_answer(answer)
        async for line in answer.content:
            if line.startswith(b"data: {"):
                take_event(found, json.loads(line[6:]))
    return found


def counts_of(going: ChatPlay) -> dict[str, int]:
    """How many bytes have arrived on each instance, and how many prompt tokens each has
    computed. One instance alone counts as decode."""
    landed = [by_label(item, "vllm:p2p_landed_bytes", "") for item in (going.prefill, going.decode)]
    computed = [prompt_tokens(item)["local_compute"] for item in (going.prefill, going.decode)]
    if going.prefill is going.decode:
        landed[0], computed[0] = type(landed[0])(), 0
    return {
        "to_prefill_bytes": landed[0][""], "to_decode_bytes": landed[1][""],
        "computed_by_prefill": computed[0], "computed_by_decode": computed[1],
    }  # fmt: skip


async def note_beside(going: ChatPlay, session: aiohttp.ClientSession) -> None:
    """The gaps between the tokens of another answer on the instance that decodes, during a chat."""
    source = random.Random(f"{going.options.seed} beside")
    prompt = [source.randrange(2, 900) for _ in range(200)]
    other = Stream()
    task = asyncio.create_task(ask(session, going.decode.url, prompt, OTHER_TOKENS, "", into=other))
    try:
        await asyncio.sleep(QUIET_SECONDS)
        quiet, begun = np.diff(other.events_at[1:]) * 1e3, len(other.events_at) - 1
        num_rows = len(going.rows)
        await hold_chat(going, session, going.options.repetitions + 1)
        del going.rows[num_rows:]  # its times are not those of a chat alone
        gaps = np.diff(other.events_at[begun:]) * 1e3
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    going.rows.append({
        "what": "beside", "who": going.name, "gaps": len(gaps),
        "quiet_ms_p50": round(float(np.median(quiet)), 1),
        "gap_ms_p50": round(float(np.median(gaps)), 1), "gap_ms_max": round(float(gaps.max()), 1),
        "gap_ms_over_100": round(float(gaps[gaps > 100].sum()), 1),
    })  # fmt: skip


def run_stage(name: str, options: argparse.Namespace, run: int) -> bool:
    """Play one stage and write its rows; returns False if it could not be played."""
    lines = lines_of(options.output, run)
    digests = {
        (row["round"], row["turn"]): row["digest"]
        for line in lines if line["stage"] == REFERENCE
        for row in line["rows"] if row["what"] == "turn"
    }  # fmt: skip
    try:
        with fleet_of(STAGES[name]) as fleet:
            going = ChatPlay(name, fleet, options, digests)
            asyncio.run(play(going))
    except FAILURES as error:
        progress(f"{name}: {error!r}")
        return False
    append(going.rows, options, {"run": run, "stage": name, "note": options.note})
    return True


def report(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each stage: medians over turns 2 to 5 of all chats but the first."""
    reference: dict[int, float] = {}
    found = []
    for line in lines:
        rows = [row for row in line["rows"] if row["what"] == "turn" and row["round"]]
        late = [row for row in rows if row["turn"] > 1]
        by_turn = {
            turn: [row["first_ms"] for row in late if row["turn"] == turn]
            for turn in sorted({row["turn"] for row in late})
        }
        medians = {turn: statistics.median(values) for turn, values in by_turn.items()}
        if line["stage"] == REFERENCE:
            reference = medians
        ratios = [medians[turn] / reference[turn] for turn in medians if turn in reference]
        found.append({
            "stage": line["stage"], "note": line["note"],
            **{f"turn {turn}": _shown(values) for turn, values in by_turn.items()},
            "of alone": f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "",
            **{
                name: _shown([row[name] / unit for row in late])
                for name, unit in (("computed_by_prefill", 1), ("computed_by_decode", 1))
            },
            "MB P to D": _shown([row["to_decode_bytes"] / 1e6 for row in late]),
            "MB D to P": _shown([row["to_prefill_bytes"] / 1e6 for row in late]),
            "same": f"{sum(row['same'] for row in rows)}/{len(rows)}",
            "longest gap": next(
                (row["gap_ms_max"] for row in line["rows"] if row["what"] == "beside"), ""
            ),
        })  # fmt: skip
    return found


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} [{min(values):.0f}-{max(values):.0f}]"


def main() -> None:
    """Play the stages that are asked for, one after the other."""
    parser = arguments("chat", __doc__, repetitions=3)
    parser.add_argument("--tokens", type=int, default=1000, help="that a turn adds (%(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--resume", action="store_true", help="go on with the last run")
    parser.add_argument("--note", default="", help="what is tried here, for the record")
    options = parser.parse_args()
    ensure_tiny_model(MODEL)
    lines = lines_of(options.output)
    run = max((line["run"] for line in lines), default=0) + (not options.resume or not lines)
    played = {line["stage"] for line in lines if line["run"] == run}
    todo = [name for name in options.stages if name not in played or options.note]
    if REFERENCE not in (*played, *todo):
        parser.error(f"the stage {REFERENCE!r} comes first: the others are compared with it")
    wrong = [name for name in STAGES if name in todo and not run_stage(name, options, run)]
    show(report(lines_of(options.output, run)))
    sys.exit(f"not played: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
