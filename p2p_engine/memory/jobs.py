"""The protocols of jobs and copiers, for callers that do not care which part does the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Job(Protocol):
    """One movement of bytes. Once it is `done`, its memory is not touched any more."""

    @property
    def state(self) -> str:
        """Return one of queued, running, done, failed, cancelled."""
        ...

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        ...

    @property
    def error(self) -> str | None:
        """Return why the job failed, or None."""
        ...

    @property
    def tag(self) -> object:
        """Return the callback or owner that is told of the end."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the bytes moved."""
        ...

    @property
    def checksum(self) -> int | None:
        """Return the CRC-32C of the bytes; None if not asked for, or not done."""
        ...

    def cancel(self) -> None:
        """Ask the job to end; returns at once."""
        ...

    def wait(self, timeout: float, /) -> bool:
        """Block until the job has ended, for at most `timeout` seconds; returns whether it has."""
        ...


class Moment(Protocol):
    """A point in the work of a GPU, for which a copy can wait."""

    def is_complete(self) -> bool:
        """Whether the point is reached; never blocks."""
        ...


class Copier(Protocol):
    """Copies between regions that this process can reach: a mover, or a device. A device also takes
    `after`, moments to wait for; a copy on the host needs none."""

    @property
    def copy(self) -> Callable[..., Job]:
        """Copy (sources, destinations, lengths); arguments as for `mempool.Mover.copy`."""
        ...

    @property
    def check(self) -> Callable[..., Job]:
        """Compute a checksum; arguments as for `mempool.Mover.check`."""
        ...


def after(moments: Iterable[Moment]) -> dict[str, Any]:
    """Return the keyword argument that makes a copy wait for these moments."""
    return {"after": moments} if moments else {}


def still_running(jobs: Iterable[Job], timeout: float) -> set[Job]:
    """Block until jobs have ended, for at most `timeout` seconds in all; return those that have
    not."""
    deadline = time.monotonic() + timeout
    return {job for job in jobs if not job.wait(max(0.0, deadline - time.monotonic()))}
