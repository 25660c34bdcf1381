#!/usr/bin/env bash
# Run the kit for a GPU or the benchmark, on a machine that may have no network. The interpreter
# brings torch for CUDA; build/gpu-wheels supplies what else is missing, or else the package index.
# Usage: scripts/gpu.sh test [part ...]       these parts, or all, in their order (tests/gpu/kit.py)
#        scripts/gpu.sh bench [part]
#        scripts/gpu.sh wheels                fetch what such a machine may lack
# GPU_PYTHON= the interpreter, GPU_NCCL= the path of an NCCL of 2.30 or newer, OUT= the folder of the
# kit's files
set -euo pipefail
cd "$(dirname "$0")/.."

python=${GPU_PYTHON:-python3}
wheels=build/gpu-wheels
needed=(msgspec pyzmq pytest typing-extensions)

read -r -a parts <<<"${*:2}"
case ${1:-} in
test) command=(tests.gpu.kit --out "${OUT:-build/gpu}" "${parts[@]}") ;;
bench) command=(benchmarks.bench_gpu ${parts:+--part "${parts[0]}"}) ;;
wheels)
    mkdir -p "$wheels"
    .venv/bin/python -m pip download --quiet --dest "$wheels" --only-binary :all: --no-deps \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        "${needed[@]}" setuptools iniconfig pluggy packaging pygments
    exec du -sh "$wheels"
    ;;
*) sed -n 4,8p "$0" && exit 2 ;;
esac

if ! "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    echo "skipped: $python has no torch with a GPU (GPU_PYTHON= names another interpreter)"
    exit 0
fi
export PYTHONPATH=$PWD/build/gpu-packages # the interpreter may be the system's, which stays as it is
install() { "$python" -m pip install --quiet --target "$PYTHONPATH" "$@"; }
for package in setuptools "${needed[@]}"; do
    "$python" -m pip show --quiet "$package" 2>/dev/null ||
        install --no-index --find-links "$wheels" "$package" 2>/dev/null || install "$package"
done
P2P_SANITIZE='' "$python" setup.py --quiet build_ext --inplace
exec "$python" -m "${command[@]}"
