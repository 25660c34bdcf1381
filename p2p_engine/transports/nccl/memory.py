"""How many bytes of device memory a communicator of two ranks takes: pure arithmetic.

Read in NCCL's source (2.26 to 2.30, `init.cc`, `channel.cc`, `include/alloc.h`): with cuMem, each
small structure is an allocation of its own of 2 MiB. There are two for a communicator and three
for a channel. The first send adds one for each channel (its flags); the first receive one of 10 MiB
(4 KiB of flags, LL 512 KiB, LL128 4.7 MiB and SIMPLE 4 MiB, rounded up). Over a network both sides
have a pool of 2 MiB for each channel instead.
"""

from __future__ import annotations

import enum

MIB = 1 << 20
_COMMUNICATOR = 4
_CHANNEL = 6


class Side(enum.Enum):
    """What has been done with a communicator."""

    IDLE = enum.auto()
    SENDER = enum.auto()
    RECEIVER = enum.auto()
    NETWORK = enum.auto()


_MORE_PER_CHANNEL = {Side.IDLE: 0, Side.SENDER: 2, Side.RECEIVER: 10, Side.NETWORK: 2}


def estimated_bytes(num_channels: int, side: Side = Side.IDLE) -> int:
    """Bytes on one rank of a group of two, before (IDLE) or after its first send or receive.

    4 + 6 c MiB at first, then 2 c for a sender, 10 c for a receiver in one host.
    """
    return (_COMMUNICATOR + (_CHANNEL + _MORE_PER_CHANNEL[side]) * num_channels) * MIB
