"""What a stranger can cost: memory by messages that do not end, or by not reading the answers."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_engine.control.auth import ANSWER_QUEUE_FRAMES
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.wire.messages import MAX_FRAME_BYTES, Lookup, encode
from tests.hostile.strangers import MORE, flood, greet, long_frame, resident_bytes, stranger
from tests.hostile.victim import KINDS, victim
from tests.support import eventually

MIB = 1 << 20
FIRST_RANDOM = 1804289383  # of glibc, where nobody seeds it
PARTS = long_frame(MAX_FRAME_BYTES, MORE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_does_not_end_is_cut(kind: str) -> None:
    """libzmq would take half a gigabyte in a second."""
    with victim(kind) as (address, process), stranger(address) as connection:
        before = resident_bytes(process)
        sent = flood(connection, PARTS, 512 * MIB)
        assert sent < 256 * MIB  # on a machine that is busy a tick takes long
        assert resident_bytes(process) - before < sent + 32 * MIB
        eventually(lambda: resident_bytes(process) - before < 32 * MIB)
        with stranger(address) as another:  # whoever comes next is heard
            another.sendall(long_frame(300))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_without_bytes_are_cut(kind: str) -> None:
    """libzmq keeps 64 bytes for each part, of which two cross the network."""
    empty = bytes([MORE, 0]) * 512
    with victim(kind) as (address, process), stranger(address) as connection:
        before = resident_bytes(process)
        sent = flood(connection, empty, 64 * MIB)
        assert sent < 32 * MIB
        eventually(lambda: resident_bytes(process) - before < 32 * MIB)


@pytest.mark.parametrize("kind", ["engine", "directory"])
def test_who_does_not_read_costs_kilobytes(kind: str) -> None:
    """Twelve thousand questions from each, whose answers nobody takes."""
    question, num = encode(Lookup(1, 0, 0)), 20
    with victim(kind) as (address, process), contextlib.ExitStack() as strangers:
        before = resident_bytes(process)
        for _ in range(num):
            connection = strangers.enter_context(stranger(address))
            connection.settimeout(0.5)
            short = bytes([0, len(question)]) + question
            flood(connection, short * 1000, 12_000 * len(short), seconds=1)
        assert resident_bytes(process) - before < num * 1024 * 1024
        assert ANSWER_QUEUE_FRAMES <= 500  # each at most as large as what is told of a cache


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_bears_the_name_of_who_comes_next(kind: str) -> None:
    """libzmq ends the process when the name that it makes up is somebody's already."""
    with victim(kind) as (address, process), contextlib.ExitStack() as strangers:
        for number in range(32):
            name = b"\0" + struct.pack(">I", FIRST_RANDOM + number)
            strangers.enter_context(stranger(address, name)).sendall(long_frame(1))
        for _ in range(32):
            strangers.enter_context(stranger(address)).sendall(long_frame(1))
        assert resident_bytes(process)  # a process that has ended has none
        with stranger(address) as another:
            another.sendall(long_frame(1))


def test_connections_that_choose_one_name_leave_no_descriptor_behind() -> None:
    """As old connectors do when they come back to a proxy; what is on its way in the older one
    comes afterwards."""
    with victim("proxy") as (address, process):
        descriptors = Path(f"/proc/{process}/fd")
        before = len(list(descriptors.iterdir()))
        with contextlib.ExitStack() as strangers:
            for _ in range(20):
                older, newer = [strangers.enter_context(stranger(address, b"one")) for _ in "12"]
                for connection in (older, newer, older):
                    connection.sendall(long_frame(1))
        eventually(lambda: len(list(descriptors.iterdir())) <= before)


@pytest.fixture
def control() -> Iterator[ControlPlane]:
    plane = ControlPlane("127.0.0.1", range(1), name="test")
    plane.start()
    yield plane
    plane.close(5)


@pytest.mark.usefixtures("no_leaks")
def test_a_whole_message_of_several_parts_is_dropped_and_its_sender_cut(
    control: ControlPlane,
) -> None:
    with stranger(control.address) as connection:
        connection.sendall(long_frame(10, MORE) + long_frame(10))
        eventually(lambda: control.sockets.dropped_frames == 1)
        eventually(lambda: control.sockets.refused_connections == 1)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass


@pytest.mark.usefixtures("no_leaks")
def test_a_peer_that_we_dial_cannot_send_without_end(control: ControlPlane) -> None:
    """It has cost us one connection; the next one is dialled."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        control.send(Route(address), b"hello")
        for _ in range(2):
            peer, _ = server.accept()
            with peer:
                peer.settimeout(10)
                greet(peer)
                before = resident_bytes()
                assert flood(peer, PARTS, 512 * MIB) < 256 * MIB
                eventually(lambda b=before: resident_bytes() - b < 32 * MIB)  # type: ignore[misc]
    control.call_soon(lambda: control.sockets.hang_up(address))
    eventually(lambda: control.sockets.refused_connections >= 2)


@pytest.mark.usefixtures("no_leaks")
def test_many_short_messages_at_once_are_no_reason_to_cut(control: ControlPlane) -> None:
    other = ControlPlane("127.0.0.1", range(1), name="other")
    other.start()
    try:
        for number in range(9000):
            other.send(Route(control.address), bytes(100 + number % 200))
        for _ in range(30):
            other.send(Route(control.address), bytes(MAX_FRAME_BYTES))
        eventually(lambda: control.sockets.frames_received == 9030, 60)
        assert control.sockets.refused_connections == 0
        assert other.sockets.dropped_frames == 0
    finally:
        other.close(5)
