"""What users feel, on real vLLM: first token, decode leg, how a load holds up other answers,
throughput and processor time; ours beside NixlConnector and beside one instance alone.

A stage brings up one pair, on one core each, and ends it before the next: NixlConnector's workers
poll, and would take both cores from every other pair. All stages get the same prompts, and must
say what one instance alone says. Each stage is written as soon as it ends; `--resume` plays those
that the last run lacks. `python -m benchmarks.serving_report` makes the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from benchmarks import nixl_peer
from benchmarks.harness import Row, append, arguments, progress
from benchmarks.memory import HostCache, ordinary_memory, scattered
from benchmarks.serving_client import (
    ServingClient,
    ServingPair,
    Stream,
    TimedAnswer,
    Way,
    alone,
    both_at_once,
    by_handshake,
    one_after_the_other,
)
from benchmarks.serving_report import (
    REFERENCE,
    add_stage_options,
    chosen_stages,
    lines_of,
    show_report,
)
from benchmarks.vllm_servers import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    MODEL,
    OneCoreServer,
    nixl_environment,
    p2p_settings,
)
from mempool import Arena, copy_now
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.memory.layout import one_region, pair

NEW_TOKENS = 16
CONCURRENCY, NUM_TOGETHER, TOGETHER_TOKENS = 8, 16, 1000
NUM_BESIDE, BESIDE_TOKENS, OTHER_TOKENS = 2, 3000, 4000
QUIET_SECONDS = IDLE_SECONDS = 2.0
FAILURES = (RuntimeError, TimeoutError, aiohttp.ClientError)


@dataclass(frozen=True)
class Stage:
    """What one pair is asked, and which connector it has; None: one instance alone."""

    connector: str | None
    ways: Mapping[str, Way]
    is_pinned: bool = True


def _nixl(connector: str, name: str) -> dict[str, Stage]:
    return {
        name: Stage(connector, {name: by_handshake}),
        f"{name}, not pinned": Stage(connector, {f"{name}, not pinned": by_handshake}, False),
    }


OURS: dict[str, Way] = {name: one_after_the_other(name) for name in ("PUT_ASYNC", "PUT", "GET")}
STAGES = {
    REFERENCE: Stage(None, {REFERENCE: alone}),
    "ours": Stage("P2pNcclConnector", {**OURS, "both at once": both_at_once}),
    **_nixl("NixlConnector", "NIXL pull"),
    **_nixl("NixlPushConnector", "NIXL push"),
}


@dataclass
class StagePlay:
    """One stage being played."""

    options: argparse.Namespace
    expected: Mapping[tuple[int, int], list[int]]  # tokens, by length of the prompt and round
    rows: list[Row] = field(default_factory=list)

    def prompt(self, num_tokens: int, *name: object) -> list[int]:
        """Return the prompt of this name: the same in all stages, and in no other place."""
        source = random.Random(f"{self.options.seed} {num_tokens} {name}")
        return [source.randrange(2, 900) for _ in range(num_tokens)]


def settings_of(stage: Stage, ports: PortPlan) -> dict[str, Any] | None:
    """Return the --kv-transfer-config of an instance."""
    if stage.connector is None:
        return None
    if stage.connector == "P2pNcclConnector":
        return p2p_settings("kv_both", ports.take())
    return {
        "kv_connector": stage.connector, "kv_role": "kv_both", "kv_buffer_device": "cpu"
    }  # fmt: skip


def environment_of(stage: Stage, folder: Path, ports: PortPlan) -> dict[str, str]:
    """Return the variables of an instance."""
    if stage.connector is None or not stage.connector.startswith("Nixl"):
        return {}
    return nixl_environment(folder, ports.take(), is_pinned=stage.is_pinned)


@contextlib.contextmanager
def servers_of(stage: Stage) -> Iterator[list[OneCoreServer]]:
    """Bring up the stage's instances: prefill on the first core, decode on the second."""
    folder = Path(tempfile.mkdtemp(prefix="bench-serving-"))
    caching = "--no-enable-prefix-caching" if stage.connector else "--enable-prefix-caching"
    ports = PortPlan("127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.callback(ports.close)
        started = []
        for core, name in enumerate(("prefill", "decode")):
            if stage.connector is None and name == "prefill":
                continue
            server = OneCoreServer(
                name, folder, core, settings_of(stage, ports), arguments=[caching],
                environment=environment_of(stage, folder, ports),
            )  # fmt: skip
            stack.callback(server.close)
            started.append(server)
        for server in started:
            server.wait()
        yield started


async def play(stage: Stage, servers: Sequence[OneCoreServer], going: StagePlay) -> None:
    """Ask a stage's instances everything, and note the rows."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(ServingClient(item)) for item in servers]
        both = ServingPair(clients[0], clients[-1])
        for num_tokens in going.options.tokens:
            for number in range(going.options.repetitions + 1):
                await play_round(stage, both, going, num_tokens, number)
        await note_idle(stage, both, going)
        for name, way in stage.ways.items():
            for measure in (note_beside, note_together):
                try:
                    await measure(name, way, both, going)
                except FAILURES as error:
                    going.rows.append(_failure(name, measure.__name__, error))


async def play_round(
    stage: Stage, both: ServingPair, going: StagePlay, num_tokens: int, number: int
) -> None:
    """Ask the same prompt in every way; round 0 warms up."""
    prompt = going.prompt(num_tokens, number)
    names = list(stage.ways)
    first = (number - 1) % len(names)  # they take turns in going first
    for name in names[first:] + names[:first]:
        await note_request(name, stage.ways[name], both, going, prompt, number)
    if stage.connector is None:
        # All but its last token lies in whole blocks of the instance's own prefix cache.
        known = prompt[: (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS + 1]
        stream = await both.decode.stream(known, NEW_TOKENS)
        if number:
            going.rows.append({
                "what": "cached", "who": REFERENCE, "tokens": num_tokens, "round": number,
                "decode_ms": _ms(stream.first),
            })  # fmt: skip


async def note_request(
    name: str, way: Way, both: ServingPair, going: StagePlay, prompt: list[int], number: int
) -> None:
    """Ask once, and compare the tokens with those of one instance alone."""
    before = both.cpu_seconds()
    row: Row = {"what": "request", "who": name, "tokens": len(prompt), "round": number}
    try:
        answer = await way(both, prompt, NEW_TOKENS)
    except FAILURES as error:
        going.rows.append({**row, **_failure(name, "request", error)})
        return
    after = both.cpu_seconds()
    row |= {key: _ms(getattr(answer, key[:-3])) for key in ("prefill_ms", "decode_ms", "first_ms")}
    row |= _cpu(before, after, 1)
    if name == REFERENCE:
        row["token_ids"] = answer.tokens
    else:
        row["same"] = answer.tokens == going.expected[len(prompt), number]
    if number or name == REFERENCE:
        going.rows.append(row)
    await asyncio.sleep(0.05)


async def note_idle(stage: Stage, both: ServingPair, going: StagePlay) -> None:
    """How much of a core each instance takes while nothing is asked."""
    await asyncio.sleep(IDLE_SECONDS / 2)  # until what follows the last request is over
    before, start = both.cpu_seconds(), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    seconds, after = time.perf_counter() - start, both.cpu_seconds()
    row: Row = {"what": "idle", "who": " / ".join(stage.ways)}
    names = ("prefill_cores", "decode_cores")
    shares = [(b - a) / seconds for a, b in zip(before, after, strict=True)]
    going.rows.append(row | {k: round(v, 4) for k, v in zip(names, shares, strict=True)})


async def note_beside(name: str, way: Way, both: ServingPair, going: StagePlay) -> None:
    """The gaps between the tokens of another answer, which D gives while prompts are loaded."""
    other = Stream()
    prompt = going.prompt(200, "other", name)
    task = asyncio.create_task(both.decode.stream(prompt, OTHER_TOKENS, into=other))
    try:
        await asyncio.sleep(QUIET_SECONDS)
        quiet = np.diff(other.events_at[1:])
        begun = len(other.events_at) - 1
        for number in range(NUM_BESIDE):
            await way(both, going.prompt(BESIDE_TOKENS, "beside", number), NEW_TOKENS)
        gaps = np.diff(other.events_at[begun:]) * 1e3
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    going.rows.append({
        "what": "beside", "who": name, "tokens": BESIDE_TOKENS, "gaps": len(gaps),
        "quiet_ms_p50": _ms(float(np.median(quiet))),
        **{f"gap_ms_p{p}": round(float(np.percentile(gaps, p)), 1) for p in (50, 99)},
        "gap_ms_max": round(float(gaps.max()), 1),
    })  # fmt: skip


async def note_together(name: str, way: Way, both: ServingPair, going: StagePlay) -> None:
    """Many requests, CONCURRENCY at a time."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> TimedAnswer:
        async with room:
            return await way(both, going.prompt(TOGETHER_TOKENS, "together", number), NEW_TOKENS)

    before, start = both.cpu_seconds(), time.perf_counter()
    asked = [asyncio.create_task(ask(number)) for number in range(NUM_TOGETHER)]
    await asyncio.wait(asked)  # also if one fails: the next way must find nothing open
    answers = [item.result() for item in asked]
    seconds = time.perf_counter() - start
    going.rows.append({
        "what": "together", "who": name, "tokens": TOGETHER_TOKENS, "concurrency": CONCURRENCY,
        "requests": NUM_TOGETHER, "per_second": round(NUM_TOGETHER / seconds, 2),
        "first_ms_p50": _ms(statistics.median(item.first for item in answers)),
        **_cpu(before, both.cpu_seconds(), NUM_TOGETHER),
    })  # fmt: skip


def copy_rows(going: StagePlay) -> None:
    """Gather each prompt's KV into shared memory and scatter it again, by our copy on one core."""
    torch.set_num_threads(1)
    page_bytes = BLOCK_TOKENS * BYTES_PER_TOKEN // MODEL.num_layers
    most = -(-max(going.options.tokens) // BLOCK_TOKENS)
    memory = [ordinary_memory(2 * most * BLOCK_TOKENS * BYTES_PER_TOKEN) for _ in range(2)]
    source, target = (HostCache(item, MODEL.num_layers, page_bytes).paged for item in memory)
    shared = Arena(most * BLOCK_TOKENS * BYTES_PER_TOKEN)
    for num_tokens in going.options.tokens:
        for number in range(going.options.repetitions + 1):
            blocks = scattered(-(-num_tokens // BLOCK_TOKENS), 2 * most, number)
            packed = one_region(shared.address, source.pages(blocks).nbytes)
            ways = pair(source.pages(blocks), packed), pair(packed, target.pages(blocks))
            start = time.perf_counter()
            for regions in ways:
                copy_now(*regions)
            row: Row = {"what": "copy", "who": "copy", "tokens": num_tokens, "round": number}
            if number:
                going.rows.append({**row, "decode_ms": _ms(time.perf_counter() - start)})


def _failure(name: str, what: str, error: BaseException) -> Row:
    progress(f"{name}: {what} failed: {error!r}")
    return {"what": "failure", "who": name, "of": what, "error": repr(error)[:300]}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _cpu(before: tuple[float, float], after: tuple[float, float], num_requests: int) -> Row:
    used = [(b - a) / num_requests for a, b in zip(before, after, strict=True)]
    names = ("prefill_cpu_s", "decode_cpu_s")
    return {name: round(item, 4) for name, item in zip(names, used, strict=True)}


def expected_of(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Return what one instance alone has said in these stages."""
    rows = [row for line in lines for row in line["rows"] if "token_ids" in row]
    return {(row["tokens"], row["round"]): row["token_ids"] for row in rows}


def run_stage(name: str, options: argparse.Namespace, run: int) -> bool:
    """Play one stage and write its rows; returns False if it could not be played."""
    going = StagePlay(options, expected_of(lines_of(options.output, run)))
    start = time.monotonic()
    if STAGES[name].connector is None:
        copy_rows(going)
    try:
        with servers_of(STAGES[name]) as servers:
            progress(f"{name}: up after {time.monotonic() - start:.0f} s")
            asyncio.run(play(STAGES[name], servers, going))
    except FAILURES as error:
        progress(f"{name}: {error!r}")
        return False
    seconds = round(time.monotonic() - start)
    progress(f"{name}: over after {seconds} s")
    append(going.rows, options, {"run": run, "stage": name, "seconds": seconds})
    return True


def main() -> None:
    """Play the stages that are asked for, one after the other."""
    parser = arguments("serving", __doc__, repetitions=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 1000, 3000])
    add_stage_options(parser, STAGES)
    options = parser.parse_args()
    ensure_tiny_model(MODEL)
    run, todo = chosen_stages(parser, options)
    if not nixl_peer.installed():
        progress("NIXL is not installed: its stages are left out")
        todo = [name for name in todo if not name.startswith("NIXL")]
    ordered = [name for name in STAGES if name in todo]
    wrong = [name for name in ordered if not run_stage(name, options, run)]
    show_report(lines_of(options.output, run))
    sys.exit(f"not played: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
