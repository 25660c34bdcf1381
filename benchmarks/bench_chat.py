"""A chat on real vLLM: the time to the first token of each turn, what moves, and who computes it.

One instance alone, whose prefix cache is warm, and a pair behind our proxy: with and without
`stash_seconds`, and with session affinity and bypass; and a pair of NixlConnector. A stage brings
up one of them, with a core for each instance, and ends it before the next. All stages hold the same
chats and must say what one instance alone says. A stage is written as soon as it ends; `--resume`
plays those that the last run lacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.chat_worlds import ChatWorld, Setup, world_of
from benchmarks.harness import Row, append, arguments, progress, show
from benchmarks.serving_client import Stream
from benchmarks.serving_report import REFERENCE, add_stage_options, chosen_stages, lines_of
from benchmarks.vllm_servers import MODEL
from p2p_engine.cli.tiny_model import ensure_tiny_model

NUM_TURNS, NUM_ANSWERED = 5, 64
THINKING_SECONDS = 0.5  # between two turns
OTHER_TOKENS, QUIET_SECONDS = 4000, 1.0
FAILURES = (RuntimeError, TimeoutError, OSError, aiohttp.ClientError)

STAGES = {
    REFERENCE: Setup(None),
    "stash": Setup(stashes=True),
    "stash, GET": Setup("GET", stashes=True),
    "no stash": Setup(),
    "bypass": Setup(proxy=("--decode-policy", "session_affinity", "--bypass-tokens", "2048")),
    "NIXL bidirectional": Setup("NIXL"),
}


@dataclass
class ChatPlay:
    """One stage being played."""

    name: str
    world: ChatWorld
    options: argparse.Namespace
    expected: Mapping[tuple[int, int], int]  # digests of answers, by round and turn
    rows: list[Row] = field(default_factory=list)


async def play_stage(
    name: str, options: argparse.Namespace, expected: Mapping[tuple[int, int], int]
) -> list[Row]:
    """Hold all chats, the first one to warm up, and the last one beside another answer."""
    async with world_of(STAGES[name]) as world:
        going = ChatPlay(name, world, options, expected)
        for number in range(options.repetitions + 1):
            await hold_chat(going, number)
        await note_beside(going)
    return going.rows


async def hold_chat(going: ChatPlay, number: int) -> None:
    """Play the turns of one chat and note a row for each."""
    source = random.Random(f"{going.options.seed} {number}")
    said: list[int] = []
    for turn in range(1, NUM_TURNS + 1):
        said += [source.randrange(2, 900) for _ in range(going.options.tokens - NUM_ANSWERED)]
        await asyncio.sleep(THINKING_SECONDS)
        before = going.world.counts()
        answer = await going.world.ask(said, NUM_ANSWERED, f"chat {number}")
        after = going.world.counts()
        digest = zlib.crc32(json.dumps(answer.tokens).encode())
        expected = going.expected.get((number, turn), digest)
        going.rows.append({
            "what": "turn", "who": going.name, "round": number, "turn": turn, "tokens": len(said),
            "first_ms": None if answer.first is None else round(answer.first * 1e3, 1),
            "whole_ms": round(answer.whole * 1e3, 1),
            **{name: after[name] - before[name] for name in after},
            "digest": digest, "same": digest == expected,
        })  # fmt: skip
        said += answer.tokens


async def note_beside(going: ChatPlay) -> None:
    """The gaps between the tokens of another answer on the instance that decodes, during a chat."""
    source = random.Random(f"{going.options.seed} beside")
    prompt = [source.randrange(2, 900) for _ in range(200)]
    other = Stream()
    task = asyncio.create_task(going.world.ask_decode(prompt, OTHER_TOKENS, other))
    try:
        await asyncio.sleep(QUIET_SECONDS)
        quiet, begun = np.diff(other.events_at[1:]) * 1e3, len(other.events_at) - 1
        num_rows = len(going.rows)
        await hold_chat(going, going.options.repetitions + 1)
        del going.rows[num_rows:]  # its times are not those of a chat alone
        gaps = np.diff(other.events_at[begun:]) * 1e3
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    row: Row = {"what": "beside", "who": going.name, "gaps": len(gaps)}
    if len(gaps):  # else it has not come in time
        row |= {
            "quiet_ms_p50": round(float(np.median(quiet)), 1),
            "gap_ms_p50": round(float(np.median(gaps)), 1),
            "gap_ms_max": round(float(gaps.max()), 1),
            "gap_ms_over_100": round(float(gaps[gaps > 100].sum()), 1),
        }
    going.rows.append(row)


def run_stage(name: str, options: argparse.Namespace, run: int) -> bool:
    """Play one stage and write its rows; returns False if it could not be played."""
    lines = lines_of(options.output, run)
    digests = {
        (row["round"], row["turn"]): row["digest"]
        for line in lines if line["stage"] == REFERENCE
        for row in line["rows"] if row["what"] == "turn"
    }  # fmt: skip
    try:
        rows = asyncio.run(play_stage(name, options, digests))
    except FAILURES as error:
        progress(f"{name}: {error!r}")
        return False
    append(rows, options, {"run": run, "stage": name, "note": options.note})
    return True


def report(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each stage: medians over turns 2 to 5 of all chats but the first."""
    reference: dict[str, dict[int, list[float]]] = {}
    found = []
    for line in lines:
        rows = [row for row in line["rows"] if row["what"] == "turn" and row["round"]]
        late = [row for row in rows if row["turn"] > 1]
        times = {what: _by_turn(late, what) for what in ("first_ms", "whole_ms")}
        if line["stage"] == REFERENCE:
            reference = times
        found.append({
            "stage": line["stage"], "note": line["note"],
            **{f"turn {turn}": _shown(values) for turn, values in times["first_ms"].items()},
            **{
                f"{what.removesuffix('_ms')}, of alone": _ratios(times[what], reference.get(what))
                for what in times
            },
            **{
                name: _shown([row[column] / unit for row in late if column in row])
                for name, column, unit in COLUMNS
            },
            "same": f"{sum(row['same'] for row in rows)}/{len(rows)}",
            "longest gap": next(
                (row["gap_ms_max"] for row in line["rows"] if "gap_ms_max" in row), ""
            ),
        })  # fmt: skip
    return found


