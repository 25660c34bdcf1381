"""Tensor memory over one arena, and the native parts it is made of. Imports nothing of ours."""

from mempool._native import Arena, Buddy, Job, Mover, copy_now, read_word, write_word
from mempool.tensors.arrays import SupportsDLPack, tensor_over
from mempool.tensors.pool import (
    PoolBlock,
    PoolError,
    PoolExhausted,
    PoolStats,
    StaleBlock,
    TensorMemoryPool,
)

__all__ = [
    "Arena",
    "Buddy",
    "Job",
    "Mover",
    "PoolBlock",
    "PoolError",
    "PoolExhausted",
    "PoolStats",
    "StaleBlock",
    "SupportsDLPack",
    "TensorMemoryPool",
    "copy_now",
    "read_word",
    "tensor_over",
    "write_word",
]
