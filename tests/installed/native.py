"""The extension alone, where torch is not: another process fills memory of this one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sysconfig
from array import array
from pathlib import Path
from types import ModuleType

SIZE = 1 << 20
SECONDS = 30.0


def load() -> ModuleType:
    """Load the installed extension without its package, which needs torch."""
    folder = Path(sysconfig.get_path("platlib")) / "mempool"
    spec = importlib.machinery.PathFinder.find_spec("_native", [str(folder)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Let a child map the arena and copy into it with a mover of its own."""
    native = load()
    arena, wanted = native.Arena(2 * SIZE), os.urandom(SIZE)
    arena.view(0, SIZE)[:] = wanted
    child = os.fork()
    if not child:
        mapped, mover = native.Arena.attach(arena.fileno(), 2 * SIZE), native.Mover()
        regions = ([mapped.address], [mapped.address + SIZE], [SIZE])
        job = mover.copy(*(array("q", region) for region in regions))
        os._exit(0 if job.wait(SECONDS) and job.state == "done" and mover.close() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(arena.view(SIZE, SIZE)) == wanted
    print("another process has moved", SIZE, "bytes")  # noqa: T201


if __name__ == "__main__":
    main()
