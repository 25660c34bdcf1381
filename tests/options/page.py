"""docs/options.md, made from the record; after a change by hand: python -m tests.options.page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tests.options.record import RECORD, ROOT, Line, control, read
from tests.options.table import LEFT_OUT, changes
from tests.options.trial import SIDES, TOLERANCE

PAGE = ROOT / "docs" / "options.md"
MAX_CELL = 160  # characters
_HEAD = f"""# Options on one side

Prefill and decode should have the same options. This page says what happens where they do not: each
option of vLLM's that could touch the model is changed on prefill alone and on decode alone, on real
vLLM with tiny models on a CPU. `make test-options` does it, for at most six hours, and goes on
where it stopped. This page is made of [its record](../benchmarks/results/options.jsonl): `python -m
tests.options.page`. Pairs of options are not tried.

| outcome | what was seen |
|---|---|
| moved | decode took prefill's KV for every prompt, and says what it says alone |
| refused | decode took none, says what it says alone, and a log names why |
| no start | vLLM ends with these options, or serves no completions |
| WRONG | decode says something else than it says alone: the target fails |
| UNNAMED | right, but KV did not move and no log says why: the target fails |
| FAILED | a request had an error, or an instance was lost or late: the target fails |

What decode says alone is computed by the same instance, with its own options, of the same prompt.
Tokens are greedy. Up to the first token that differs, the log probabilities of the chosen tokens
must agree, too, but for {TOLERANCE:.0%} of the distance between the likeliest token and the fifth:
so another rounding of float32 is told from other KV (`drift` in the record). The models are tiny,
random, and chaotic: other KV gives other words at once. The control is a difference that both sides
are told to accept; it must be seen to be wrong.

"""


def page(lines: Mapping[str, Line]) -> str:
    """Return the page of the last line of each change."""
    return _HEAD + "\n".join(_body(lines)) + "\n"


def _body(lines: Mapping[str, Line]) -> Iterator[str]:
    tried = [lines[change.name] for change in changes() if change.name in lines]
    counts = Counter(
        line[side]["outcome"] for line in tried if line["change"] != control().name
        for side in SIDES
    )  # fmt: skip
    releases = ", ".join(sorted({line["vllm"] for line in tried}))
    wanted = len(list(changes()))
    yield f"Tried on vLLM {releases}: {len(tried)} of {wanted} changes, each on both sides."
    yield "; ".join(f"{outcome}: {number}" for outcome, number in counts.most_common()) + "."
    yield (
        "\nBefore a colon stands what both sides have: another model or kind of prompt, adapters, a"
        " cache of the hub. `@other` and the like are folders that are made for it: other weights,"
        " the same ones elsewhere (`tests/options/places.py`)."
    )
    yield "\n| the change | on decode | on prefill | why |"
    yield "|---|---|---|---|"
    for line in tried:
        name = line["change"] + (" (the control)" if line["change"] == control().name else "")
        outcomes = " | ".join(line[side]["outcome"] for side in SIDES)
        reasons = dict.fromkeys(_plain(line[side]["why"]) for side in SIDES)
        yield f"| `{_plain(name)}` | {outcomes} | {'; '.join(filter(None, reasons))} |"
    waiting = [f"`{_plain(change.name)}`" for change in changes() if change.name not in lines]
    if waiting:
        yield f"\nNot tried yet: {', '.join(waiting)}."
    yield "\n## Left out\n\n| options | why |\n|---|---|"
    for why, names in LEFT_OUT.items():
        yield f"| {', '.join(f'`{name}`' for name in sorted(names.split()))} | {why} |"


def _plain(text: str) -> str:
    """Return a text that fits into a cell."""
    words = " ".join(text.replace("|", "/").replace("<", "&lt;").split())
    return words if len(words) <= MAX_CELL else re.sub(r"[\w`-]+$", "", words[:MAX_CELL]) + "…"


if __name__ == "__main__":
    PAGE.write_text(page(read(RECORD)))
