"""Measure the structure of the code, print it, and fail above LIMITS. Lower one when you can.

A unit is a module or a folder directly in a package. Its layer is the longest way down over its
imports. Imports for type hints count: a reader follows them, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("mempool", "p2p_engine", "proxy")
LIMITS = {
    "units": 39,
    "layers": 12,
    "edges": 175,
    "circles": 0,
    "repeated_classes": 0,
    "readme_words": 1200,
    "architecture_words": 2500,
}
Graph = Mapping[str, set[str]]


def tracked(pattern: str) -> list[Path]:
    """The files of the repository that match."""
    listed = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST, modules: Mapping[str, ast.AST]) -> Iterator[str]:
    """Ours among the modules that a module imports, for type hints as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def unit_of(module: str) -> str:
    """The unit in which a module lies."""
    return ".".join(module.split(".")[:2])


def layer_of(unit: str, graph: Graph, above: tuple[str, ...] = ()) -> int:
    """How many units lie on the longest way down, this one included; a circle is walked once."""
    below = graph.get(unit, set()) - {unit, *above}
    return 1 + max((layer_of(each, graph, (*above, unit)) for each in below), default=0)


def circles(graph: Graph) -> list[set[str]]:
    """The sets of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, waiting = set[str](), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        reached[start] = found
    rings = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in reached}
    return [set(ring) for ring in rings if len(ring) > 1]


def repeated_classes(trees: Mapping[Path, ast.AST]) -> list[str]:
    """The names that more than one class has."""
    names = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def parsed() -> dict[Path, ast.AST]:
    """All Python files of the repository."""
    return {path: ast.parse(path.read_text("utf-8")) for path in tracked("*.py")}


def measure(trees: Mapping[Path, ast.AST]) -> dict[str, int]:
    """Everything that has a limit."""
    modules = {module_of(path): tree for path, tree in trees.items()}
    ours = {name: tree for name, tree in modules.items() if name.split(".")[0] in PACKAGES}
    graph: dict[str, set[str]] = defaultdict(set)
    units: dict[str, set[str]] = {unit_of(name): set() for name in ours}
    for name, tree in ours.items():
        for below in set(imports_of(tree, modules)) & set(ours) - {name}:
            graph[name].add(below)
            units[unit_of(name)] |= {unit_of(below)} - {unit_of(name)}
    return {
        "units": len(units),
        "layers": max(layer_of(unit, units) for unit in units),
        "edges": sum(map(len, units.values())),
        "circles": len(circles(graph)) + len(circles(units)),
        "repeated_classes": len(repeated_classes(trees)),
        "readme_words": len((ROOT / "README.md").read_text("utf-8").split()),
        "architecture_words": len((ROOT / "ARCHITECTURE.md").read_text("utf-8").split()),
    }


if __name__ == "__main__":
    files = parsed()
    measured = measure(files)
    for name, limit in LIMITS.items():
        print(f"{name:20}{measured[name]:8}  at most {limit}")  # noqa: T201
    if repeated := repeated_classes(files):
        print("Names of more than one class:", *repeated)  # noqa: T201
    sys.exit(any(measured[name] > limit for name, limit in LIMITS.items()))
