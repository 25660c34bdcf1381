"""What a failed scenario shows of its instances' logs."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.evidence import MAX_LINES, decisive_lines, evidence_in

LOG = """\
(EngineCore pid=9) INFO 11-22 10:00:00 [core.py:1] ready
(Worker_TP0 pid=7) WARNING 11-22 10:00:01 [loads.py:190] load failed: request=7 error=late
(Worker_TP0 pid=7) INFO 11-22 10:00:02 [store.py:419] receive ended: key=7 error=late
(EngineCore pid=9) WARNING 11-22 10:00:00 [cpu.py:1] Overriding the block size
(EngineCore pid=9) ERROR 11-22 10:00:03 [core.py:9] EngineCore encountered a fatal error.
"""


def test_warnings_errors_and_our_own_ends_are_decisive_and_the_usual_noise_is_not() -> None:
    lines = decisive_lines(LOG.splitlines())
    assert [line.split("] ")[1].split(":")[0] for line in lines] == [
        "load failed",
        "receive ended",
        "EngineCore encountered a fatal error.",
    ]


def test_a_long_log_shows_its_end_only(tmp_path: Path) -> None:
    (tmp_path / "p0.log").write_text("".join(f"ERROR {i}\n" for i in range(3 * MAX_LINES)))
    (tmp_path / "proxy.log").write_text("nothing\n")
    found = evidence_in(tmp_path)
    assert list(found) == ["p0.log"]
    assert found["p0.log"].splitlines()[-1] == f"ERROR {3 * MAX_LINES - 1}"
    assert len(found["p0.log"].splitlines()) == MAX_LINES
