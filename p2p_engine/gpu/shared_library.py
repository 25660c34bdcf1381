"""Finds shared libraries at run time; importing this package needs none of them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from p2p_engine.errors import ConfigError


def load_library(configured: str, sonames: Sequence[str], wheels: Sequence[str]) -> ctypes.CDLL:
    """Load the first of: the configured path, a library that the process has loaded already
    (torch's), a wheel's, the system's. Each import package in `wheels` has its libraries in `lib`.

    Raises:
        ConfigError: none could be loaded; names those that were tried.
    """
    tried = []
    for name, mode in _candidates(configured, sonames, wheels):
        try:
            return ctypes.CDLL(name, mode=mode)
        except OSError as error:
            tried.append(str(error))
    raise ConfigError(f"{configured or sonames[0]} cannot be loaded: {'; '.join(tried)}")


def bind(library: ctypes.CDLL, result: object, functions: Mapping[str, tuple[object, ...]]) -> None:
    """Declare functions by name, with their arguments and their common result type.

    Raises:
        ConfigError: the library lacks one; names it.
    """
    for name, arguments in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ConfigError(f"not the expected library: {error}") from error
        function.argtypes, function.restype = arguments, result


def _candidates(
    configured: str, sonames: Sequence[str], wheels: Sequence[str]
) -> Iterator[tuple[str, int]]:
    if configured:
        yield configured, os.RTLD_LOCAL
        return
    for soname in sonames:
        yield soname, os.RTLD_LOCAL | os.RTLD_NOLOAD
    for folder in (folder for wheel in wheels for folder in _folders(wheel)):
        for path in (folder / "lib" / soname for soname in sonames):
            if path.exists():
                yield str(path), os.RTLD_LOCAL
    for soname in sonames:
        yield soname, os.RTLD_LOCAL


def _folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # its parent package is missing, too
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
