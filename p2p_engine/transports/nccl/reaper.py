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
LOOK_SECONDS = 0.01


class Reaper:
    """The aborts of one device's communicators."""

    def __init__(self, nccl: Nccl, device: Device) -> None:
        self._nccl = nccl
        self._device = device
        self._changed = threading.Condition()  # guards _since
        self._since: dict[int, float] = {}
        self.num_aborted = 0

    def abort(
        self,
        comm: int,
        registrations: list[int],
        ended: Callable[[], None],
        *,
        was_connected: bool = True,
    ) -> None:
        """Undo registrations, then abort a communicator, in a thread; `ended` is called in the
        device's thread. `was_connected`: a byte has moved, so that no call waits for the peer."""
        with self._changed:
            self._since[comm] = time.monotonic()
        self.num_aborted += 1
        steps: list[Callable[[], object]] = [
            partial(self._device.cuda.use, self._device.index),
            partial(self._deregister, comm, registrations, was_connected),
            partial(self._nccl.abort, comm),
        ]
        threading.Thread(
            target=self._run, args=(comm, steps, ended), name="p2p-reaper", daemon=True
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

    def _run(self, comm: int, steps: list[Callable[[], object]], ended: Callable[[], None]) -> None:
        restore_affinity()
        for step in steps:
            self._try(step)
        self._device.post(ended)  # before a waiter closes the device
        with self._changed:
            del self._since[comm]
            self._changed.notify_all()

    def _deregister(self, comm: int, registrations: list[int], was_connected: bool) -> None:
        """Undo the registrations before the abort, also of a failed group.

        An abort must not find any that a network card has used. NCCL 2.21.5 to 2.30.7 at least:
        commFree (init.cc) runs ncclProxyDestroy, which frees the proxy's state, and later
        ncclRegCleanup, which asks that proxy to undo them (ncclNetDeregBuffer). Before the abort,
        the proxy is our own process's, which answers whatever the peer does.

        Another call that is still in progress may use the same registrations and the same
        connection to the proxy, without a lock. If it is the first launch, it may wait for a dead
        peer for ever, but no card knows our memory before it has connected. Any later launch ends.
        """
        while registrations and self._is_in_progress(comm):
            if not was_connected:
                return
            time.sleep(LOOK_SECONDS)
        for registration in registrations:
            self._try(partial(self._nccl.deregister, comm, registration))

    def _is_in_progress(self, comm: int) -> bool:
        try:
            return self._nccl.is_in_progress(comm)
        except TransportError:  # it has failed: its calls have ended
            return False

    @staticmethod
    def _try(step: Callable[[], object]) -> None:
        """Run a step; if it fails, the others still run."""
        try:
            step()
        except TransportError as error:
            logger.warning("a communicator could not be ended cleanly: %s", str(error))
