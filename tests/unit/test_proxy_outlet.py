"""The log of a proxy whose reader stops: nobody waits, what is lost is counted and said."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from proxy.observe.outlet import Outlet
from tests.support import eventually


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes little."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read(reader: int, count: int) -> str:
    """Read until so many lines have come."""
    text = ""
    while text.count("\n") < count:
        text += os.read(reader, 1 << 20).decode()
    return text


def test_nobody_waits_for_who_does_not_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    outlet = Outlet(writer, max_bytes=100_000)
    outlet.take_over()
    line = "x" * 999
    for _ in range(300):
        outlet.put(line)
    assert 100 <= outlet.num_dropped < 300
    dropped = outlet.num_dropped
    assert read(reader, 300 - dropped).count(line) == 300 - dropped
    eventually(lambda: not outlet._num_chars)
    outlet.put("at last")
    assert read(reader, 2) == f"{dropped} lines of the log are missing here\nat last\n"
    assert outlet.num_dropped == dropped
    outlet.close()
    outlet.close()


def test_the_end_does_not_wait_for_ever() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    outlet.take_over()
    outlet.put("x" * (1 << 20))
    closing = threading.Thread(target=outlet.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    outlet.put("later")
    assert outlet.num_dropped == 1
    os.close(reader)
    assert outlet._thread is not None
    outlet._thread.join(30)
    assert not outlet._thread.is_alive()
    os.close(writer)


def test_each_logger_keeps_its_form(pipe: tuple[int, int]) -> None:
    loggers = [logging.getLogger(f"test outlet {name}") for name in ("plain", "long")]
    for logger, form in zip(loggers, ("%(message)s", "%(levelname)s %(message)s"), strict=True):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
        logger.propagate, logger.disabled = False, False
        logger.setLevel(logging.INFO)  # an earlier test may have left the root without one
    outlet = Outlet(pipe[1])
    outlet.take_over(*loggers)
    for logger in loggers:
        logger.warning("said %d", 1)
    assert read(pipe[0], 2) == "said 1\nWARNING said 1\n"
    outlet.close()


def test_a_reader_that_is_gone_is_no_failure() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer)
    outlet.take_over()
    outlet.put("nobody hears it")
    eventually(lambda: outlet.num_dropped == 1)
    outlet.close()
    os.close(writer)
