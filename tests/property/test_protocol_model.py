"""One transfer and any one fault, at any moment: no state that it can reach breaks a promise or has
no way to the end. `make model` explores two transfers side by side."""

from __future__ import annotations

import pytest

from tests.property.explore import explore
from tests.property.protocol_model import Bounds, TransferModel
from tests.property.transfer_machine import (
    TransferMachine,
    WhenReceiverWrites,
    WhenSenderWrites,
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [WhenSenderWrites, WhenReceiverWrites])
def test_every_state_keeps_the_promises_and_has_an_end(kind: type[TransferMachine]) -> None:
    assert explore(TransferModel(kind, Bounds(num_keys=1, num_faults=1)), limit=20_000) > 1_000


@pytest.mark.timeout(400)
def test_a_broken_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself: a store that takes a doubled OFFER for a new one loses a region."""
    monkeypatch.setattr("p2p_engine.receive.store.Store._answer_again", lambda *_: False)
    with pytest.raises(AssertionError, match="double"):
        explore(TransferModel(WhenSenderWrites, Bounds(num_keys=1, num_faults=1)), limit=20_000)