COLUMNS = (
    ("computed by P", "computed_by_prefill", 1), ("computed by D", "computed_by_decode", 1),
    ("MB P to D", "to_decode_bytes", 1e6), ("MB D to P", "to_prefill_bytes", 1e6),
)  # fmt: skip


def _by_turn(rows: Sequence[Row], what: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.get(what) is not None:
            found.setdefault(row["turn"], []).append(row[what])
    return found


def _ratios(times: Mapping[int, list[float]], alone: Mapping[int, list[float]] | None) -> str:
    """The least and the largest ratio of a turn's median to that of one instance alone."""
    medians = {turn: statistics.median(values) for turn, values in times.items()}
    ratios = [
        medians[turn] / statistics.median(alone[turn])
        for turn in medians
        if alone and turn in alone
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} [{min(values):.0f}-{max(values):.0f}]"


def main() -> None:
    """Play the stages that are asked for, one after the other."""
    parser = arguments("chat", __doc__, repetitions=3)
    parser.add_argument("--tokens", type=int, default=1000, help="that a turn adds (%(default)s)")
    add_stage_options(parser, STAGES)
    parser.add_argument("--note", default="", help="what is tried here, for the record")
    options = parser.parse_args()
    ensure_tiny_model(MODEL)
    run, todo = chosen_stages(parser, options, again=bool(options.note))
    wrong = [name for name in STAGES if name in todo and not run_stage(name, options, run)]
    show(report(lines_of(options.output, run)))
    sys.exit(f"not played: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
