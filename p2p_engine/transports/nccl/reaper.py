"""Reaper: aborts communicators in threads of their own, because an abort may never return.

An abort that exceeds its deadline is in quarantine: it is counted, and its memory is not reused.
Everything else continues. If it returns after all, the quarantine ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device
from p2p_engine.transports.nccl.library import Nccl

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0


class Reaper:
    """The aborts of one device's communicators."""

    def __init__(self, nccl: Nccl, device: Device) -> None:
        self._nccl = nccl
        self._device = device
        self._changed = threading.Condition()  # guards _since
        self._since: dict[int, float] = {}
        self.num_aborted = 0

    def abort(self, comm: int, registrations: list[int], ended: Callable[[], None]) -> None:
        """Undo registrations, then abort a communicator, in a thread; `ended` is called in the
        device's thread."""
        with self._changed:
            self._since[comm] = time.monotonic()
        self.num_aborted += 1
        threading.Thread(
            target=self._run, args=(comm, registrations, ended), name="p2p-reaper", daemon=True
        ).start()

    def num_pending(self) -> int:
        """Return how many aborts have not returned."""
        with self._changed:
            return len(self._since)

    def num_quarantined(self) -> int:
        """Return how many aborts have not returned in time."""
        with self._changed:
            now = time.monotonic()
            return sum(now - since > PATIENCE_SECONDS for since in self._since.values())

    def wait(self, timeout: float) -> bool:
        """Block until every abort has returned, for at most `timeout` seconds; returns whether it
        has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._since, timeout)

    def _run(self, comm: int, registrations: list[int], ended: Callable[[], None]) -> None:
        restore_affinity()
        steps: list[Callable[[], object]] = [
            partial(self._device.cuda.use, self._device.index),
            *(partial(self._nccl.deregister, comm, item) for item in registrations),
            partial(self._nccl.abort, comm),
        ]
        for step in steps:
            try:  # if one fails, the others still run
                step()
            except TransportError as error:
                logger.warning("a communicator could not be ended cleanly: %s", str(error))
        self._device.post(ended)  # before a waiter closes the device
        with self._changed:
            del self._since[comm]
            self._changed.notify_all()
