"""RareWarnings: what strangers cause does not fill the log."""

from __future__ import annotations

import logging

import pytest

from p2p_engine.rare import RARE_SECONDS, RareWarnings


def test_a_flood_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    rare = RareWarnings(logging.getLogger("test"), lambda: now[0])
    for number in range(1000):
        rare.warn("refused: %d", number)
    now[0] += RARE_SECONDS
    rare.warn("refused: %r", "a\nline")
    assert caplog.messages == ["refused: 0", "refused: 'a\\nline' (and 999 such lines before)"]
