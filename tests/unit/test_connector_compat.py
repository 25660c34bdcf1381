"""What the connector makes of the vLLM that it finds."""

from __future__ import annotations

import logging

import pytest

from p2p_engine.connector.compat import show_logs


class Told(logging.Handler):
    """Counts the lines that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> Told:
    """A handler of vLLM's logger, which passes nothing on, and no handler of ours yet."""
    handler = Told()
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("p2p_engine")
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    return handler


def test_our_lines_come_once_where_the_root_logger_writes_too(vllms: Told) -> None:
    root = Told()
    logging.getLogger().addHandler(root)
    try:
        show_logs()
        show_logs()
        logging.getLogger("p2p_engine.engine").warning("a line")
    finally:
        logging.getLogger().removeHandler(root)
    assert vllms.lines + root.lines == ["a line"]
