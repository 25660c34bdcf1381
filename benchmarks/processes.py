"""A contender's other half in a process of its own, called from the benchmark like an object."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
CALL_SECONDS = 120.0


class RemoteError(Exception):
    """The other process failed, ended, or did not answer in time."""


class Remote:
    """Makes `factory(*arguments)` in a new process and calls its methods, one at a time."""

    def __init__(self, factory: Callable[..., Any], *arguments: object) -> None:
        """Start the process and wait until the object is made.

        Raises:
            RemoteError: making it failed, and how.
        """
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.result(CALL_SECONDS)

    def call(self, method: str, *arguments: object, timeout: float = CALL_SECONDS) -> Any:
        """Call a method and wait for what it returns.

        Raises:
            RemoteError: it raised, the process ended, or `timeout` seconds went by.
        """
        self.begin(method, *arguments)
        return self.result(timeout)

    def begin(self, method: str, *arguments: object) -> None:
        """Call a method; `result` must follow."""
        self._pipe.send((method, arguments))

    def result(self, timeout: float = CALL_SECONDS) -> Any:
        """Wait for the result of what was begun; raises like `call`."""
        if not self._pipe.poll(timeout):
            raise RemoteError(f"no answer within {timeout:g} s")
        try:
            value, failure = self._pipe.recv()
        except EOFError as error:
            raise RemoteError("the process has ended") from error
        if failure:
            raise RemoteError(failure)
        return value

    def close(self) -> None:
        """End the process: the object's `close` is called first; idempotent."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)

    def __enter__(self) -> Remote:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = _answer(pipe, lambda: factory(*arguments), quiet=True)
    while served is not None:
        try:
            request = pipe.recv()
        except EOFError:  # the benchmark is gone
            request = None
        if request is None:
            served.close()
            return
        method, given = request
        _answer(pipe, functools.partial(getattr(served, method), *given))


def _answer(pipe: Connection, call: Callable[[], Any], *, quiet: bool = False) -> Any:
    try:
        value = call()
        pipe.send((None if quiet else value, ""))
    except Exception:  # noqa: BLE001 - told to the caller
        pipe.send((None, traceback.format_exc()))
        return None
    return value
