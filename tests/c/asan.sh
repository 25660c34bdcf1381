#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UBSan, apart from the usual one, and runs the
# Python tests of mempool on it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=.venv/bin/python
build=build/asan
mkdir -p "$build/mempool"
P2P_SANITIZE=1 $python setup.py -q build_ext --build-lib "$build" --build-temp "$build/objects"
cp mempool/*.py "$build/mempool/"

# The sanitizers must be there before the interpreter, which is not built with them.
LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libubsan.so)"
export LD_PRELOAD
# Leaks of the interpreter itself would hide ours; the tests count threads, descriptors and mappings.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
exec $python -m pytest -q -p no:cacheprovider -o pythonpath="$build ." --timeout 300 \
    tests/unit/test_mempool*.py tests/unit/test_native*.py \
    tests/property/test_buddy_model.py tests/property/test_native_regions.py "$@"
