"""Channels that are closed later: whoever waits for one is told, whatever the others do."""

from __future__ import annotations

from typing import Any, cast

import pytest

from p2p_engine.peers.closing_channels import ClosingChannels


class SlowChannel:
    """Its copies stop when the test says so."""

    is_stopped = False

    def close(self, timeout: float) -> bool:
        return self.is_stopped


def test_a_fault_of_one_who_waits_keeps_no_news_from_the_others() -> None:
    closing, told = ClosingChannels(lambda: 0.0), []
    channels = [SlowChannel() for _ in range(3)]

    def fail() -> None:
        raise RuntimeError("a bug")

    for channel, then in zip(channels, (fail, lambda: told.append(1), fail), strict=True):
        closing.close(cast("Any", channel), "peer", then)
    for channel in channels:
        channel.is_stopped = True
    with pytest.raises(RuntimeError, match="a bug"):
        closing.try_again()
    assert told == [1]
    assert len(closing) == 0
