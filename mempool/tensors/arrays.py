"""Arrays of torch, cupy and numpy, each as a torch tensor over the same memory, by DLPack."""

from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

HOST, CUDA = 1, 2  # DLPack's numbers of the kinds of devices that a tensor can be on
LEGACY_STREAM = 1  # DLPack's number of CUDA's default stream, which is 0 for CUDA and torch
READ_ONLY_VERSION = (1, 0)  # of DLPack: the first that says whether an array is read-only


class SupportsDLPack(Protocol):
    """An array of torch, cupy or numpy."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        """Return a capsule of the memory; `stream` waits for what the library's own was told."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the kind of the device and its number."""


def tensor_over(array: SupportsDLPack, *, is_written: bool = False) -> torch.Tensor:
    """Return a tensor over the memory of an array, without a copy; a tensor is returned as it is.

    The tensor has the array's shape, strides and dtype, and keeps the array alive. On a GPU,
    torch's current stream waits for what cupy's current stream has been told to do; the caller's
    thread does not.

    Raises:
        TypeError: not an array, or an array that is more than its bytes.
        BufferError: no tensor can have the array's dtype, byte order, device or negative stride; or
            the array `is_written`, and read-only.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack_device__"):
        raise TypeError(f"not an array of torch, cupy or numpy: {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array has more than its bytes")
    flags = getattr(array, "flags", None)
    is_read_only = not getattr(flags, "writeable", True)  # cupy's arrays never are
    if is_written and is_read_only:
        raise BufferError(f"{_name(array)} is read-only")
    if is_written and flags is None:  # such as jax's, which are read-only
        raise BufferError(f"{_name(array)} does not say whether it is read-only")
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):  # torch would abort
        raise BufferError(f"{_name(array)} has a negative stride: give a copy of it")
    options: dict[str, Any] = {"max_version": READ_ONLY_VERSION} if is_read_only else {}
    try:
        return from_dlpack(_capsule(array, **options))
    except Exception as error:  # each library raises its own
        raise BufferError(f"{_name(array)} cannot be a torch tensor here: {error}") from error


def _capsule(array: SupportsDLPack, **options: Any) -> Any:
    """Return an array's capsule, for which torch's current stream waits. The array's device is the
    thread's meanwhile: cupy takes its stream of that device."""
    kind, number = array.__dlpack_device__()
    if kind == HOST:
        return array.__dlpack__(**options)
    if kind != CUDA:
        raise BufferError(
            f"its device is of DLPack's kind {kind}, not {HOST} (host) or {CUDA} (CUDA)"
        )
    if not torch.cuda.is_available():
        return array.__dlpack__(stream=LEGACY_STREAM, **options)
    with torch.cuda.device(number):
        current = torch.cuda.current_stream(number).cuda_stream
        return array.__dlpack__(stream=current or LEGACY_STREAM, **options)


def _name(array: SupportsDLPack) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__name__} of {getattr(array, 'dtype', 'unknown dtype')}"
