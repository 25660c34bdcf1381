"""The Python examples of the documents run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(example, id=f"{page.name}-{number}")
    for page in PAGES
    for number, example in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs(example: str) -> None:
    run = [sys.executable, "-W", "error", "-c", example]
    outcome = subprocess.run(run, capture_output=True, text=True, timeout=50, check=False)
    assert outcome.returncode == 0, outcome.stderr
