"""The doctor's checks of the installation: Python, torch, the C extension, vLLM, the plug-in."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from p2p_engine.cli.devices import is_cpu_vllm, vllm_version
from p2p_engine.cli.findings import Finding, change, note, ok
from p2p_engine.transfer_config import CONNECTOR

DISTRIBUTION = "p2p-kv-engine"
COMMON_NAMES = ("mempool", "proxy")  # packages of ours whose names others use, as proxy.py does
SUPPORTED_PYTHON = ((3, 10), (3, 13))
SUPPORTED_VLLM = ((0, 29), (0, 33))
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "p2p_nccl_connector"
_RESOLVE_SECONDS = 120.0
# Runs in a child process: importing vLLM is slow and changes the process.
_RESOLVE = f"""
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
found = KVConnectorFactory.get_connector_class_by_name({CONNECTOR!r})
print(json.dumps(found.__module__))
"""


def check_installation() -> Iterator[Finding]:
    """Check the installed parts; blocks for the import of vLLM, half a minute or so."""
    yield check_python(sys.version_info[:2])
    yield _check_torch()
    yield _check_extension()
    yield from map(check_name, COMMON_NAMES)
    yield _check_quart()
    version = vllm_version()
    yield check_vllm(version)
    if version is not None:
        if is_cpu_vllm():
            yield _check_numa_library()
        yield check_plugin()


def check_python(version: tuple[int, int]) -> Finding:
    """Check that this Python is supported."""
    words = ".".join(map(str, version))
    if SUPPORTED_PYTHON[0] <= version <= SUPPORTED_PYTHON[1]:
        return ok("Python", words)
    return change("Python", words, "use Python 3.10 to 3.13")


def _check_torch() -> Finding:
    try:
        return ok("torch", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return change("torch", "not installed", f"install vLLM, or {DISTRIBUTION}[engine]")


def _check_extension() -> Finding:
    try:
        importlib.import_module("mempool._native")
    except ImportError as error:
        return change(
            "C extension", str(error), "install a wheel, or pip install . with a C compiler"
        )
    return ok("C extension", "loads")


def check_name(name: str) -> Finding:
    """Check that a package with a common name is ours, and nobody else's as well."""
    subject = f"package {name}"
    others = sorted({*metadata.packages_distributions().get(name, ())} - {DISTRIBUTION})
    if others:
        remedy = f"pip uninstall {others[0]}, then pip install --force-reinstall {DISTRIBUTION}"
        return change(subject, f"{others[0]} installs a {name}, too", remedy)
    spec = importlib.util.find_spec(name)
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    ours = Path(__file__).parents[2] / name
    if found != ours:
        remedy = "start elsewhere, or take that folder out of PYTHONPATH"
        return change(subject, f"Python finds {found or 'none'}, not {ours}", remedy)
    return ok(subject, "ours")


def _check_quart() -> Finding:
    try:
        return ok("Quart", metadata.version("quart"))
    except metadata.PackageNotFoundError:
        remedy = f"only the proxy needs it: pip install '{DISTRIBUTION}[proxy]'"
        return note("Quart", "not installed", remedy)


def check_vllm(version: str | None) -> Finding:
    """Check that this vLLM is supported."""
    if version is None:
        remedy = "install vLLM 0.29 to 0.33; without it, only the engine and the proxy work"
        return change("vLLM", "not installed", remedy)
    major, minor = (int(part) for part in version.split(".")[:2])
    if SUPPORTED_VLLM[0] <= (major, minor) <= SUPPORTED_VLLM[1]:
        return ok("vLLM", version)
    remedy = "install vLLM 0.29 to 0.33"
    if (major, minor) < (0, 24):
        remedy += "; up to 0.23 vLLM has its own connector of the same name"
    return change("vLLM", version, remedy)


def _check_numa_library() -> Finding:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        return change("libnuma", str(error), "apt install libnuma1")
    return ok("libnuma", "loads")


def check_plugin() -> Finding:
    """Check that vLLM finds the connector by its name."""
    entries = metadata.entry_points(group=PLUGIN_GROUP)
    if PLUGIN not in {entry.name for entry in entries}:
        remedy = "pip install . again; a folder on PYTHONPATH has no entry points"
        return change("connector", f"no entry point {PLUGIN} in {PLUGIN_GROUP}", remedy)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        remedy = f"add {PLUGIN} to VLLM_PLUGINS, or unset it"
        return change("connector", f"VLLM_PLUGINS={allowed} keeps vLLM from loading it", remedy)
    return _resolve_plugin()


def _resolve_plugin() -> Finding:
    child = [sys.executable, "-c", _RESOLVE]
    try:
        answer = subprocess.run(
            child, capture_output=True, text=True, check=False, timeout=_RESOLVE_SECONDS
        )
        module = json.loads(answer.stdout.splitlines()[-1]) if answer.returncode == 0 else ""
    except subprocess.TimeoutExpired:
        return note("connector", f"importing vLLM took more than {_RESOLVE_SECONDS:g} s")
    if module.startswith("p2p_engine."):
        return ok("connector", f"{CONNECTOR} is {module}")
    if module:
        return change("connector", f"{CONNECTOR} is {module}", "remove the other connector")
    reason = answer.stderr.strip().splitlines()[-1:] or ["no reason given"]
    return change("connector", reason[0], "vLLM itself, or our connector, cannot be imported")
