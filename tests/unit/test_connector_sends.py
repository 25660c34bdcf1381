"""What one rank tells its engine, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from p2p_engine.config import SendMode
from p2p_engine.connector.orders import EndedSend, Party, SendStep
from p2p_engine.connector.sends import Sends
from p2p_engine.wire.messages import TransferKey


def open_transfer(*args: Any, **kwargs: Any) -> Mock:
    return Mock(done=False, released=False, error=None)


def test_what_was_kept_back_and_given_up_is_not_pushed_later() -> None:
    """A pull of it is still being written when vLLM resets its caches, and vLLM lacks blocks."""
    engine = Mock()
    engine.config = SimpleNamespace(
        layerwise=False, transfer_timeout_seconds=60.0, max_renewal_seconds=3600.0
    )
    engine.send.side_effect = engine.hold.side_effect = open_transfer
    group = Mock(number=0, table=0, is_draft=False, is_state=False, window=0, block_size=16)
    group.first_block.return_value = 0
    group.num_full_blocks.side_effect = lambda num_tokens: num_tokens // 16
    staging = Mock(is_copy=False)
    staging.take.side_effect = lambda block_ids: block_ids
    cache: Any = SimpleNamespace(group=group, staging=staging, layer_names=(), cache=None)
    sends = Sends(engine, cache)
    party = Party(
        "r", TransferKey("t"), "host:1", b"binding", SendMode.PUT_ASYNC, 96, held_tokens=48
    )
    sends.start_step([SendStep(party, (np.arange(1, 7),), 96)])
    sends.finish_step()
    sends.end([EndedSend(party, None, True)])
    engine.hold.assert_called_once()
    engine.send.reset_mock()
    sends.give_up("vLLM has reset its caches")
    sends.spill(["r"])
    engine.send.assert_not_called()
