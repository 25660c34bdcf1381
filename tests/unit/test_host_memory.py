"""What a process may have: control groups of both versions, nested, namespaced, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_engine.memory import host as memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB with 60 available."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 24}.get)
    monkeypatch.setattr(memory, "_available_on_host", lambda: 60 * GIB)


def process(folder: Path, groups: str, root: str, kind: str, options: str = "rw") -> Path:
    """What /proc/self is, for one that sees `folder` as its mount of control groups."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(
        "22 1 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        f"35 22 0:32 {root} {folder} rw,nosuid shared:9 - {kind} {kind} {options}\n"
    )
    return proc


def group(folder: Path, limit: str, used: int, cache: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    names = v2 if version == 2 else v1
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache}\nfile 5\n")


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """As in a pod: the pod's group has less than the container's."""
    group(tmp_path / "pod" / "container", str(16 * GIB), 1 * GIB)
    group(tmp_path / "pod", str(8 * GIB), 6 * GIB, cache=1 * GIB)
    group(tmp_path / "pod" / "other", str(2 * GIB), 0)
    proc = process(tmp_path, "0::/pod/container\n", "/", "cgroup2")
    assert memory.memory_bytes(proc) == 8 * GIB
    assert memory.available_memory_bytes(proc) == 3 * GIB


def test_a_group_without_a_limit_has_the_machines_memory(tmp_path: Path) -> None:
    group(tmp_path / "session", "max", 1 * GIB)
    proc = process(tmp_path, "0::/session\n", "/", "cgroup2")
    assert memory.memory_bytes(proc) == 64 * GIB
    assert memory.available_memory_bytes(proc) == 60 * GIB


def test_version_1_counts_its_memory_controller(tmp_path: Path) -> None:
    group(tmp_path / "docker" / "c", str(4 * GIB), 1 * GIB, cache=1 * GIB, version=1)
    group(tmp_path / "docker", "9223372036854771712", 20 * GIB, version=1)
    groups = "5:cpu,cpuacct:/else\n4:memory:/docker/c\n0::/\n"
    proc = process(tmp_path, groups, "/", "cgroup", "rw,memory")
    assert memory.memory_bytes(proc) == 4 * GIB
    assert memory.available_memory_bytes(proc) == 4 * GIB


@pytest.mark.parametrize("root", ["/docker/c", "/somewhere/else"])
def test_a_container_whose_mount_is_its_own_group_finds_its_limit(
    tmp_path: Path, root: str
) -> None:
    group(tmp_path, str(4 * GIB), 1 * GIB, version=1)
    proc = process(tmp_path, "4:memory:/docker/c\n", root, "cgroup", "rw,memory")
    assert memory.memory_bytes(proc) == 4 * GIB


def test_a_controller_other_than_memorys_is_not_asked(tmp_path: Path) -> None:
    group(tmp_path, str(4 * GIB), 1 * GIB, version=1)
    proc = process(tmp_path, "4:memory:/\n", "/", "cgroup", "rw,cpu")
    assert memory.memory_bytes(proc) == 64 * GIB


def test_what_is_full_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path, str(4 * GIB), 5 * GIB)
    assert memory.available_memory_bytes(process(tmp_path, "0::/\n", "/", "cgroup2")) == 0


def test_where_nothing_can_be_read_the_machines_memory_counts(tmp_path: Path) -> None:
    assert memory.memory_bytes(tmp_path / "none") == 64 * GIB
    assert memory.available_memory_bytes(tmp_path / "none") == 60 * GIB


def test_this_process_has_some() -> None:
    assert 0 < memory.memory_bytes() <= 64 * GIB
