"""Transfer: it ends once, and whoever waits is told."""

from __future__ import annotations

import threading

import pytest

from p2p_engine.errors import PeerLost, TransferTimeout
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import TransferKey


def make(asked: list[str] | None = None) -> Transfer:
    heard = asked if asked is not None else []
    changed = threading.Condition(threading.RLock())
    return Transfer(TransferKey("key"), 5, changed, lambda _, reason: heard.append(reason))


def end(transfer: Transfer, error: PeerLost | None = None) -> None:
    with transfer._changed:
        transfer.end(error)


def test_done_implies_released() -> None:
    transfer = make()
    end(transfer)
    assert transfer.released
    transfer.wait(0)


def test_second_end_changes_nothing() -> None:
    transfer, error = make(), PeerLost("first")
    end(transfer, error)
    end(transfer, PeerLost("second"))
    end(transfer)
    assert transfer.error is error


def test_wait_raises_the_error_each_time() -> None:
    transfer = make()
    end(transfer, PeerLost("gone"))
    for _ in range(2):
        with pytest.raises(PeerLost, match="gone"):
            transfer.wait(0)


@pytest.mark.parametrize("timeout", [0, -1, 0.01])
def test_wait_in_vain_names_the_key(timeout: float) -> None:
    with pytest.raises(TransferTimeout, match="key"):
        make().wait(timeout)
    assert not make().wait_released(timeout)


def test_release_comes_before_the_end() -> None:
    transfer = make()
    with transfer._changed:
        transfer.release()
    assert transfer.wait_released(0)
    assert not transfer.done


def test_every_waiter_is_woken() -> None:
    transfer, woken = make(), threading.Barrier(4)

    def wait() -> None:
        transfer.wait(10)
        woken.wait(10)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    end(transfer)
    woken.wait(10)
    for thread in threads:
        thread.join(10)


def test_cancel_only_asks() -> None:
    asked: list[str] = []
    transfer = make(asked)
    transfer.cancel("why")
    assert asked == ["why"]
    assert not transfer.done


@pytest.mark.parametrize("state", ["open", "released", "done"])
def test_representation_shows_the_state(state: str) -> None:
    transfer = make()
    with transfer._changed:
        if state == "released":
            transfer.release()
        elif state == "done":
            transfer.end()
    assert state in repr(transfer)
