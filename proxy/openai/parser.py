"""A process that parses large bodies: `python -m proxy.openai.parser FILE MAX_DATA_BYTES`.

FILE is the descriptor of the file of bodies. On standard input comes where a body lies: its start
and its length, 8 bytes each. On standard output goes a `Parsed` in MessagePack, behind its length
in 4 bytes. The process ends with its standard input.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import resource
import struct
import sys

import msgspec

from proxy.http.memory import BodyRefused
from proxy.openai.fields import split

# A value that is larger is not sent, but said where it lies.
SPAN_BYTES = 16 << 10
# These are compared with those of small bodies. In a small body they may be as large as it is.
COMPARED = (
    "tools", "chat_template", "chat_template_kwargs", "system", "instructions",
    "previous_input_messages",
)  # fmt: skip
COMPARED_BYTES = 256 << 10
REQUEST = struct.Struct("<QQ")
LENGTH = struct.Struct("<I")
NICE = 5  # the event loop goes first
_BLANKS = b" \t\r\n"


class Parsed(msgspec.Struct):
    """What a body has, or why it cannot be served. `spans` say from where to where large values
    lie, and the digests of those that are compared; `end` is the end of the JSON object."""

    fields: dict[str, bytes] = {}
    spans: dict[str, tuple[int, int, bytes]] = {}
    end: int = 0
    is_changed: bool = False
    error: tuple[int, str, str] | None = None


def parse(body: memoryview) -> Parsed:
    """Parse one body."""
    try:
        fields, is_changed = split(body)
    except BodyRefused as error:
        return Parsed(error=(error.status, error.code, str(error)))
    parsed, origin = Parsed(end=_end(body), is_changed=is_changed), _address(body)
    for name, value in fields.items():
        size = len(memoryview(value))
        if size <= (COMPARED_BYTES if name in COMPARED else SPAN_BYTES):
            parsed.fields[name] = bytes(value)
            continue
        start = _address(value) - origin
        digest = hashlib.blake2b(value).digest() if name in COMPARED else b""
        parsed.spans[name] = start, start + size, digest
    return parsed


def _end(body: memoryview) -> int:
    """Return the end of a body without the blanks behind it."""
    end = len(body)
    while end:
        piece = bytes(body[max(0, end - SPAN_BYTES) : end])
        if kept := piece.rstrip(_BLANKS):
            return end - len(piece) + len(kept)
        end -= len(piece)
    return 0


def _address(buffer: object) -> int:
    """Return where the bytes of an object lie in memory."""
    view = (ctypes.c_void_p * 16)()  # a Py_buffer: its first word is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), view, 0)
    address = view[0]
    ctypes.pythonapi.PyBuffer_Release(view)
    assert address is not None
    return int(address)


def _answer(file: int, start: int, size: int) -> bytes:
    body = mmap.mmap(file, size, prot=mmap.PROT_READ, offset=start)
    return msgspec.msgpack.encode(parse(memoryview(body)))


def main(file: int, max_data_bytes: int) -> None:
    """Parse bodies until standard input ends."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (max_data_bytes, max_data_bytes))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while asked := source.read(REQUEST.size):
        answer = _answer(file, *REQUEST.unpack(asked))
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
