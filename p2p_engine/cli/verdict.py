"""Compares the answers of prefill and decode with a single instance's, and counts the moved KV."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from p2p_engine.cli.client import CompletionAnswer
from p2p_engine.cli.members import Member, fetch_text
from p2p_engine.cli.workload import Request

PLACES = ("blocks", "buffer", "pool")
Samples = Mapping[tuple[str, str], float]  # by name and by the value of the label below
_LABELS = ("source", "place", "outcome")


def read_samples(member: Member) -> Samples:
    """Return a vLLM instance's counters and gauges, summed over engines and ranks.

    Raises:
        OSError: it does not answer.
    """
    text = fetch_text(f"{member.url}/metrics")
    if text is None:
        raise OSError(f"{member.name} does not answer at {member.url}/metrics")
    return parse_samples(text)


def parse_samples(text: str) -> Samples:
    """Sum the samples of a Prometheus page by name and by the first label in `_LABELS`."""
    totals: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            part = next((sample.labels[label] for label in _LABELS if label in sample.labels), "")
            key = (sample.name, part)
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def growth(before: Samples, after: Samples, name: str, part: str = "") -> float:
    """Return the increase of a counter."""
    return after.get((name, part), 0.0) - before.get((name, part), 0.0)


def live_bytes(samples: Samples) -> float:
    """Return the bytes that an instance holds for open transfers."""
    return sum(value for (name, _), value in samples.items() if name == "vllm:p2p_live_bytes")


@dataclass(frozen=True)
class Moved:
    """The changes of both instances' counters over the requests."""

    cached_tokens: int  # prompt tokens that were in decode's own prefix cache
    received_tokens: int  # prompt tokens that came from the prefill instance
    landed_bytes: Mapping[str, int]
    leftover_bytes: int = 0  # still held on either side
    writing_seconds: float = 0.0

    @classmethod
    def between(cls, before: Sequence[Samples], after: Sequence[Samples]) -> Moved:
        """Read the changes from the samples of the prefill and the decode instance."""
        decode = (before[1], after[1])
        tokens = "vllm:prompt_tokens_by_source_total"
        landed = "vllm:p2p_landed_bytes_total"
        return cls(
            cached_tokens=round(growth(*decode, tokens, "local_cache_hit")),
            received_tokens=round(growth(*decode, tokens, "external_kv_transfer")),
            landed_bytes={place: round(growth(*decode, landed, place)) for place in PLACES},
            leftover_bytes=round(sum(map(live_bytes, after))),
            writing_seconds=growth(before[0], after[0], "vllm:p2p_writing_seconds_total"),
        )


@dataclass(frozen=True)
class Shape:
    """The bytes of a cached token in this model, and the tokens of a block."""

    bytes_per_token: int
    block_size: int

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of the whole blocks that hold these tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks * self.block_size * self.bytes_per_token


@dataclass
class Verdict:
    """The result of one run, beside the expected one."""

    mode: str
    num_requests: int
    moved: Moved
    least_bytes: int  # without the blocks in decode's prefix cache
    most_bytes: int  # with them: prefill may push them before decode reports them
    recomputed_tokens: int
    leftover_bytes: int
    seconds_to_first: float
    writing_seconds: float
    differences: list[str] = field(default_factory=list)

    @property
    def num_identical(self) -> int:
        """The number of requests with only correct tokens."""
        return self.num_requests - len(self.differences)

    @property
    def num_bytes(self) -> int:
        """The KV bytes that landed."""
        return sum(self.moved.landed_bytes.values())

    @property
    def failures(self) -> list[str]:
        """The failures in words; empty on success."""
        failures = list(self.differences)
        if self.recomputed_tokens:
            failures.append(f"{self.recomputed_tokens} prompt tokens were not transferred")
        if not self.least_bytes <= self.num_bytes <= self.most_bytes:
            implied = f"{self.least_bytes} to {self.most_bytes}"
            failures.append(f"{self.num_bytes} bytes landed; the model's shape implies {implied}")
        if self.leftover_bytes:
            failures.append(f"{self.leftover_bytes} bytes are held after the last answer")
        return failures


def judge(
    mode: str,
    requests: Sequence[Request],
    expected: Sequence[CompletionAnswer],
    answers: Sequence[CompletionAnswer],
    *,
    moved: Moved,
    shape: Shape,
) -> Verdict:
    """Compare every token, and the decode instance's counters with what the prompts imply.

    Each sequence needs its whole prompt from the prefill instance, but for the full blocks that
    the decode instance had in its own prefix cache. A prompt's last token is computed again in
    any case, and vLLM counts a prompt of one token as computed.
    """
    prompts = [len(prompt) for answer in expected for prompt in answer.prompts.values()]
    needed_tokens = sum(length for length in prompts if length > 1) - moved.cached_tokens
    most_bytes = sum(map(shape.bytes_of, prompts))
    first = [answer.seconds_to_first for answer in answers if answer.seconds_to_first is not None]
    return Verdict(
        mode=mode,
        num_requests=len(requests),
        moved=moved,
        least_bytes=most_bytes - shape.bytes_of(moved.cached_tokens),
        most_bytes=most_bytes,
        recomputed_tokens=abs(needed_tokens - moved.received_tokens),
        leftover_bytes=moved.leftover_bytes,
        seconds_to_first=statistics.median(first) if first else 0.0,
        writing_seconds=moved.writing_seconds,
        differences=[
            difference
            for number, parts in enumerate(zip(requests, expected, answers, strict=True))
            if (difference := _difference(number, *parts))
        ],
    )


def _difference(
    number: int, request: Request, expected: CompletionAnswer, answer: CompletionAnswer
) -> str:
    """Return the difference of the two in words; empty only if both are complete and equal."""
    where = f"request {number} ({request.kind})"
    for name, one in (("the single instance", expected), ("prefill and decode", answer)):
        if one.error:
            return f"{where}: {name} failed: {one.error}"
        if len(one.tokens) != request.num_sequences or len(one.prompts) != request.num_sequences:
            return f"{where}: {name} gave {len(one.tokens)} of {request.num_sequences} sequences"
    if answer.prompts != expected.prompts:
        return f"{where}: the prompts differ"
    for index, tokens in expected.tokens.items():
        if answer.tokens.get(index) != tokens:
            return f"{where}, sequence {index}: {answer.tokens.get(index)} instead of {tokens}"
    if answer.endings != expected.endings:
        return f"{where}: ended by {answer.endings} instead of {expected.endings}"
    return ""
