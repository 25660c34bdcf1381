"""What the documents say is so: paths, names, commands and settings that they mention are there."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from p2p_engine.cli.app import app
from p2p_engine.cli.config_check import config_problems
from p2p_engine.config import EXTRA_KEYS, EngineConfig
from p2p_engine.wire.messages import AnyMessage
from proxy.main import _parser as proxy_parser

ROOT = Path(__file__).parents[2]
PACKAGES = ("csrc", "mempool", "p2p_engine", "proxy")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "docs", "benchmarks", "benchmarks/pages")
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


@cache
def names_in(text: str) -> set[str]:
    """Name all that a file defines; many lines of a page name one file."""
    return names_defined_in(ast.parse(text))


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
        return name in names_in(text)
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


@pytest.mark.parametrize(
    ("package", "contract"), [("p2p_engine", "The engine"), ("proxy", "The proxy")]
)
def test_architecture_draws_every_part_of_a_package_above_what_it_imports(
    package: str, contract: str
) -> None:
    wings = (ROOT / "ARCHITECTURE.md").read_text().split("## The wings")[1].split("```")[1]
    rows = re.split(r"\n(?! )", wings.split(f"\n{package}/\n")[1])[0].split("\n")
    row_of = {name: n for n, row in enumerate(rows) for name in re.findall(r"(\w+)(?:/|\.py)", row)}
    layers = (ROOT / "pyproject.toml").read_text().split(f'name = "{contract}"')[1]
    lines = layers.split("layers = [")[1].split("]")[0].splitlines()
    parts = [set(re.findall(r"\w+", line)) - {"__main__"} for line in lines]
    assert set().union(*parts) - row_of.keys() == set()
    drawn = [sorted(row_of[name] for name in names) for names in parts if names]
    assert [(a, b) for a, b in itertools.pairwise(drawn) if a[-1] > b[0]] == []


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


def test_the_protocol_lists_every_message() -> None:
    section = (ROOT / "docs" / "protocol.md").read_text().split("## Messages")[1].split("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("|"))
    tags = {kind.__struct_config__.tag for kind in get_args(AnyMessage)}
    assert set(re.findall(r"`([A-Z_]+)`", table)) == tags


def test_every_setting_is_explained_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.split("\n## Settings\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    told = dict(rows)
    assert len(told) == len(rows)
    assert set(told) == EXTRA_KEYS
    defaults = {key: text for key, text in told.items() if text[0].isdecimal() or text == "false"}
    true = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    known = {key for key in told if isinstance(true[key], int | float) and true[key]}
    assert known <= set(defaults)
    assert {key: float(text.replace("false", "0")) for key, text in defaults.items()} == {
        key: true[key] for key in defaults
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_transfer_config_is_accepted(document: str) -> None:
    blocks = FENCED.findall((ROOT / document).read_text())
    whole = [text for language, text in blocks if language == "json"]
    shell = "".join(text for language, text in blocks if language == "bash")
    in_commands = re.findall(r"--kv-transfer-config '(\{.*?\})'", shell, re.DOTALL)
    for text in (*whole, *in_commands):
        assert config_problems(json.loads(text)) == []


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each `p2p-engine` command in the shell blocks of a page."""
    for language, block in FENCED.findall(text):
        if language == "bash":
            script = re.sub(r"(^|\s)#.*", "", block).replace("\\\n", " ").replace("\n", " ; ")
            words = iter(shlex.split(script))
            for word in words:
                if word.endswith("p2p-engine"):
                    yield list(itertools.takewhile(lambda item: item not in (";", "--"), words))


def options_of(command: str) -> set[str]:
    """Every option that this command of ours takes."""
    if command == "proxy":
        return set(proxy_parser()._option_string_actions)
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    each = [found, *getattr(found, "commands", {}).values()]
    return {option for one in each for parameter in one.params for option in parameter.opts}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_of_a_command_is_one(document: str) -> None:
    for command, *words in commands_in((ROOT / document).read_text()):
        given = {word for word in words if word.startswith("--") and " " not in word}
        assert given - options_of(command) == set(), command


