"""The demo on real vLLM: right when all is right, and wrong when one byte is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from p2p_engine.cli.demo import DemoOptions, run_demo
from tests import marks

ROOT = Path(__file__).parents[2]
CORRUPTING = "tests.vllm.cli_corrupting_connector"

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(900)]


def run(options: DemoOptions, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code and what was said."""
    code = run_demo(options, Console(width=160))
    return code, capsys.readouterr().out.splitlines()


def test_every_mode_moves_everything_with_keys(capsys: pytest.CaptureFixture[str]) -> None:
    options = DemoOptions(modes=["PUT_ASYNC", "PUT", "GET"], num_requests=24, keys=True)
    code, said = run(options, capsys)
    assert re.fullmatch(r"72/72 identical, 0 recomputed, [1-9]\d{7,} bytes transferred", said[-1])
    assert code == 0


def test_one_flipped_byte_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = DemoOptions(num_requests=3, decode_config={"kv_connector_module_path": CORRUPTING})
    code, said = run(options, capsys)
    # Everything was moved, and yet the request that it struck is not what it should be.
    assert re.fullmatch(r"2/3 identical, 0 recomputed, [1-9]\d{6,} bytes transferred", said[-1])
    assert any(re.match(r"PUT_ASYNC: request \d .* instead of \[", line) for line in said)
    assert code == 1
