"""What of upstream's tests is run, what is changed in it, and what is left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.sdist import fetch_source, read_members

_TOP = "tests/v1"
UNIT = "kv_connector/unit"
NIXL = "kv_connector/nixl_integration"
LIFECYCLE_TESTS = (
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_remote_decode_lifecycle.py",
)
EDGE_CASES = f"{NIXL}/test_edge_cases.py"
ACCURACY = f"{NIXL}/test_disagg_accuracy.py"
_FILES = [*LIFECYCLE_TESTS, f"{UNIT}/utils.py", EDGE_CASES, ACCURACY]


@dataclass(frozen=True)
class Edit:
    """One change to upstream's text; it must still be found exactly once."""

    path: str
    old: str
    new: str
    why: str

    def apply(self, text: str) -> str:
        """Return the text with the change made.

        Raises:
            ValueError: upstream's text is not what this edit was written for.
        """
        if text.count(self.old) != 1:
            found = text.count(self.old)
            raise ValueError(f"{self.path}: found {found} times instead of once: {self.old}")
        return text.replace(self.old, self.new)


def edits(model: Path) -> list[Edit]:
    """Return the whole difference between upstream's files and what is run."""
    return [
        Edit(
            f"{UNIT}/utils.py",
            'kv_connector: str = "NixlConnector"',
            'kv_connector: str = "P2pNcclConnector"',
            "the connector under test, by its registered name",
        ),
        Edit(
            f"{UNIT}/utils.py",
            'model: str = "facebook/opt-125m"',
            f"model: str = {str(model)!r}",
            "no download: only the model's shape matters to a scheduler",
        ),
        Edit(
            ACCURACY,
            "/healthcheck",
            "/health",
            "the path on which every proxy but upstream's toy answers",
        ),
    ]


def unpack(version: str, model: Path, target: Path) -> Path:
    """Fetch one version's tests, edit them, and write them under `target`, which is returned."""
    archive = fetch_source("vllm", version)
    members = read_members(archive, [f"{_TOP}/{name}" for name in _FILES])
    files = {name.removeprefix(f"{_TOP}/"): text for name, text in members.items()}
    for edit in edits(model):
        files[edit.path] = edit.apply(files[edit.path])
    _write(target, files)
    return target


def _write(target: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(target).parents:  # upstream's imports are relative
            if parent.name:
                (target / parent / "__init__.py").touch()
    (target / "pytest.ini").write_text("[pytest]\n")  # ours does not apply to upstream's tests
