"""Poller: watches descriptors for the thread of an event loop, and knows their callbacks."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable


class Poller:
    """Descriptors and callbacks. `wake` may be called from any thread; everything else belongs to
    the thread that waits, or to the holder of its lock."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._waking = threading.Lock()  # guards closing _wake_fd: its number may be reused
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.was_woken = False  # `wake` was called before the last `ready`
        self.epoll.register(self._wake_fd, select.EPOLLIN)

    def watch(self, fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        """Call back when `fd` is readable (with `writable`: or writable) or hung up. Replaces its
        previous callback."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if fd in self._callbacks:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop watching; idempotent. Call it before the fd is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def wake(self) -> None:
        """End a wait; does nothing after `close`. From any thread."""
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, seconds: float) -> None:
        """Block until a descriptor is ready, `wake` is called, or `seconds` have passed."""
        self.epoll.poll(seconds)

    def ready(self, seconds: float = 0.0) -> list[int]:
        """Return the descriptors that are ready; blocks for at most `seconds`, or until `wake`."""
        ready = [fd for fd, _ in self.epoll.poll(seconds)]
        self.was_woken = self._wake_fd in ready
        if self.was_woken:
            ready.remove(self._wake_fd)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return ready

    def callback(self, fd: int) -> Callable[[], None] | None:
        """Return the callback of a descriptor; None if another callback has ended the watch."""
        return self._callbacks.get(fd)

    def close(self) -> None:
        """Close the poller's own descriptors; idempotent."""
        with self._waking:
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)
        self.epoll.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._wake_fd < 0
