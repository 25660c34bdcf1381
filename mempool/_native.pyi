from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Int64s: TypeAlias = npt.NDArray[np.signedinteger[Any]] | Buffer  # read as int64

@final
class Buddy:
    """Allocates offsets in an arena that it never touches; handles carry a generation."""

    def __new__(cls, capacity_bytes: int, min_block_bytes: int) -> Buddy: ...
    def alloc(self, nbytes: int, /) -> int: ...
    def free(self, handle: int, /) -> None: ...
    def offset(self, handle: int, /) -> int: ...
    def nbytes(self, handle: int, /) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def check(self) -> None: ...

@final
class Arena(Buffer):
    """An anonymous memory file, sealed against shrinking and mapped shared."""

    def __new__(
        cls,
        nbytes: int,
        *,
        huge_pages: bool = True,
        page_lock: bool = False,
        cuda_register: bool = False,
    ) -> Arena: ...
    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Arena: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int: ...
    @property
    def refusal(self) -> str: ...
    def fileno(self) -> int: ...
    def prefault(self, upto_bytes: int, /) -> None: ...
    def view(self, offset: int, nbytes: int, /) -> memoryview: ...
    def report(self) -> dict[str, str]: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Job:
    """One copy, check, send or expected receive. Once `done`, it touches no memory."""

    @property
    def state(self) -> str:
        """One of queued, running, done, failed, cancelled."""
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def tag(self) -> object: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def checksum(self) -> int | None:
        """CRC-32C of its bytes; None: not asked for, or not done."""
    def cancel(self) -> None: ...
    def wait(self, timeout: float, /) -> bool: ...

@final
class Mover:
    """One native thread that copies memory and moves framed streams without the interpreter.

    Region lists are C-contiguous int64 buffers of equal length; they are copied before return.
    Copies of one `lane` are done in order, lanes take turns; in lane 0 each is a lane of its own.
    `keep` is held until the job has ended and was drained.
    """

    def __new__(cls, *, slice_bytes: int = 1 << 20) -> Mover: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[Job]: ...
    def copy(
        self,
        sources: _Int64s,
        destinations: _Int64s,
        lengths: _Int64s,
        *,
        word_address: int = 0,
        word_value: int = 0,
        lane: int = 0,
        checked: bool = False,
        tag: object = None,
        keep: object = None,
    ) -> Job: ...
    def check(
        self,
        sources: _Int64s,
        lengths: _Int64s,
        *,
        lane: int = 0,
        tag: object = None,
        keep: object = None,
    ) -> Job: ...
    def attach(self, fd: int, channel: int) -> None: ...
    def detach(self, channel: int, /) -> None: ...
    def send(
        self,
        channel: int,
        seq: int,
        sources: _Int64s,
        lengths: _Int64s,
        *,
        checked: bool = False,
        tag: object = None,
        keep: object = None,
    ) -> Job: ...
    def expect(
        self,
        channel: int,
        seq: int,
        destinations: _Int64s,
        lengths: _Int64s,
        *,
        checked: bool = False,
        tag: object = None,
        keep: object = None,
    ) -> Job: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, timeout: float = 2.0) -> bool: ...

def read_word(address: int, /) -> int: ...
def write_word(address: int, value: int, /) -> None: ...
def copy_now(sources: _Int64s, destinations: _Int64s, lengths: _Int64s) -> int: ...
