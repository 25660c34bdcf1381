"""A device that is none: its memory is the host's, and only copies like vLLM's touch it."""

from __future__ import annotations

import torch


class DeviceDouble:
    """A device whose memory only `copy_blocks`, which vLLM would give, can touch.

    What is registered are `handles`: the cache's shape and strides, without memory.
    """

    def __init__(self, caches: dict[str, torch.Tensor]) -> None:
        first = next(iter(caches.values()))
        size = first.untyped_storage().nbytes() // first.element_size()
        memory = torch.empty(size, dtype=first.dtype, device="meta")
        self.handles = {
            name: memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for name, cache in caches.items()
        }
        self.copied: dict[str, list[int]] = {"d2h": [], "h2d": []}  # blocks of the device's
        self.error: Exception | None = None
        self._layers = caches

    def copy_blocks(
        self,
        sources: dict[str, torch.Tensor],
        targets: dict[str, torch.Tensor],
        source_ids: list[int],
        target_ids: list[int],
        direction: str,
    ) -> None:
        """Copy blocks between the device and the host, as vLLM's copy_kv_blocks."""
        if self.error is not None:
            raise self.error
        assert list(sources) == list(targets)
        is_saving = direction == "d2h"
        device, host = (sources, targets) if is_saving else (targets, sources)
        self.copied[direction] += source_ids if is_saving else target_ids
        for name, handle in device.items():
            assert (handle.device.type, host[name].device.type) == ("meta", "cpu")
            memory, other = self._layers[name], host[name]
            if is_saving:
                other[target_ids] = memory[source_ids]
            else:
                memory[target_ids] = other[source_ids]
