"""cupy as an oracle of what is in a GPU's memory: it shares no code with ours."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def find_cupy(name: str) -> tuple[Any, str]:
    """Import cupy, or what a test has in its place; the module and its release, or None and why it
    is not there."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # cupy's own says what it lacks, over many lines
        return None, f"not installed: {str(error).strip().splitlines()[0]}"
    return module, module.__version__


def read_by(cupy: Any, address: int, nbytes: int) -> np.ndarray:
    """Bytes of a GPU's memory, as cupy reads them; blocks."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, None), 0)
    read: np.ndarray = cupy.asnumpy(cupy.ndarray((nbytes,), cupy.uint8, memory))
    return read
