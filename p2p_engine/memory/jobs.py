"""What a piece of work looks like to those who wait for it, whoever does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Job(Protocol):
    """One movement of bytes. Once `done`, its memory is not touched any more."""

    @property
    def state(self) -> str:
        """One of queued, running, done, failed, cancelled."""
        ...

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def error(self) -> str | None:
        """Why it failed."""
        ...

    @property
    def tag(self) -> object:
        """Who is told of its end."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        ...

    @property
    def checksum(self) -> int | None:
        """CRC-32C of its bytes; None: not asked for, not done, or on a GPU."""
        ...

    def cancel(self) -> None:
        """Ask for its end; returns at once."""
        ...

    def wait(self, timeout: float, /) -> bool:
        """Block until it has ended, at most `timeout` seconds; whether it has."""
        ...


class Moment(Protocol):
    """When something that runs elsewhere, on a GPU, is over."""

    def is_complete(self) -> bool:
        """Whether it is over; never blocks."""
        ...


class Copier(Protocol):
    """What copies between regions that this process can reach: a mover, or a device. A device also
    takes `after`, moments to wait for; what runs on the host needs none."""

    @property
    def copy(self) -> Callable[..., Job]:
        """Copy (sources, destinations, lengths): `mempool.Mover.copy` says the rest."""
        ...


def after(moments: Iterable[Moment]) -> dict[str, Any]:
    """Return the argument that makes a copy wait for these moments."""
    return {"after": moments} if moments else {}


def still_running(jobs: Iterable[Job], timeout: float) -> set[Job]:
    """Wait for jobs, at most `timeout` seconds for all; return those that have not ended."""
    deadline = time.monotonic() + timeout
    return {job for job in jobs if not job.wait(max(0.0, deadline - time.monotonic()))}
