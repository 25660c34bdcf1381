"""The wheel has all that the packages have: modules, the extension, its stub and the type marks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import marks

ROOT = Path(__file__).parents[2]
PACKAGES = ("mempool", "p2p_engine", "proxy")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, so that no earlier build is in the way."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in (*PACKAGES, "csrc"):
        shutil.copytree(ROOT / folder, source / folder, ignore=NOT_SOURCES)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=300)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@marks.slow
@pytest.mark.timeout(360)
def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    kept = {path for path in files if path.suffix in {".py", ".pyi", ".typed", ".html"}}
    assert {str(path.relative_to(ROOT)) for path in kept} <= set(wheel.namelist())
    assert {f"{name}/py.typed" for name in PACKAGES} <= set(wheel.namelist())


@marks.slow
@pytest.mark.timeout(360)
def test_the_wheel_has_the_extension_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    natives = [name for name in names if name.endswith(".so")]
    assert [name.startswith("mempool/_native.") for name in natives] == [True]
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@marks.slow
@pytest.mark.timeout(360)
def test_the_wheel_names_its_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entries = wheel.read(name).decode().splitlines()
    assert "p2p-engine = p2p_engine.cli:main" in entries
    assert "p2p_nccl_connector = p2p_engine.connector:register" in entries
