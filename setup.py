"""The C extension and its switches; all metadata is in pyproject.toml.

P2P_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer
P2P_COVERAGE=1   gcov counters
"""

import os
import re
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup


def long_description() -> str:
    """Return the README with links that lead somewhere from a package index, too."""
    source = re.search(r'^Source = "(.+)"$', Path("pyproject.toml").read_text("utf-8"), re.M)[1]
    readme = Path("README.md").read_text("utf-8")
    return re.sub(r"\]\((?!https?://|#)", f"]({source}/blob/main/", readme)


# One build for every Python from 3.11 on. Before that, the limited API had no buffer protocol.
is_limited = sys.version_info >= (3, 11)

macros = [("_GNU_SOURCE", None)]
if is_limited:
    macros.append(("Py_LIMITED_API", "0x030b0000"))
compile_args = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"]
link_args = ["-pthread"]
if os.environ.get("P2P_SANITIZE") == "1":
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*sanitize, "-fno-omit-frame-pointer", "-g", "-O1"]
    link_args += sanitize
if os.environ.get("P2P_COVERAGE") == "1":
    compile_args += ["--coverage", "-O0"]
    link_args += ["--coverage"]

native = Extension(
    "mempool._native",
    sources=sorted(glob("csrc/*.c")),
    depends=sorted(glob("csrc/*.h")),
    define_macros=macros,
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    libraries=["dl"],
    py_limited_api=is_limited,
)

setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[native],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if is_limited else {},
)
