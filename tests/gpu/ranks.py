"""Transports of NCCL on one device, without engines: what they keep when there are many peers."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from typing import Any

from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.transports.base import Channel
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.transport import NcclTransport
from tests.support import eventually

BUFFER_BYTES = 2 << 20  # for all receiving ranks: nothing is sent but the first byte
EPOCH = 1  # of the sender, which all receivers expect


class Ranks:
    """One device, one control thread, and the transports made so far."""

    def __init__(self, cuda: Cuda, nccl: Nccl, max_groups: int) -> None:
        self._nccl = nccl
        self._max_groups = max_groups
        self._device = Device(cuda, 0)
        self._cuda = cuda
        self._buffer = cuda.allocate(BUFFER_BYTES), BUFFER_BYTES
        self._control = ControlPlane("127.0.0.1", range(1), name="p2p-ranks")
        self._control.start()
        self._transports: list[NcclTransport] = []
        self._channels: list[Channel] = []

    def listen(self) -> dict[str, str]:
        """Make a receiving rank; how to connect to it."""
        endpoint = self._make(secrets.randbits(60), receives=True).invite(EPOCH)
        assert endpoint is not None
        return endpoint

    def dial(self, endpoints: list[dict[str, str]]) -> dict[str, Any]:
        """Connect the sending rank to these, one after the other; its statistics."""
        transport = self._transports[0] if self._transports else self._make(EPOCH, receives=False)
        for endpoint in endpoints:
            outcome: Future[Channel | TransportError] = Future()
            self._control.call_soon(
                lambda e=endpoint, o=outcome: transport.connect(e, o.set_result)  # type: ignore[misc]
            )
            channel = outcome.result(120)
            if isinstance(channel, TransportError):
                raise channel
            self._channels.append(channel)
        made = len(self._channels)
        eventually(lambda: transport.stats()["made"] == made, timeout=10)
        return transport.stats()

    def close(self) -> None:
        """End all groups, then everything."""
        for channel in self._channels:
            channel.close()
        self._control.stop(5)
        for transport in self._transports:
            transport.close()
        assert self._device.close(10)
        self._cuda.free(self._buffer[0])
        self._control.close(5)

    def _make(self, epoch: int, *, receives: bool) -> NcclTransport:
        transport = NcclTransport(
            self._nccl,
            self._device,
            self._control,
            epoch,
            "127.0.0.1",
            buffer=self._buffer if receives else None,
            overflows=False,
            num_channels=2,
            max_groups=self._max_groups,
            patience_seconds=60.0,
            slab_bytes=256 << 10,
        )
        self._transports.append(transport)
        return transport
