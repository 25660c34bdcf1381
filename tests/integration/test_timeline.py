"""The stages that a transfer logs on its way, and what `p2p-engine trace` makes of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from p2p_engine.cli.app import app
from p2p_engine.cli.trace import read_events, spans_of
from tests import marks
from tests.doubles.pair import MakePair, prompt_of

pytestmark = marks.simulated_vllm

PREFILL = ["request to send arrives", "computed", "prefill ends"]
CHUNK = ["OFFER said", "GRANT said", "GRANT heard", "write begins"]
WRITTEN = ["write begins", "written", "COMMIT heard"]  # D may see the bytes before P does
LANDING = ["landed", "scatter begins", "delivered", "received", "reported", "load known"]
DECODE = ["request to load arrives", "load ordered", "receive begins"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.DEBUG, "p2p_engine.timeline")
    return tmp_path / "both.log"


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_every_stage_is_logged_in_order(
    make_pair: MakePair, log: Path, caplog: pytest.LogCaptureFixture, send_type: str
) -> None:
    pair = make_pair(send_type=send_type)
    pair.ask(prompt_of(100))
    pair.run()
    pair.check_answers(num_computed=1)
    log.write_text(caplog.text)
    stages = [span.stage for span in spans_of(read_events([log]))]
    ways = [PREFILL, DECODE, WRITTEN, [*CHUNK, *LANDING, "decode scheduled"]]
    if send_type == "GET":
        ways.append(["receive begins", "WANT said", "WANT heard", *CHUNK])
    for way in ways:
        assert [stage for stage in stages if stage in way] == way


def test_a_named_transfer_is_shown_and_others_are_not(
    make_pair: MakePair, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    for seed in (1, 2):
        pair.ask(prompt_of(40, seed=seed))
    pair.run()
    log.write_text(caplog.text)
    names = list(dict.fromkeys(event.transfer_id for event in read_events([log])))
    assert len(names) == 2
    for arguments, name in (([], names[1]), (["--id", names[0]], names[0])):
        result = run(str(log), *arguments)
        assert result.exit_code == 0
        mine = [event for event in read_events([log]) if event.transfer_id == name]
        assert len(result.output.splitlines()) == 1 + len({event.stage for event in mine})
    assert "no log has a transfer 'nobody'" in run(str(log), "--id", "nobody").output


def test_logs_without_stages_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("INFO nothing\n")
    assert "VLLM_LOGGING_LEVEL=DEBUG" in run(str(tmp_path / "empty.log")).output
    assert "No such file" in run(str(tmp_path / "absent.log")).output