# Options of NVRTC, and of routers that the pages compare us with, and one that vLLM no longer has.
OPTIONS_OF_OTHERS = {
    "--gpu-architecture",
    "--kv-connector",
    "--moriio-decode-handshake-port",
    "--moriio-dp-size",
    "--moriio-parallel-dispatch",
    "--moriio-prefill-handshake-port",
    "--moriio-write-mode",
    "--swap-space",
    "--vllm-discovery-address",
}


def options_named_in(folder: Path, *patterns: str) -> set[str]:
    """Every option that the sources of these names in a folder have as a string."""
    sources = [path.read_text() for pattern in patterns for path in folder.glob(pattern)]
    return set(re.findall(r'"(--[a-z][a-z0-9-]*)"', "".join(sources)))


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    """The options of our commands and benchmarks, of vLLM and of OPTIONS_OF_OTHERS."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    known = OPTIONS_OF_OTHERS | set(proxy_parser()._option_string_actions)
    known = known.union(*map(options_of, get_command(app).commands))  # type: ignore[attr-defined]
    known |= options_named_in(ROOT / "benchmarks", "*.py")
    known |= options_named_in(
        Path(vllm.origin).parent, "engine/arg_utils.py", "entrypoints/**/*.py"
    )
    return known | {option.replace("--", "--no-", 1) for option in known}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_named_in_a_sentence_is_one(document: str, known_options: set[str]) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    assert set(re.findall(r"`(--[a-z][a-z0-9-]*)", text)) - known_options == set()


def recorded(name: str, line: int) -> list[dict[str, Any]]:
    """The rows of one run, by its line in the file of results."""
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = json.loads(lines[line - 1])["rows"]
    return rows


def unwrapped(document: str) -> str:
    """A page's text without its line breaks."""
    return " ".join((ROOT / document).read_text().split())


def test_every_rate_of_the_readme_is_in_the_record_that_it_names() -> None:
    record = {(row["case"], row["contender"]): row for row in recorded("transfer", 3)}
    names = ("shm", "nixl", "copy_now", "tcp", "nixl tcp", "raw socket")
    cases = {"16 KiB": "16 KiB", "64 KiB": "64 KiB", "1 MiB": "1024 KiB", "256 MiB": "262144 KiB"}
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\d+ [KM]iB) \|([\d. |]+)\|$", text, re.MULTILINE)
    told = {case: [float(rate) for rate in rest.split("|")] for case, rest in rows}
    assert told == {
        case: [record[raw, name]["gb_per_s_median"] for name in names]
        for case, raw in cases.items()
    }
    nixl, cold = record["1024 KiB", "nixl"], record["cold, at once", "shm"]
    spread = f"from {nixl['gb_per_s_min']:.1f} to {nixl['gb_per_s_max']:.1f}"
    assert f"NIXL's at 1 MiB {spread}" in unwrapped("README.md")
    assert f"after a start reach {cold['gb_per_s_median']} GB/s" in unwrapped("README.md")


def test_first_tokens_of_the_readme_are_recorded() -> None:
    rows = [row for line in (3, 4, 5) for row in recorded("serving", line)]
    columns = ("alone", "PUT_ASYNC", "GET", "NIXL pull, not pinned")
    text = (ROOT / "README.md").read_text()
    told = re.findall(r"^\| (\d*,?\d+) \|([\d, |]+)\|$", text, re.MULTILINE)
    assert [tokens for tokens, _ in told] == ["200", "1,000", "3,000"]
    for tokens, rest in told:
        asked = [
            row
            for row in rows
            if row["what"] == "request" and row["tokens"] == int(tokens.replace(",", ""))
        ]
        expected = [
            statistics.median(r["first_ms"] for r in asked if r["who"] == who and r["round"])
            for who in columns
        ]
        found = [float(number.replace(",", "")) for number in rest.split("|")]
        assert found == pytest.approx(expected, abs=0.5)
        assert all(row.get("same", True) for row in asked)


def test_what_the_readme_says_of_the_proxys_cost_is_recorded() -> None:
    rows = {row["router"]: row for row in recorded("proxy", 6)}
    ratio = rows["ours"]["cpu_s_per_1000"] / rows["vllm-router"]["cpu_s_per_1000"]
    assert f"{ratio:.1f} times the processor time of vllm-router" in unwrapped("README.md")


def test_the_changelog_begins_with_this_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert newest is not None
    assert newest[1] == version[1]
