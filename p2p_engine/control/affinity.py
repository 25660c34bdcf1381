"""CPU affinity: lets our threads run on every core that the parent process may use.

vLLM pins the main threads of its workers to cores, and threads that they start inherit the mask. A
pinned thread of ours could wait for seconds, on a busy machine, for the one core that a model
computes on. The native threads reset their own affinity (`csrc/thread.c`).
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def cores_to_take_back() -> set[int]:
    """The cores of the parent process, if they are more than the calling thread has; else none."""
    try:
        allowed = os.sched_getaffinity(os.getppid())
        return allowed if allowed > os.sched_getaffinity(0) else set()
    except OSError as error:
        logger.debug("the parent process's cores are unknown: %s", str(error))
        return set()


def restore_affinity() -> None:
    """Let the calling thread run wherever the parent process may."""
    cores = cores_to_take_back()
    if cores:
        os.sched_setaffinity(0, cores)
