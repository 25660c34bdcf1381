#!/usr/bin/env bash
# Run the GPU tests and the benchmark, on a machine that may have no network. The interpreter brings
# torch for CUDA, and cupy if it can; build/gpu-wheels supplies all other packages.
# Usage: scripts/gpu.sh test|bench [part]     all parts, one after the other, or this one alone
#        scripts/gpu.sh wheels                fetch what such a machine may lack
# GPU_PYTHON= the interpreter, GPU_NCCL= the path of an NCCL of 2.30 or newer
set -euo pipefail
cd "$(dirname "$0")/.."

python=${GPU_PYTHON:-python3}
wheels=build/gpu-wheels
results=build/gpu-tests.json
needed=(msgspec pyzmq pytest pytest-timeout pytest-asyncio typing-extensions)

case ${1:-} in
test)
    parts=(device connector groups "kills and nccl" "kills and cuda_ipc" "exchange and nccl and PUT and not ASYNC"
        "exchange and nccl and ASYNC" "exchange and nccl and GET" "exchange and cuda_ipc" one_host)
    command=("$python" -m pytest -q -W default tests/gpu -m gpu -k) # its torch may warn
    ;;
bench)
    parts=(pack pool push groups)
    command=("$python" -m benchmarks.bench_gpu --part)
    ;;
wheels)
    mkdir -p "$wheels"
    .venv/bin/python -m pip download --quiet --dest "$wheels" --only-binary :all: --no-deps \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        "${needed[@]}" setuptools iniconfig pluggy packaging pygments
    exec du -sh "$wheels"
    ;;
*) sed -n 4,6p "$0" && exit 2 ;;
esac
[[ -z ${2:-} ]] || parts=("$2")

if ! "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    echo "skipped: $python has no torch with a GPU (GPU_PYTHON= names another interpreter)"
    mkdir -p build
    [[ -e $results ]] || echo '{"machine": {"gpu": null}, "tests": {}}' >"$results"
    exit 0
fi
export PYTHONPATH=$PWD/build/gpu-packages # the interpreter may be the system's, which stays as it is
for package in setuptools "${needed[@]}"; do
    "$python" -m pip show --quiet "$package" 2>/dev/null ||
        "$python" -m pip install --quiet --no-index --find-links "$wheels" --target "$PYTHONPATH" "$package"
done
P2P_SANITIZE='' "$python" setup.py --quiet build_ext --inplace

status=0
for part in "${parts[@]}"; do
    echo "== $1: $part"
    timeout 480 "${command[@]}" "$part" || status=$?
done
exit "$status"
