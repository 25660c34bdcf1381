"""Two hosts and the distance between them: TUN devices, and a relay that delays each packet.

It needs no privilege but to be root of a user and a network namespace of its own, and no queueing
discipline of the kernel. It loses nothing, and it is the link's bottleneck.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

MTU_BYTES = 32000  # segments of the size that network cards cut and join by themselves
QUEUE_PACKETS = 10000  # more than any window: nothing is dropped
MOST_AT_ONCE = 64  # packets of one direction before the other has its turn
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class DelayedLink:
    """The relay, in a process of its own in the namespace of the near host."""

    def __init__(self, near: str, far: str, far_pid: int, round_trip_seconds: float) -> None:
        """Give the addresses to this namespace and to that of the process `far_pid`."""
        Path("/proc/self/timerslack_ns").write_text("1000")  # a wait is a tenth of a delay late
        self._delay_seconds = round_trip_seconds / 2
        self._devices = [_tun("near"), _tun("far")]
        _run(f"ip link set far netns {far_pid}")
        _bring_up("near", near)
        _bring_up("far", far, f"nsenter --target {far_pid} --net ")
        threading.Thread(target=self._relay, name="relay", daemon=True).start()

    def _relay(self) -> None:
        queues: dict[int, deque[tuple[float, bytes]]] = {to: deque() for to in self._devices}
        others = dict(zip(self._devices, reversed(self._devices), strict=True))
        while True:
            due = min((queue[0][0] for queue in queues.values() if queue), default=None)
            wait = None if due is None else max(0.0, due - time.monotonic())
            for device in select.select(self._devices, [], [], wait)[0]:
                self._take(device, queues[others[device]])
            now = time.monotonic()
            for to, queue in queues.items():
                while queue and queue[0][0] <= now:
                    os.write(to, queue.popleft()[1])

    def _take(self, device: int, queue: deque[tuple[float, bytes]]) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(device, MTU_BYTES)
            except BlockingIOError:
                return
            queue.append((time.monotonic() + self._delay_seconds, packet))


def _tun(name: str) -> int:
    """Make a device; its descriptor stays with this process, wherever the device goes."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _bring_up(device: str, address: str, inside: str = "") -> None:
    _run(f"{inside}ip addr add {address}/24 dev {device}")
    _run(f"{inside}ip link set {device} mtu {MTU_BYTES} txqueuelen {QUEUE_PACKETS} up")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
