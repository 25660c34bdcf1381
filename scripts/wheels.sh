#!/usr/bin/env bash
# Builds the source distribution and the wheels for x86-64 and aarch64 into dist/, and checks them.
# The compiler comes from PyPI and links against the glibc of manylinux_2_28. Python 3.11 makes one
# wheel for itself and all that follow, and Python 3.10, if it is here, one for itself.
set -euo pipefail
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"
compiler="$PWD/.venv/bin/python -m ziglang cc"
glibc=2.28
work=$PWD/build/wheels
pythons=(python)
python3.10 -V > /dev/null 2>&1 && pythons+=(python3.10)

ask() { # of a Python: ask FOLDER NAME
    "$1/bin/python" -c "import sysconfig as s, sys; version = 'python%d.%d' % sys.version_info[:2]; print($2)"
}

# Debian keeps pyconfig.h in a folder for each machine. What it says of 64-bit Linux, it says of both.
copy_config() { # copy_config FOLDER MACHINE
    local headers
    headers=$work/include/$2-linux-gnu/$(ask "$1" version)
    mkdir -p "$headers"
    cp "$(ask "$1" 's.get_config_h_filename()')" "$headers"
}

build_wheel() { # build_wheel FOLDER MACHINE
    local source suffix
    copy_config "$1" "$2"
    source=$(mktemp --directory --tmpdir="$work")
    tar --extract --gzip --file dist/*.tar.gz --directory "$source" --strip-components 1
    suffix=$(ask "$1" 's.get_config_var("EXT_SUFFIX")')
    CC="$compiler -target $2-linux-gnu.$glibc -I$work/include" \
        LDSHARED="$compiler -target $2-linux-gnu.$glibc -shared -Wl,-s" \
        _PYTHON_HOST_PLATFORM=linux-$2 SETUPTOOLS_EXT_SUFFIX=${suffix/x86_64/$2} \
        "$1/bin/python" -m build --wheel --no-isolation --outdir "$work/made" "$source"
}

rm -rf "$work" dist
mkdir -p "$work"
python -m build --sdist --no-isolation
for python in "${pythons[@]}"; do
    uv venv --quiet --python "$(which "$python")" "$work/$python"
    uv pip install --quiet --python "$work/$python" build 'setuptools>=77'
    for machine in x86_64 aarch64; do
        build_wheel "$work/$python" "$machine"
    done
done
for wheel in "$work"/made/*; do
    auditwheel repair --plat auto --wheel-dir dist "$wheel"
done
abi3audit --strict dist/*-abi3-*.whl
twine check --strict dist/*
