"""A stand-in for a slow kernel, on the driver or its double."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from p2p_engine.gpu.cuda import Cuda

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SECONDS = 20.0  # that it runs at most


class SlowKernel:
    """Keeps a stream busy until it is told to end. What is in the stream behind it waits."""

    def __init__(
        self, cuda: Cuda, stream: int, wait: Callable[[float], object] | None = None
    ) -> None:
        """Enqueue it. `wait` replaces waiting for `end`, and gets the seconds that it may take.
        Keep the object until it has run."""
        self._ended = threading.Event()
        wait = wait or self._ended.wait
        self._function = _HOST_FUNCTION(lambda _: wait(SECONDS) and None)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        cuda.call(cuda.driver.cuLaunchHostFunc, stream, cuda.driver.CUhostFn(address), 0)

    def end(self) -> None:
        """Let it end; returns at once."""
        self._ended.set()
