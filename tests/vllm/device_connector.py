"""Our connector, told that vLLM's cache is on a device: KV goes by way of the host buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_engine.connector import connector
from tests.doubles.device import DeviceDouble

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp


class DeviceConnector(connector.P2pNcclConnector):
    """Its worker knows the device's handles, and copies by the double's operation."""

    _device: DeviceDouble

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register handles, which have no memory."""
        self._device = DeviceDouble(kv_caches)
        super().register_kv_caches(self._device.handles)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Copy by the device's operation: the CPU platform has none."""
        super().set_host_xfer_buffer_ops(self._device.copy_blocks)


P2pNcclConnector = DeviceConnector  # the name that `kv_connector_module_path` asks for
