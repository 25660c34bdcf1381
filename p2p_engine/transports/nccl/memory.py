"""The device memory that a communicator of two ranks takes: pure arithmetic.

From NCCL's source (2.26 to 2.30, `init.cc`, `channel.cc`, `include/alloc.h`): with cuMem, each
small structure is an allocation of its own of 2 MiB. A communicator has two, and each channel has
three. The first send adds one for each channel (its flags). The first receive adds one of 10 MiB
for each channel (4 KiB of flags, LL 512 KiB, LL128 4.7 MiB and SIMPLE 4 MiB, rounded up). Over a
network, both sides have a pool of 2 MiB for each channel instead.
"""

from __future__ import annotations

import enum

MIB = 1 << 20
_COMMUNICATOR = 4
_CHANNEL = 6


class Side(enum.Enum):
    """The use that was made of a communicator."""

    IDLE = enum.auto()
    SENDER = enum.auto()
    RECEIVER = enum.auto()
    NETWORK = enum.auto()


_MORE_PER_CHANNEL = {Side.IDLE: 0, Side.SENDER: 2, Side.RECEIVER: 10, Side.NETWORK: 2}


def estimated_bytes(num_channels: int, side: Side = Side.IDLE) -> int:
    """Return the bytes on one rank of a group of two, before (IDLE) or after its first send or
    receive.

    With c channels: 4 + 6 c MiB at first; then 2 c more for a sender, 10 c for a receiver in one
    host.
    """
    return (_COMMUNICATOR + (_CHANNEL + _MORE_PER_CHANNEL[side]) * num_channels) * MIB
