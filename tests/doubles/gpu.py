"""Builds and loads the double of GPUs and NCCL, and says what it is to do."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.[ch]"))
LIBRARY = ROOT / "build" / "double" / "libgpudouble.so"  # of NCCL
# Beside it, and loaded with it: NVIDIA's bindings take what the process has loaded.
BESIDE = {"libcuda.so.1": ("cuda.c", "kernels.c"), "libnvrtc.so.13": ("nvrtc.c",)}
LIVE = ("comms", "registrations", "allocations", "imports", "streams", "events",
        "host_registrations", "modules")  # fmt: skip
WRONGS = ("wrong_threads", "double_aborts", "size_mismatches", "bad_configuration", "mixed_memory",
          "mixed_sides", "freed_proxy_uses", "racing_calls", "staged_copies")  # fmt: skip
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-fPIC", "-shared", "-pthread",
         "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")  # fmt: skip


def build() -> str:
    """Return the library's path; it is built when a source is newer."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with open(LIBRARY.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(source.stat().st_mtime for source in SOURCES)
        if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
            for stale in LIBRARY.parent.glob("kernel-*"):
                stale.unlink()
            for number, (name, sources) in enumerate(BESIDE.items()):
                _link(name, sources, list(BESIDE)[:number])
            _link(LIBRARY.name, ["nccl.c"], list(BESIDE))
    return str(LIBRARY)


def _link(name: str, sources: Sequence[str], beside: Sequence[str] = ()) -> None:
    """Make a library that is loaded with those beside it."""
    target = LIBRARY.parent / name
    made, compiler = target.with_suffix(".new"), os.environ.get("CC", "cc")
    command = [compiler, *FLAGS, f"-Wl,-soname,{name}", "-x", "c",
               *(str(FOLDER / source) for source in sources), "-x", "none",
               f"-L{LIBRARY.parent}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN",
               *(f"-l:{each}" for each in beside), "-o", str(made)]  # fmt: skip
    subprocess.run(command, check=True)
    made.replace(target)


class GpuDouble:
    """The double as this process has it: its faults, and what it has counted."""

    loaded: ClassVar[GpuDouble | None] = None

    def __init__(self) -> None:
        self.path = build()
        self._library = ctypes.CDLL(self.path)
        self._library.double_get.restype = ctypes.c_longlong
        self._library.double_set.argtypes = (ctypes.c_char_p, ctypes.c_longlong)
        self._library.double_start()
        GpuDouble.loaded = self

    def __getitem__(self, name: str) -> int:
        """Return a value: a fault that was set, or a count."""
        return int(self._library.double_get(name.encode()))

    def __setitem__(self, name: str, value: int) -> None:
        """Set a fault, or a count back."""
        if self._library.double_set(name.encode(), value):
            raise KeyError(name)

    @contextlib.contextmanager
    def fault(self, **faults: int) -> Iterator[None]:
        """Set faults for a while."""
        before = {name: self[name] for name in faults}
        for name, value in faults.items():
            self[name] = value
        try:
            yield
        finally:
            for name, value in before.items():
                self[name] = value

    def die(self, milliseconds: int) -> None:
        """End this process as one with work on a GPU ends: its sockets first, its copies after so
        long. No other Python code runs here meanwhile."""
        ctypes.PyDLL(self.path).double_die(milliseconds)

    def held(self) -> dict[str, int]:
        """Return what must be given back, and how often it was used as it may not be."""
        return {name: self[name] for name in (*(f"live_{kind}" for kind in LIVE), *WRONGS)}
