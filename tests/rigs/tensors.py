"""Bytes to transfer: random ones, and those that both sides know by a name."""

from __future__ import annotations

import numpy as np
import numpy.random  # now, not when a test has taken every descriptor
import torch

from tests.support import SeededRandom


def random_memory(rng: SeededRandom, nbytes: int) -> np.ndarray:
    """Return random bytes."""
    return rng.numpy.integers(0, 256, nbytes, np.uint8)


def random_tensor(rng: SeededRandom, nbytes: int) -> torch.Tensor:
    """Return random bytes as a tensor."""
    return torch.from_numpy(random_memory(rng, nbytes))


def pattern(name: str, nbytes: int) -> torch.Tensor:
    """Return bytes that depend on a name alone, the same in every process."""
    seed = np.random.default_rng([*name.encode(), 7])
    return torch.from_numpy(seed.integers(0, 256, nbytes, np.uint8))
