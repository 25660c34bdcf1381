"""A copy of the repository in which mutants run: the checkout itself is never changed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 8 << 30  # that a process of the tests may have: a mutant may take memory for ever
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class PytestRun:
    """How pytest ended. `failed` names the first test that failed, or the file if none can be."""

    seconds: float
    failed: str = ""
    is_late: bool = False


class CopiedTree:
    """The last commit of a repository, in `folder`/tree, made anew, with what was built for it.

    `put` changes a file of the copy; `run` lets pytest run there.
    """

    def __init__(self, repository: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._folder = folder
        self._num_changes = 0
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        archive = folder / "tree.tar"
        subprocess.run(["git", "archive", "-o", archive, "HEAD"], cwd=repository, check=True)
        with tarfile.open(archive) as file:
            file.extractall(self.root, filter="data")
        for built in repository.glob("*/*.so"):
            shutil.copy2(built, self.root / built.relative_to(repository))

    @contextmanager
    def put(self, path: str, source: str) -> Iterator[None]:
        """Have another source in a file of the copy for a while."""
        file = self.root / path
        was, times = file.read_text(), file.stat()
        self._num_changes += 1
        try:
            file.write_text(source)
            # Bytecode is known by the second and the length of its source.
            os.utime(file, (times.st_atime, times.st_mtime + self._num_changes))
            yield
        finally:
            file.write_text(was)
            os.utime(file, (times.st_atime, times.st_mtime))

    def run(
        self, tests: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None
    ) -> PytestRun:
        """Run tests until the first one fails, for so many seconds at most."""
        log = self._folder / "pytest.log"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not vllm", *tests]
        began_at = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider"], cwd=self.root, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=_limit_memory, env=self._environment(environment or {}),
            )  # fmt: skip
            try:
                status, is_late = process.wait(deadline), False
            except subprocess.TimeoutExpired:
                status, is_late = 0, True
            finally:
                _end(process)
        seconds = time.monotonic() - began_at
        failed = FAILED.search(log.read_text(errors="replace")) if status else None
        name = failed[1] if failed else " ".join(tests) if status else ""
        return PytestRun(round(seconds, 1), name, is_late)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which the packages of the copy come first."""
        path = [more.get("PYTHONPATH", ""), str(self.root)]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONPYCACHEPREFIX": str(self._folder / "pycache"),
        }
        kept = {
            name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        return {**kept, **more, **own}


def _limit_memory() -> None:
    """Limit the memory of a process that is about to become pytest."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has left in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
