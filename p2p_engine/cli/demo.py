"""`p2p-engine demo`: compares prefill and decode on real vLLM with one instance, token by token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from p2p_engine.cli.client import CompletionAnswer, send_all
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.display import StartDisplay, busy
from p2p_engine.cli.fleet import Fleet, FleetInterrupted
from p2p_engine.cli.launch import stopping_on_signals
from p2p_engine.cli.members import Member, MemberLost
from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from p2p_engine.cli.verdict import (
    Moved,
    Samples,
    Shape,
    Verdict,
    judge,
    live_bytes,
    read_samples,
)
from p2p_engine.cli.workload import Request, Workload
from p2p_engine.control.fleet_key import write_key_file

SERVED_NAME = "tiny"
BLOCK_SIZE = 32  # the CPU backend wants multiples of 32
_ELEMENT_BYTES = 4  # float32, in which equal inputs give equal tokens on every instance
_VLLM_ARGS = (
    *("--served-model-name", SERVED_NAME, "--dtype", "float32", "--enforce-eager"),
    *("--block-size", str(BLOCK_SIZE), "--max-model-len", "4096"),
    *("--max-num-batched-tokens", "512"),  # longer prompts are prefilled, and sent, in chunks
)
_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.25
_BOOT_SECONDS = 900.0
_CONCURRENCY = 4


@dataclass(frozen=True)
class DemoOptions:
    """The options; `decode_config` is merged into the decode instance's configuration."""

    modes: Sequence[str] = ("PUT_ASYNC",)
    num_requests: int = 60
    seed: int = 0
    keys: bool = False
    decode_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """The requests of one mode, and a single instance's answers to them."""

    mode: str
    requests: Sequence[Request]
    expected: Sequence[CompletionAnswer]


class Demo:
    """Runs one prefill, one decode and one single instance, and compares their answers."""

    def __init__(
        self, options: DemoOptions, fleet: Fleet, model: TinyModel, console: Console
    ) -> None:
        """Prepare; nothing is started yet."""
        self._options = options
        self._fleet = fleet
        self._console = console
        self._vocab_size = model.vocab_size
        self._shape = Shape(model.kv_bytes_per_token(_ELEMENT_BYTES), BLOCK_SIZE)

    def run(self) -> list[Verdict]:
        """Start the instances, send the requests, and judge each mode."""
        fleet, modes = self._fleet, self._options.modes
        proxy = fleet.start_proxy()
        single = fleet.start(MemberRole.SINGLE)
        prefill = self._start_prefill(modes[0])
        decode = fleet.start(MemberRole.DECODE, transfer_config=self._options.decode_config)
        self._wait_ready()
        trials = [self._prepare(number, mode, single) for number, mode in enumerate(modes)]
        fleet.stop(single)
        verdicts = [self._try(trials[0], proxy, prefill, decode)]
        for trial in trials[1:]:
            fleet.stop(prefill)
            prefill = self._start_prefill(trial.mode)
            self._wait_ready(prefill)
            verdicts.append(self._try(trial, proxy, prefill, decode))
        return verdicts

    def _start_prefill(self, mode: str) -> Member:
        """Start a prefill instance with this mode, which it tells the decode instance in each
        request."""
        config = {"kv_connector_extra_config": {"send_type": mode}}
        return self._fleet.start(MemberRole.PREFILL, transfer_config=config)

    def _wait_ready(self, *members: Member) -> None:
        with StartDisplay(self._console) as display:
            self._fleet.wait_ready(*members, timeout=_BOOT_SECONDS, on_look=display.show)

    def _prepare(self, number: int, mode: str, single: Member) -> Trial:
        """Make a mode's own prompts: the decode instance must not have them in its prefix cache."""
        workload = Workload(
            SERVED_NAME,
            vocab_size=self._vocab_size,
            block_size=BLOCK_SIZE,
            seed=self._options.seed + number,
        )
        requests = workload.requests(self._options.num_requests)
        return Trial(mode, requests, self._ask("single instance", single, requests))

    def _try(self, trial: Trial, proxy: Member, prefill: Member, decode: Member) -> Verdict:
        before = [read_samples(prefill), read_samples(decode)]
        answers = self._ask(trial.mode, proxy, trial.requests)
        after = [self._settled(prefill), self._settled(decode)]
        return judge(
            trial.mode,
            trial.requests,
            trial.expected,
            answers,
            moved=Moved.between(before, after),
            shape=self._shape,
        )

    def _ask(
        self, title: str, member: Member, requests: Sequence[Request]
    ) -> list[CompletionAnswer]:
        with counting(title, len(requests), self._console) as advance:

            def on_answer() -> None:
                advance()
                self._fleet.check()

            return send_all(member.url, requests, concurrency=_CONCURRENCY, on_answer=on_answer)

    def _settled(self, member: Member) -> Samples:
        """Return a member's counters once nothing is held, or after a timeout: they lag behind the
        answers."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while live_bytes(samples := read_samples(member)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return samples


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo and print its table; return 0 only if all KV was moved and all tokens are
    equal."""
    model = TinyModel()
    with busy(console, "making the tiny model"):
        path = ensure_tiny_model(model)
    fleet = Fleet(path, vllm_args=_VLLM_ARGS, env=_ENV, planned_instances=2)
    if options.keys:
        fleet.key_file = str(fleet.log_dir.absolute() / "fleet.key")
        write_key_file(Path(fleet.key_file))
    console.print(f"model {path}, logs in {fleet.log_dir}", highlight=False, soft_wrap=True)
    with stopping_on_signals(fleet), fleet:
        try:
            verdicts = Demo(options, fleet, model, console).run()
        except (FleetInterrupted, MemberLost, TimeoutError, OSError) as error:
            console.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
            return 1
    return report(verdicts, console)


