#!/usr/bin/env bash
# Builds the C tests under sanitizers and runs each.
# Usage: tests/c/run.sh [name...]     default: every test_*.c, then the fuzzers
#   P2P_SANITIZER=thread              instead of address,undefined
#   P2P_COVERAGE=1                    adds gcov counters
set -euo pipefail
cd "$(dirname "$0")/../.."

sanitizer=${P2P_SANITIZER:-address,undefined}
build=build/c-tests/$sanitizer
mkdir -p "$build"
flags=(-std=c11 -D_GNU_SOURCE -g -O1 -Wall -Wextra -Wconversion -Wshadow -Werror
    -fsanitize="$sanitizer" -fno-omit-frame-pointer -fno-sanitize-recover=all -Icsrc)
if [[ ${P2P_COVERAGE:-} == 1 ]]; then
    flags+=(--coverage)
fi

# Everything but the Python binding.
mapfile -t sources < <(find csrc -name '*.c' ! -name '*module.c' | sort)
objects=()
for source in "${sources[@]}"; do
    object=$build/$(basename "$source" .c).o
    "${CC:-cc}" "${flags[@]}" -c "$source" -o "$object"
    objects+=("$object")
done

if (($#)); then
    names=("$@")
else
    mapfile -t names < <(basename -s .c tests/c/test_*.c tests/c/fuzz_*.c)
fi
for name in "${names[@]}"; do
    echo "== $name"
    "${CC:-cc}" "${flags[@]}" "tests/c/$name.c" "${objects[@]}" -pthread -ldl -rdynamic -o "$build/$name"
    timeout 60 "$build/$name"
done
