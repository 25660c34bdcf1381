"""Where our threads may run: wherever the parent process may.

vLLM pins its workers' main threads to cores, and the threads that they make inherit that. A pinned
thread of ours would wait, for seconds on a busy machine, for the one core that a model computes on.
The native threads do the same for themselves (`csrc/thread.c`).
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
