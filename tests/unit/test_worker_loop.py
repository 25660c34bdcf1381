"""A loop's thread, and who waits for it."""

from __future__ import annotations

import threading

import pytest

from p2p_engine.errors import TransportError
from p2p_engine.gpu.worker_loop import Loop

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_call_that_does_not_end_in_time_is_an_error_of_ours() -> None:
    """Whatever `concurrent.futures` calls it: before Python 3.11 that is no TimeoutError."""
    loop, may_end = Loop("p2p-test"), threading.Event()
    try:
        with pytest.raises(TransportError, match=r"did not answer in 0\.01 s"):
            loop.run(lambda: may_end.wait(30), 0.01)
        may_end.set()
        assert loop.run(lambda: 7, 10.0) == 7
    finally:
        may_end.set()
        assert loop.close(10.0)
