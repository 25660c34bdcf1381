"""Gpu: what an engine has beside its usual parts when its caches are on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from mempool import Mover
from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import ConfigError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.landing import DeviceLanding
from p2p_engine.memory.jobs import Moment
from p2p_engine.transports.base import Transport
from p2p_engine.transports.cuda_ipc import CudaIpcTransport
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.transport import NcclTransport, check_environment


class Gpu:
    """One device and the transports that move its memory."""

    def __init__(self, config: EngineConfig) -> None:
        """Find the libraries and start the device's thread.

        Raises:
            ConfigError: a library, or the device, is not there, or a setting would deadlock.
            TransportError: the device cannot be used.
        """
        self._config = config
        if "nccl" in config.transports:
            check_environment(os.environ)
            self._nccl = Nccl(config.nccl_library)
        cuda, index = Cuda(config.cudart_library), config.device_index
        if not index < cuda.device_count():
            raise ConfigError(f"device={config.device!r}: there are {cuda.device_count()} GPUs")
        self.device = Device(cuda, index)
        self._transport: NcclTransport | None = None

    def landing(self) -> DeviceLanding:
        """Make the landing memory: buffer on the device, pool in registered host memory.

        Raises:
            OSError: the host memory cannot be mapped.
            TransportError: the device has too little memory.
        """
        config = self._config
        return DeviceLanding(
            self.device, config.kv_buffer_size, config.pool_bytes, page_lock=config.page_lock
        )

    def transport(
        self,
        name: str,
        mover: Mover,
        landing: DeviceLanding | None,
        control: ControlPlane,
        epoch: int,
    ) -> Transport:
        """Make the transport of this name."""
        config = self._config
        if name == "cuda_ipc":
            return CudaIpcTransport(self.device, mover, landing, control, epoch)
        self._transport = NcclTransport(
            self._nccl, self.device, control, epoch, config.host,
            buffer=None if landing is None else (landing.device_address, landing.device_bytes),
            overflows=landing is not None and config.pool_bytes > 0,
            num_channels=config.nccl_num_channels,
            max_groups=config.nccl_max_groups,
            patience_seconds=config.connect_timeout_seconds,
        )  # fmt: skip
        return self._transport

    def stop(self, timeout: float) -> bool:
        """Start nothing more; whether all that moves bytes has ended, within `timeout` seconds."""
        if self._transport is not None:
            self._transport.stop()
        return self.device.stop_jobs(timeout)

    def now(self, stream: int | None) -> tuple[Moment, ...]:
        """Return the moment that a caller's stream (None: torch's current one) has reached."""
        if stream is None:
            stream = 0
            if torch.cuda.is_available():
                stream = torch.cuda.current_stream(self.device.index).cuda_stream
        return (self.device.record(stream),)

    def stats(self) -> dict[str, Any]:
        """A snapshot of the groups of NCCL; empty without them."""
        return self._transport.stats() if self._transport is not None else {}
