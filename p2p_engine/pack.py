"""Pack: copies lists of regions on a GPU, in either direction: gather, scatter, or both."""

from __future__ import annotations

from p2p_engine.cuda import Cuda
from p2p_engine.layout import Int64s


class Pack:
    """The ways in which one device copies many regions. For the device's thread."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda

    def enqueue(self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int) -> None:
        """Enqueue copies between device, registered and peers' memory.

        Raises:
            TransportError: the device refuses.
        """
        for source, destination, nbytes in zip(
            sources.tolist(), destinations.tolist(), lengths.tolist(), strict=True
        ):
            if nbytes:
                self._cuda.copy(destination, source, nbytes, stream)

    def close(self) -> None:
        """Give everything back; what it copies has ended."""
