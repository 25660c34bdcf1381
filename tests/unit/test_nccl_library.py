"""The binding of libnccl: structure, versions, errors, memory, on the double."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.transports.nccl import library
from p2p_engine.transports.nccl.library import Config, Nccl, UniqueId, show_version
from p2p_engine.transports.nccl.memory import MIB, Side, estimated_bytes
from tests.doubles.gpu import GpuDouble
from tests.support import eventually

# Printed by a C program from the nccl.h of 2.28.9: where each field lies, and where the last ends.
OFFSETS_OF_2_28_9 = {
    "size": 0, "magic": 8, "version": 12, "blocking": 16, "cgaClusterSize": 20, "minCTAs": 24,
    "maxCTAs": 28, "netName": 32, "splitShare": 40, "trafficClass": 44, "commName": 48,
    "collnetEnable": 56, "CTAPolicy": 60, "shrinkShare": 64, "nvlsCTAs": 68,
    "nChannelsPerNetPeer": 72, "nvlinkCentricSched": 76,
}  # fmt: skip


@pytest.fixture
def double() -> GpuDouble:
    return GpuDouble()


def test_the_configuration_lies_as_in_the_header_of_2_28_9() -> None:
    ours = {name: getattr(Config, name).offset for name in OFFSETS_OF_2_28_9}
    assert ours == OFFSETS_OF_2_28_9
    assert ctypes.sizeof(UniqueId) == 128


def installed_header() -> Path | None:
    if importlib.util.find_spec("nvidia") is None:
        return None
    spec = importlib.util.find_spec("nvidia.nccl")
    folders = spec.submodule_search_locations or [] if spec else []
    found = (Path(folder) / "include" / "nccl.h" for folder in folders)
    return next((path for path in found if path.exists()), None)


def test_the_configuration_lies_as_in_the_installed_header(tmp_path: Path) -> None:
    header = installed_header()
    if header is None:
        pytest.skip("no nvidia-nccl wheel is installed")
    assert_lies_as_in(header.read_text(), tmp_path)


def assert_lies_as_in(header: str, folder: Path) -> None:
    """Compile the structure of a header and compare each field that it has."""
    match = re.search(r"typedef struct ncclConfig\w*\s*\{(.*?)\}\s*ncclConfig_t;", header, re.S)
    assert match is not None
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.S)
    fields = re.findall(r"(\w+);", body)
    prints = "\n".join(f'printf("{f} %zu\\n", offsetof(ncclConfig_t, {f}));' for f in fields)
    program = folder / "probe.c"
    program.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\ntypedef struct {{{body}}} ncclConfig_t;\n"
        f"int main(void) {{ {prints} return 0; }}\n"
    )
    subprocess.run(["cc", str(program), "-o", str(folder / "probe")], check=True)
    answer = subprocess.run([str(folder / "probe")], capture_output=True, text=True, check=True)
    theirs = {line.split()[0]: int(line.split()[1]) for line in answer.stdout.splitlines()}
    assert {name: getattr(Config, name).offset for name in theirs} == theirs


def test_what_is_not_set_is_undefined() -> None:
    config = Config.of(22809, 4)
    assert (config.size, config.magic) == (ctypes.sizeof(Config), 0xCAFEBEEF)
    assert (config.blocking, config.minCTAs, config.maxCTAs) == (0, 4, 4)
    assert (config.nChannelsPerNetPeer, config.launchOrderImplicit) == (4, 0)
    chosen = {"nChannelsPerNetPeer", "launchOrderImplicit"}
    names = [field[0] for field in Config._fields_[7:]]
    rest = {name: getattr(config, name) for name in names if name not in chosen}
    pointers = {"netName", "commName"}
    assert all(value == (None if name in pointers else -(2**31)) for name, value in rest.items())


def test_registration_needs_the_version_and_the_functions(
    double: GpuDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Nccl(double.path).can_register
    with double.fault(nccl_version=21805):
        assert not Nccl(double.path).can_register
    monkeypatch.setitem(library._REGISTRATION, "ncclCommRegisterAnew", ())
    assert not Nccl(double.path).can_register


def test_an_old_release_is_refused_by_name(double: GpuDouble) -> None:
    with (
        double.fault(nccl_version=21703),
        pytest.raises(ConfigError, match=r"2\.17\.3 .* 2\.18\.0"),
    ):
        Nccl(double.path)


def test_a_library_without_the_functions_is_refused() -> None:
    with pytest.raises(ConfigError, match="ncclGetVersion"):
        Nccl("libc.so.6")


def test_versions_are_shown_as_people_write_them() -> None:
    assert [show_version(code) for code in (21805, 22809, 23203)] == ["2.18.5", "2.28.9", "2.32.3"]


def test_a_communicator_of_one_sends_to_itself_in_a_group(double: GpuDouble) -> None:
    cuda, nccl = Cuda(), Nccl(double.path)
    cuda.use(0)
    memory, stream, event = cuda.allocate(8192), cuda.create_stream(), cuda.create_event()
    ctypes.memset(memory, 5, 4096)
    comm = nccl.init(bytes(128), 0, 2, num_ranks=1)
    eventually(lambda: not nccl.is_in_progress(comm))
    with pytest.raises(TransportError, match="ncclSend: invalid usage"):
        nccl.send(comm, memory, 4096, 0, stream)
    nccl.start_group()
    nccl.send(comm, memory, 4096, 0, stream)
    nccl.recv(comm, memory + 4096, 4096, 0, stream)
    nccl.end_group()
    cuda.record(event, stream)
    eventually(lambda: cuda.is_complete(event))
    assert ctypes.string_at(memory + 4096, 4096) == b"\x05" * 4096
    nccl.destroy(comm)
    cuda.destroy_event(event)
    cuda.destroy_stream(stream)
    cuda.free(memory)


def test_impossible_configurations_are_refused(double: GpuDouble) -> None:
    nccl = Nccl(double.path)
    with pytest.raises(TransportError, match="ncclCommInitRankConfig"):
        nccl.init(bytes(128), 0, 3, num_ranks=1)


@pytest.mark.parametrize(
    ("channels", "idle", "sender", "receiver", "network"),
    [
        (16, 100, 132, 260, 132),
        (8, 52, 68, 132, 68),
        (4, 28, 36, 68, 36),
        (2, 16, 20, 36, 20),
        (1, 10, 12, 20, 12),
    ],
)
def test_memory_of_a_group(
    channels: int, idle: int, sender: int, receiver: int, network: int
) -> None:
    sides = (Side.IDLE, Side.SENDER, Side.RECEIVER, Side.NETWORK)
    estimates = [estimated_bytes(channels, side) // MIB for side in sides]
    assert estimates == [idle, sender, receiver, network]


def test_importing_needs_nothing_and_changes_nothing() -> None:
    program = (
        "import os; before = dict(os.environ); import p2p_engine.transports.nccl.library as n, "
        "p2p_engine.gpu.cuda, sys; assert before == dict(os.environ); "
        "print(any('libnccl' in line or 'libcuda' in line for line in open('/proc/self/maps')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_nothing_in_the_environment_is_changed(double: GpuDouble) -> None:
    before = dict(os.environ)
    nccl = Nccl(double.path)
    comm = nccl.init(bytes(128), 0, 2, num_ranks=1)
    eventually(lambda: not nccl.is_in_progress(comm))
    nccl.abort(comm)
    assert dict(os.environ) == before
