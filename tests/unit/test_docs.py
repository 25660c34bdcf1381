"""What the documents say is so: paths, names, commands and settings that they mention are there."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from p2p_engine.config import EXTRA_KEYS, EngineConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("csrc", "mempool", "p2p_engine", "proxy")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "docs", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
REFERENCE = re.compile(r"`([\w./-]+\.(?:c|h|py|sh|toml|yml))(?::([\w.]+))?`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"[\w/]+\.py\b")
COMMAND = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def names_defined_in(tree: ast.AST, prefix: str = "") -> set[str]:
    """Name every class, function, method and assigned name, as `Class.method`."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {prefix + node.name} | names_defined_in(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def candidates(path: str, document: str) -> list[Path]:
    """Return the file of this path; a bare name is looked for beside the document and in all
    packages."""
    if "/" in path or (ROOT / path).exists():
        return [ROOT / path]
    beside = (ROOT / document).parent / path
    return [beside, *(found for package in PACKAGES for found in (ROOT / package).rglob(path))]


def holds(path: Path, name: str | None) -> bool:
    """Tell whether the file exists and defines the name, if one is given."""
    if not path.exists() or name is None:
        return path.exists()
    text = path.read_text()
    if path.suffix == ".py":
        return name in names_defined_in(ast.parse(text))
    return re.search(rf"^(\w+[ *]+)?{name}\(", text, re.MULTILINE) is not None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_and_name_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    missing = [
        reference.group()
        for reference in REFERENCE.finditer(text)
        if not any(holds(path, reference[2]) for path in candidates(reference[1], document))
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_in_a_drawing_is_there(document: str) -> None:
    blocks = FENCED.findall((ROOT / document).read_text())
    drawn = FILE.findall("".join(text for language, text in blocks if not language))
    missing = [name for name in drawn if not any(map(Path.exists, candidates(name, document)))]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    path = ROOT / document
    targets = LINK.findall(path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_command_is_a_target(document: str) -> None:
    code = re.findall(r"```bash\n(.*?)```|`([^`\n]+)`", (ROOT / document).read_text(), re.DOTALL)
    commands = {name for block in code for name in COMMAND.findall("\n".join(block))}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands - targets == set()


def test_every_setting_is_explained_with_its_default() -> None:
    section = (ROOT / "README.md").read_text().split("### Settings")[1].split("###")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert set(told) == EXTRA_KEYS
    numbers = {key: float(text) for key, text in told.items() if text[0].isdecimal()}
    true = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert numbers == {key: true[key] for key in numbers}


def test_the_changelog_begins_with_this_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert newest is not None
    assert newest[1] == version[1]
