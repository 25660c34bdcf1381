"""BodyMemory: what the proxy keeps of the bodies of requests, and how much of it in all.

A large body lies in a file that exists in memory only. The event loop moves it in pieces, and
processes that parse it need no copy.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import AsyncIterator
from functools import cached_property
from typing import TypeAlias

from p2p_engine.errors import P2pError
from proxy.http.turns import Turns

logger = logging.getLogger(__name__)

# So much of each request is not counted: small requests are taken however many large ones there
# are. Their number is bounded by that of the connections.
FREE_BYTES = 64 << 10
# A body that is larger goes into the file. Moving or freeing one piece takes some 0.1 ms.
LARGE_BYTES = 256 << 10
PIECE_BYTES = 256 << 10
# A body is kept in such pieces as it comes: for what is larger, the system looks for new pages for
# some milliseconds.
KEPT_AT_ONCE = 64 << 10
CRUMB_BYTES = 4 << 10  # a piece that is smaller waits for the next
_FREED_AT_ONCE = 1 << 20


class BodyRefused(P2pError):
    """The request's body is refused: 413 if it is too large, 408 if it did not come in time, 503
    if the bodies of others take all the memory, 400 if it cannot be served."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BodyMemory:
    """Counts what is kept, and has the file of large bodies, in which no place is used twice.

    Invariant: num_bytes <= max_bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.turns = Turns()
        self.is_closed = False
        self._end = 0

    @cached_property
    def file(self) -> int:
        """The file's descriptor; it is made on first use."""
        return os.memfd_create("bodies", os.MFD_CLOEXEC)

    def place(self, max_bytes: int) -> int:
        """Return where a body of up to so many bytes may lie: a page that nobody ever had."""
        start = self._end
        self._end += -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return start

    def close(self) -> None:
        """Close the file; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            if "file" in self.__dict__:
                os.close(self.file)


class _Body:
    """One body, for all who keep it: in pieces, or in the file if it is large."""

    def __init__(self, memory: BodyMemory, max_bytes: int, origin: str) -> None:
        self.memory = memory
        self.origin = origin
        self.num_keeps = 0
        self.start = -1  # in the file, if it is there
        self._max_bytes = max_bytes
        self._pieces: list[bytes | bytearray] = []
        self._num_bytes = 0
        self._num_written = 0
        self._num_counted = 0

    def add(self, piece: bytes) -> bool:
        self._num_bytes += len(piece)
        more = max(0, self._num_bytes - FREE_BYTES) - self._num_counted
        if more > self.memory.max_bytes - self.memory.num_bytes:
            return False
        if more:
            self._count(more)
        self._append(piece)
        return self._num_bytes <= LARGE_BYTES or self._write()

    def _append(self, piece: bytes) -> None:
        """Keep a piece. Crumbs are joined: each of its own would take 40 bytes more."""
        last = self._pieces[-1] if self._pieces else b""
        if isinstance(last, bytearray) and len(last) + len(piece) <= KEPT_AT_ONCE:
            last += piece
        else:
            self._pieces.append(bytearray(piece) if len(piece) < CRUMB_BYTES else piece)

    def _write(self) -> bool:
        if self.start < 0:
            self.start = self.memory.place(self._max_bytes)
        for piece in self._pieces:
            try:
                written = os.pwrite(self.memory.file, piece, self.start + self._num_written)
            except OSError as error:
                logger.warning("no memory for a body: %s", error)
                return False
            self._num_written += written
            if written < len(piece):
                return False
        self._pieces.clear()
        return True

    def content(self) -> bytes | Span:
        if self.start >= 0:
            return Span(self, 0, self._num_bytes)
        return b"".join(self._pieces)

    def read(self, start: int, end: int) -> bytes:
        if not self.num_keeps:
            raise RuntimeError("a body is read that nobody keeps")
        return os.pread(self.memory.file, end - start, self.start + start)

    def free(self) -> None:
        self._pieces.clear()
        if self._num_written:
            asyncio.get_running_loop().call_soon(self._free_from, 0)
        else:
            self._count(-self._num_counted)

    def _free_from(self, start: int) -> None:
        """Give pages back, some at a time."""
        if start >= self._num_written or self.memory.is_closed:
            self._count(-self._num_counted)
            return
        size = min(_FREED_AT_ONCE, self._num_written - start)
        with mmap.mmap(self.memory.file, size, offset=self.start + start) as freed:
            freed.madvise(mmap.MADV_REMOVE)
        self._count(-min(size, self._num_counted))
        asyncio.get_running_loop().call_soon(self._free_from, start + size)

    def _count(self, num_bytes: int) -> None:
        self.memory.num_bytes += num_bytes
        self._num_counted += num_bytes


class Keep:
    """Keeps one body, until `free`."""

    __slots__ = ("_body", "_is_free")

    def __init__(self, body: _Body) -> None:
        self._body = body
        self._is_free = False
        body.num_keeps += 1

    @classmethod
    def new(cls, memory: BodyMemory, max_bytes: int, origin: str = "") -> Keep:
        """Keep a body of which nothing has come; those of one origin wait for one another."""
        return cls(_Body(memory, max_bytes, origin))

    def add(self, piece: bytes) -> bool:
        """Keep a piece of the body that has come; return whether there is room for it.

        Raises:
            OSError: the system has no memory left.
        """
        return self._body.add(piece)

    def content(self) -> bytes | Span:
        """Return the body."""
        return self._body.content()

    def again(self) -> Keep:
        """Keep the same body for somebody else, too."""
        return Keep(self._body)

    def free(self) -> None:
        """Keep the body no longer; idempotent."""
        if not self._is_free:
            self._is_free = True
            self._body.num_keeps -= 1
            if not self._body.num_keeps:
                self._body.free()


class Span:
    """A part of a large body. `digest` stands for its content, if somebody needs to compare it."""

    __slots__ = ("_body", "_end", "_start", "digest")

    def __init__(self, body: _Body, start: int, end: int, digest: bytes = b"") -> None:
        self._body = body
        self._start = start
        self._end = end
        self.digest = digest

    def __len__(self) -> int:
        return self._end - self._start

    def part(self, start: int, end: int, digest: bytes = b"") -> Span:
        """Return a part of it."""
        return Span(self._body, self._start + start, self._start + end, digest)

    def read(self, start: int, end: int) -> bytes:
        """Return some of its bytes."""
        first = self._start + start
        return self._body.read(first, min(self._start + end, self._end))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Return its bytes in pieces, one in each turn."""
        for start in range(0, len(self), PIECE_BYTES):
            await self._body.memory.turns.take(self._body.origin)
            yield self.read(start, start + PIECE_BYTES)

    def keep(self) -> Keep:
        """Keep the body for somebody else, too."""
        return Keep(self._body)

    @property
    def place(self) -> tuple[int, int]:
        """Where it begins in the file, and its length."""
        return self._body.start + self._start, len(self)

    @property
    def file(self) -> int:
        """The descriptor of the file."""
        return self._body.memory.file


# What is sent in one request, in order.
Parts: TypeAlias = tuple[bytes | Span, ...]
