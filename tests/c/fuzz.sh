#!/usr/bin/env bash
# Builds fuzz_stream.c with libFuzzer, AddressSanitizer and UBSan, and runs it.
# Usage: tests/c/fuzz.sh [seconds]      default: 60; CLANG= names the compiler
set -euo pipefail
cd "$(dirname "$0")/../.."

clang=${CLANG:-$(compgen -c clang | grep -E '^clang(-[0-9]+)?$' | sort -V | tail -n 1 || true)}
if [[ -z $clang ]]; then
    echo "libFuzzer comes with clang: apt install clang" >&2
    exit 2
fi
build=build/c-tests/libfuzzer
mkdir -p "$build/corpus"
mapfile -t sources < <(find csrc -name '*.c' ! -name '*module.c' | sort)
"$clang" -std=c11 -D_GNU_SOURCE -DLIBFUZZER -g -O1 -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all -fno-omit-frame-pointer -Icsrc -Itests/c \
    tests/c/fuzz_stream.c "${sources[@]}" -pthread -ldl -o "$build/fuzz_stream"
exec "$build/fuzz_stream" -max_total_time="${1:-60}" -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$build/" "$build/corpus"
