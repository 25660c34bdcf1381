"""Mutation testing: which changes are made, and what a campaign says of a tiny package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.campaign import MutantCampaign
from tests.mutants.mutations import ModuleMutations, is_python
from tests.mutants.tree import CopiedTree

CLIP = """
def clip(value: int, top: int) -> int:
    if value > top:
        return top
    return value


def unseen(value: int) -> int:
    return value + 1
"""
TEST_CLIP = """
from small.limits import clip


def test_large_values_are_clipped():
    assert clip(3, 2) == 2


def test_small_values_stay():
    assert clip(1, 2) == 1
"""
TEST_ELSEWHERE = """
def test_nothing_of_the_package():
    pass
"""
# It tells of a mutant in its first run only, as a test that misses a deadline may.
TEST_ONCE = """
from pathlib import Path

from small.limits import clip


def test_once():
    if clip(2, 2) is None and not Path("told").exists():
        Path("told").touch()
        raise AssertionError
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a < b: c()", {"if a <= b: c()", "if a < b: pass"}),
        ("if a is  not b or d: c = 1", {
            "if a is b or d: c = 1", "if a is  not b and d: c = 1", "if a is  not b or d: c = 2",
        }),
        ("x = a in b", {"x = a not in b"}),
        ("if a.b: x = d", {"if not (a.b): x = d"}),
        ("x = not a", {"x = (a)"}),
        ("x = a - b // c", {"x = a + b // c", "x = a - b * c"}),
        ("return a, True", {"return None", "return a, False"}),
        ("for a in b: break", {"for a in b: continue"}),
        ("a.b = c", {"pass"}),
        ("x += c", {"pass"}),
        ("del a[b]", {"pass"}),
        ("x = 'ä' == (b)", {"x = 'ä' != (b)"}),
        ("logger.info(a)", set()),
        ("x: int | None = a", set()),
        ("return None", set()),
    ],
)  # fmt: skip
def test_each_place_is_changed_in_one_way(line: str, expected: set[str]) -> None:
    source = f'def f(a, b, c, d):\n    """At most 3."""\n    {line}\n'
    mutated = {mutation.apply(source) for mutation in ModuleMutations(source)}
    assert {text.splitlines()[2].strip() for text in mutated} == expected
    assert all(map(is_python, mutated))


def test_what_runs_at_an_import_is_left_alone() -> None:
    assert [*ModuleMutations("LIMIT = 3\n\n\nclass A:\n    b: int = 4 + 1\n")] == []


def test_a_mutation_names_its_function_and_the_lines_of_its_statement() -> None:
    source = "class A:\n  def b(self, c):\n    if (\n      c\n      > 1\n    ):\n      c()\n"
    mutations = [*ModuleMutations(source)]
    assert {mutation.function for mutation in mutations} == {"A.b"}
    assert {mutation.what: mutation.lines for mutation in mutations} == {
        "> is >=": (3, 6),
        "1 is 2": (3, 6),
        "without `c()`": (7, 7),
    }


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Make a repository with a package of one module, and commit it."""
    repository = tmp_path / "small"
    files = {
        "small/__init__.py": "", "small/limits.py": CLIP,
        "tests/test_clip.py": TEST_CLIP, "tests/test_elsewhere.py": TEST_ELSEWHERE,
    }  # fmt: skip
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    commit(repository, "init", "--quiet")
    return repository


def commit(repository: Path, *before: str) -> None:
    """Commit all files of a repository."""
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    message = ("commit", "--quiet", "-m", "A commit")
    for command in ([before] if before else []) + [("add", "."), (*identity, *message)]:
        subprocess.run(["git", *command], cwd=repository, check=True)


def campaign_of(small: Path, deadline: float = 60.0) -> MutantCampaign:
    """Make a campaign in which each run of a test file has so many seconds."""
    build = small.parent / "build"
    return MutantCampaign(small, build, ["small"], ["tests"], lambda _: deadline)


def test_a_campaign_tells_which_test_kills_a_mutant_and_goes_on(small: Path) -> None:
    (first,) = campaign_of(small).run(seed=1, count=1)
    rows = campaign_of(small).run(seed=1, count=9)
    assert rows[0] == first
    assert {(row["line"], row["change"]): (row["outcome"], row["test"]) for row in rows} == {
        (3, "> is >="): ("survived", ""),
        (4, "returns None"): (
            "killed",
            "tests/test_clip.py::test_large_values_are_clipped",
        ),
        (5, "returns None"): ("killed", "tests/test_clip.py::test_small_values_stay"),
        (9, "returns None"): ("survived", ""),
        (9, "+ is -"): ("survived", ""),
        (9, "1 is 2"): ("survived", ""),
    }
    assert {row["function"]: row["test_files"] for row in rows} == {"clip": 1, "unseen": 0}
    kept = [*(small.parent / "build").glob("*/trials.jsonl")]
    assert len(kept[0].read_text().splitlines()) == len(rows) == 6  # none was tried twice
    assert (small / "small" / "limits.py").read_text() == CLIP


def test_a_mutant_under_which_tests_do_not_end_is_a_timeout(small: Path) -> None:
    campaign_of(small).run(seed=1, count=0)  # what the tests reach is on record then
    rows = campaign_of(small, deadline=0.0).run(seed=1, count=6)
    reached = [row for row in rows if row["test_files"]]
    assert {(row["outcome"], row["test"]) for row in reached} == {("timeout", "tests/test_clip.py")}


def test_a_test_that_fails_once_kills_nothing(small: Path) -> None:
    (small / "tests" / "test_clip.py").write_text(TEST_ONCE)
    commit(small)
    rows = campaign_of(small).run(seed=1, count=6)
    assert {row["outcome"] for row in rows} == {"survived"}


def test_a_test_file_that_fails_by_itself_is_left_out(small: Path) -> None:
    (small / "tests" / "test_clip.py").write_text(f"{TEST_CLIP}    raise AssertionError\n")
    commit(small)
    campaign = campaign_of(small)
    rows = campaign.run(seed=1, count=1)
    assert campaign.left_out == ["tests/test_clip.py"]
    assert rows[0]["test_files"] == 0


def test_a_run_ends_at_its_deadline_and_names_no_test(small: Path, tmp_path: Path) -> None:
    tree = CopiedTree(small, tmp_path / "copy")
    run = tree.run(["tests/test_clip.py"], deadline=0.0)
    assert (run.is_late, run.failed) == (True, "")


def test_a_changed_file_is_as_it_was_afterwards(small: Path, tmp_path: Path) -> None:
    tree = CopiedTree(small, tmp_path / "copy")
    file = tree.root / "small" / "limits.py"
    times = set()
    for _ in range(2):
        before = file.stat().st_mtime
        with tree.put("small/limits.py", CLIP.replace("> top", "< top")):
            times |= {int(before), int(file.stat().st_mtime)}
        assert (file.read_text(), file.stat().st_mtime) == (CLIP, before)
    assert len(times) == 3  # no bytecode of another source is taken for that of this one
