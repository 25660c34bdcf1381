"""What an installation needs, and what a package index shows of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from email.message import Message
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_engine.cli import installation
from p2p_engine.cli.app import app
from p2p_engine.cli.findings import Level

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def metadata() -> Message:
    return importlib.metadata.distribution(installation.DISTRIBUTION).metadata  # type: ignore[return-value]


def requirements(metadata: Message, extra: str) -> set[str]:
    """Name what an extra adds; "" is the bare installation."""
    lines = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    chosen = [line for line in lines if ("extra ==" in line) == bool(extra)]
    return {re.split(r"[^\w-]", line)[0] for line in chosen if not extra or f'"{extra}"' in line}


def test_only_the_engine_needs_torch_and_only_the_proxy_quart(metadata: Message) -> None:
    bare, engine, proxy = (requirements(metadata, extra) for extra in ("", "engine", "proxy"))
    assert bare == {"msgspec", "numpy", "pyzmq", "rich", "typer"}
    assert engine == {"torch"}
    assert "quart" in proxy
    assert "torch" not in proxy


def test_every_link_of_the_description_leads_somewhere_from_an_index(metadata: Message) -> None:
    text = str(metadata.get_payload() or metadata["Description"])
    links = re.findall(r"\]\(([^)]+)\)", text)
    source = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))["Source"]
    ours = [link for link in links if link.startswith(source)]
    assert len(ours) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    files = [link.removeprefix(f"{source}/blob/main/").partition("#")[0] for link in ours]
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", installation.COMMON_NAMES)
def test_packages_with_common_names_are_ours_here(name: str) -> None:
    assert installation.check_name(name).level is Level.OK


def test_another_distribution_with_a_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"proxy": ["p2p-kv-engine", "proxy.py"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    finding = installation.check_name("proxy")
    assert finding.level is Level.CHANGE
    assert "proxy.py installs a proxy, too" in finding.state


@pytest.mark.parametrize("origin", ["/elsewhere/mempool/__init__.py", None])
def test_a_package_in_another_folder_is_named(
    origin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = None if origin is None else ModuleSpec("mempool", None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    finding = installation.check_name("mempool")
    assert finding.level is Level.CHANGE
    assert ("/elsewhere/mempool" if origin else "none") in finding.state


def test_the_proxy_says_how_to_install_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "proxy.main", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused = CliRunner().invoke(app, ["proxy"])
    assert refused.exit_code == 1
    assert "pip install 'p2p-kv-engine[proxy]'" in refused.output
