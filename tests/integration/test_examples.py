"""The examples of the README run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_of_the_engine_runs() -> None:
    (example,) = EXAMPLES
    run = [sys.executable, "-W", "error", "-c", example]
    outcome = subprocess.run(run, capture_output=True, text=True, timeout=50, check=False)
    assert outcome.returncode == 0, outcome.stderr
