#!/usr/bin/env bash
# The GPU's tests and benchmark, on a machine that may have no network: the interpreter brings torch
# for CUDA, and cupy if it can; what else is missing is taken from build/gpu-wheels.
# Usage: scripts/gpu.sh test|bench [path of another libnccl]|wheels     GPU_PYTHON= the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

python=${GPU_PYTHON:-python3}
wheels=build/gpu-wheels
needed=(msgspec pyzmq pytest pytest-timeout pytest-asyncio typing-extensions google-crc32c)

if [[ ${1:-} == wheels ]]; then
    mkdir -p "$wheels"
    exec .venv/bin/python -m pip download --quiet --dest "$wheels" --only-binary :all: --no-deps \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        "${needed[@]}" setuptools iniconfig pluggy packaging pygments
fi

if ! "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    echo "skipped: $python has no torch with a GPU (GPU_PYTHON= names another interpreter)"
    exit 0
fi
for package in "${needed[@]}"; do
    "$python" -m pip show --quiet "$package" 2>/dev/null ||
        "$python" -m pip install --quiet --no-index --find-links "$wheels" "$package"
done
P2P_SANITIZE='' "$python" setup.py --quiet build_ext --inplace

case ${1:-test} in
test) # each part can be run alone, and takes at most eight minutes
    for part in tests/gpu/test_device.py tests/gpu/test_processes.py; do
        timeout 480 "$python" -m pytest -q "$part" -m gpu
    done
    ;;
bench) timeout 480 "$python" -m benchmarks.bench_gpu ${2:+--nccl "$2"} ;;
*) sed -n 2,4p "$0" && exit 2 ;;
esac
