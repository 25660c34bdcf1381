"""Strangers on bare sockets, who speak ZMTP as little as they need to do harm."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from p2p_engine.wire.addresses import split_address

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
MORE = 1


@contextlib.contextmanager
def stranger(address: str, name: bytes = b"") -> Iterator[socket.socket]:
    """Connect to a ROUTER without keys and shake hands, under a name if there is one."""
    with socket.create_connection(split_address(address), timeout=10) as connection:
        greet(connection, name)
        yield connection


def greet(connection: socket.socket, name: bytes = b"") -> None:
    """Shake hands, on either side: until then libzmq takes every frame for a part of it."""
    ready = _READY + (b"\x08Identity" + struct.pack(">I", len(name)) + name if name else b"")
    connection.sendall(_GREETING)
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    header = _receive(connection, len(_GREETING) + 2)
    _receive(connection, header[-1])


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += connection.recv(num_bytes - len(data))
    return data


def long_frame(num_bytes: int, flags: int = 0) -> bytes:
    """Return a frame of so many bytes."""
    return bytes([2 | flags]) + struct.pack(">Q", num_bytes) + bytes(num_bytes)


def flood(connection: socket.socket, data: bytes, total_bytes: int, seconds: float = 30.0) -> int:
    """Send the same again and again; return how much was sent when it ended or was cut."""
    sent, deadline = 0, time.monotonic() + seconds
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < total_bytes and time.monotonic() < deadline:
            connection.sendall(data)
            sent += len(data)
    return sent


def resident_bytes(pid: int | str = "self") -> int:
    """Return what of a process's memory is resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(row.split()[1]) << 10 for row in status.splitlines() if "VmRSS" in row)