def report(verdicts: Sequence[Verdict], console: Console) -> int:
    """Print the table, the failures and the last line; return the exit code."""
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("mode", "requests", "identical", "KV moved", "GB/s", "landed in"):
        table.add_column(heading, no_wrap=True)
    table.add_column("first token (p50)")
    for verdict in verdicts:
        table.add_row(*_row(verdict))
    console.print(table)
    failures = [f"{v.mode}: {failure}" for v in verdicts for failure in v.failures]
    for failure in failures:
        console.print(failure, markup=False, highlight=False, soft_wrap=True)
    console.print(last_line(verdicts), markup=False, highlight=False, soft_wrap=True)
    return int(bool(failures))


def last_line(verdicts: Sequence[Verdict]) -> str:
    """Return the sum of all modes in one line, for scripts."""
    identical = sum(verdict.num_identical for verdict in verdicts)
    num_requests = sum(verdict.num_requests for verdict in verdicts)
    recomputed = sum(verdict.recomputed_tokens for verdict in verdicts)
    num_bytes = sum(verdict.num_bytes for verdict in verdicts)
    return (
        f"{identical}/{num_requests} identical, {recomputed} recomputed, "
        f"{num_bytes} bytes transferred"
    )


@contextlib.contextmanager
def counting(title: str, total: int, console: Console) -> Iterator[Callable[[], None]]:
    """Show progress towards `total`: a bar in a terminal, elsewhere one line at the end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began = time.monotonic()
    visible = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
    seconds = time.monotonic() - began
    console.print(f"{seconds:5.0f} s  {title:<16} {total} requests answered", highlight=False)


def _row(verdict: Verdict) -> list[str]:
    landed = verdict.moved.landed_bytes.items()
    seconds = verdict.writing_seconds
    return [
        verdict.mode,
        str(verdict.num_requests),
        str(verdict.num_identical),
        _megabytes(verdict.num_bytes),
        f"{verdict.num_bytes / seconds / 1e9:.2f}" if seconds else "-",
        ", ".join(f"{place} {_megabytes(size)}" for place, size in landed if size),
        f"{verdict.seconds_to_first * 1e3:.0f} ms",
    ]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
