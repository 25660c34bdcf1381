"""The C extension and its two switches; all metadata is in pyproject.toml.

P2P_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer
P2P_COVERAGE=1   gcov counters
"""

import os
from glob import glob

from setuptools import Extension, setup

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
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    libraries=["dl"],
)

setup(ext_modules=[native])
