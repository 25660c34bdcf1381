"""The parts of `make test-upstream` that could make it pass for the wrong reason."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tests.upstream import sdist
from tests.upstream.raising import HOOKS, HookCalled, raising
from tests.upstream.results import FAILED, PASSED, SKIPPED, Result, read_report, table, with_control
from tests.upstream.suites import Edit

PAGE = """
<a href="../../files/vllm-0.32.0.tar.gz#sha256=aa" data-requires-python="&gt;=3.10">x</a>
<a href="https://elsewhere.example/vllm-0.32.0-py3-none-any.whl#sha256=bb">y</a>
"""


def make_archive(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "vllm-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_finds_a_relative_link() -> None:
    found = sdist.find_link(PAGE, "https://index.example/simple/vllm/", "vllm-0.32.0.tar.gz")
    assert found == "https://index.example/files/vllm-0.32.0.tar.gz#sha256=aa"


def test_names_what_the_index_lacks() -> None:
    with pytest.raises(sdist.SourceError, match=r"vllm-9\.tar\.gz"):
        sdist.find_link(PAGE, "https://index.example/simple/vllm/", "vllm-9.tar.gz")


@pytest.mark.parametrize("fragment", ["", "#sha256=00", "#md5=00"])
def test_refuses_content_without_its_hash(fragment: str) -> None:
    with pytest.raises(sdist.SourceError, match="hash"):
        sdist.check_hash(f"https://index.example/x.tar.gz{fragment}", b"content")


def test_accepts_content_with_its_hash() -> None:
    digest = hashlib.sha256(b"content").hexdigest()
    sdist.check_hash(f"https://index.example/x.tar.gz#sha256={digest}", b"content")


def test_downloads_once_and_only_what_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive(tmp_path, {"tests/a.py": "a = 1"})
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    index = tmp_path / "simple" / "vllm"
    index.mkdir(parents=True)
    page = index / "index.html"
    page.write_text(f'<a href="{archive.as_uri()}#sha256={digest}">x</a>')
    monkeypatch.setattr(sdist, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sdist, "_page_url", lambda project: page.as_uri())
    fetched = sdist.fetch_source("vllm", "1.0")
    page.unlink()
    assert sdist.fetch_source("vllm", "1.0") == fetched
    assert sdist.read_members(fetched, ["tests/a.py"]) == {"tests/a.py": "a = 1"}


def test_names_members_that_the_archive_lacks(tmp_path: Path) -> None:
    archive = make_archive(tmp_path, {"a.py": ""})
    with pytest.raises(sdist.SourceError, match=r"b\.py"):
        sdist.read_members(archive, ["a.py", "b.py"])


def test_extracts_nothing_outside_its_folder(tmp_path: Path) -> None:
    archive = make_archive(tmp_path, {"vllm/x.py": "x", "vllm/../../y.py": "y", "z.py": "z"})
    sdist.extract_folder(archive, "vllm", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["x.py"]
    assert not list(tmp_path.rglob("y.py"))


@pytest.mark.parametrize("text", ["nothing", "old and old"])
def test_an_edit_must_fit_exactly_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"utils\.py"):
        Edit("utils.py", "old", "new", "why").apply(text)


def test_an_edit_changes_only_what_it_names() -> None:
    assert Edit("utils.py", "old", "new", "why").apply("an old one") == "an new one"


@pytest.mark.parametrize(
    ("outcome", "control", "is_bad"),
    [
        (PASSED, FAILED, False),
        (PASSED, PASSED, True),  # it would pass for any connector
        (PASSED, "", False),  # no control run: it boots servers
        (FAILED, FAILED, True),
        (SKIPPED, SKIPPED, False),
    ],
)
def test_what_counts_against_the_run(outcome: str, control: str, is_bad: bool) -> None:
    assert Result("suite", "test", outcome, control=control).is_bad is is_bad


def test_reads_reports_and_joins_the_control_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a.b" name="t1[x]"/>'
        '<testcase classname="a.b" name="t2"><failure message="assert 1\nmore"/></testcase>'
        '<testcase classname="a.b" name="t3"><skipped message="why"/></testcase>'
        '<testcase classname="a.b" name="t4"><error message="e"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = with_control(read_report(report), [Result("b", "t1[x]", FAILED)])
    assert [result.outcome for result in found] == [PASSED, FAILED, SKIPPED, FAILED]
    assert found[0].control == FAILED
    shown = table(found, "title")
    assert "b::t1[x]" in shown
    assert "1 passed, 2 failed, 1 skipped" in shown


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_of_a_raising_connector_raises(hook: str) -> None:
    class Connector:
        def other(self) -> int:
            return 1

    broken = raising(Connector)()
    assert broken.other() == 1
    with pytest.raises(HookCalled, match=hook):
        getattr(broken, hook)("request", num_computed_tokens=0)
