"""Outlet: a thread that writes the log, so that the event loop never waits for who reads it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque

# Of the log that is not written yet; beyond it, new lines are dropped.
MAX_BYTES = 4 << 20
FINISH_SECONDS = 1.0  # at the end, for what is not written yet


class Outlet:
    """Writes to one descriptor, which may be a pipe that nobody reads. Lines that there is no room
    for are counted, and the log says so where they are missing.

    The condition guards the queue and the counts.
    """

    def __init__(self, descriptor: int, max_bytes: int = MAX_BYTES) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._texts: deque[str] = deque()
        self._num_chars = 0
        self._num_missing = 0  # since the log said so
        self._is_open = True
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def take_over(self, *loggers: logging.Logger) -> None:
        """Write what these loggers wrote themselves until now."""
        for logger in loggers:
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                logger.addHandler(_Inlet(self, handler.formatter))
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, text: str) -> None:
        """Write some lines, soon; never blocks."""
        with self._condition:
            if not self._is_open or self._num_chars + len(text) > self._max_bytes:
                num_lines = text.count("\n") + 1
                self.num_dropped += num_lines
                self._num_missing += num_lines
                return
            if self._num_missing:
                self._texts.append(f"{self._num_missing} lines of the log are missing here")
                self._num_missing = 0
            self._texts.append(text)
            self._num_chars += len(text)
            self._condition.notify()

    def close(self) -> None:
        """Write what is left, for at most `FINISH_SECONDS`; idempotent."""
        with self._condition:
            self._is_open = False
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(FINISH_SECONDS)

    def _run(self) -> None:
        while (text := self._next()) is not None:
            rest = memoryview(f"{text}\n".encode(errors="backslashreplace"))
            while rest:
                rest = rest[self._write(rest) :]
            with self._condition:
                self._num_chars = max(0, self._num_chars - len(text))

    def _next(self) -> str | None:
        with self._condition:
            self._condition.wait_for(lambda: self._texts or not self._is_open)
            return self._texts.popleft() if self._texts else None

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            select.select([], [self._descriptor], [])
            return 0
        except OSError:  # nobody will ever read it
            with self._condition:
                self.num_dropped += 1
            return len(data)


class _Inlet(logging.Handler):
    """Takes records for an outlet, in the form of the handler whose place it has."""

    def __init__(self, outlet: Outlet, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self._outlet = outlet
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record over."""
        try:
            self._outlet.put(self.format(record))
        except Exception:  # noqa: BLE001  # as every handler of the library does
            self.handleError(record)
