"""CRC-32C on a GPU (RFC 3720, appendix B.4): the mover's checksum, because one side of a transfer
may be in host memory.

A CRC is linear. That of a stream is the sum (XOR) of those of its parts, each multiplied by x to
the number of bits that come behind it, modulo the polynomial. So the parts need no order and need
not wait for each other: a thread takes one part, wherever it lies, eight bytes at a time by tables,
multiplies, and adds its share to one word. Only the first part begins with the usual ones; the
inverse of the word is the checksum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2p_engine.gpu.cuts import level
from p2p_engine.memory.layout import Int64s

Words = npt.NDArray[np.uint32]

PART_BYTES = 4 << 10  # of a thread: 24,576 threads for 96 MiB, and a multiplication for each part
MAX_ROWS = 32 << 10  # regions of one launch
POLYNOMIAL = 0x82F63B78  # reflected: the highest bit of a word is x to the power of 0
NUM_TABLES, NUM_POWERS = 8, 64
ONES = 0xFFFFFFFF
CONSTANTS_BYTES = 4 * (256 * NUM_TABLES + NUM_POWERS)

# `regions` is (address, bytes of the stream behind it, length) as int64[num_regions, 3]; each is
# cut into parts_each parts, of which the last ones may be empty. `tables` has what a byte becomes
# with 0 to 7 zero bytes behind it, and then x to the power of 8 * 2**k. No address is in host
# memory.
CHECKSUM_KERNEL = r"""
__device__ unsigned crc_byte(const unsigned* tables, unsigned crc, unsigned char byte) {
    return tables[(crc ^ byte) & 255] ^ (crc >> 8);
}

__device__ unsigned crc_word(const unsigned* tables, unsigned crc, unsigned long long word) {
    const unsigned low = (unsigned)word ^ crc, high = (unsigned)(word >> 32);
    return tables[7 * 256 + (low & 255)] ^ tables[6 * 256 + ((low >> 8) & 255)] ^
           tables[5 * 256 + ((low >> 16) & 255)] ^ tables[4 * 256 + (low >> 24)] ^
           tables[3 * 256 + (high & 255)] ^ tables[2 * 256 + ((high >> 8) & 255)] ^
           tables[256 + ((high >> 16) & 255)] ^ tables[high >> 24];
}

__device__ unsigned crc_product(unsigned one, unsigned other) {
    unsigned product = 0;
    for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
        if (one & bit) product ^= other;
        other = (other >> 1) ^ (other & 1 ? POLYNOMIALu : 0);
    }
    return product;
}

extern "C" __global__ void add_checksums(const long long* regions, long long num_regions,
                                         long long parts_each, const unsigned* tables,
                                         unsigned* sum, long long is_start) {
    const long long num_parts = num_regions * parts_each;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long part = (long long)blockIdx.x * blockDim.x + threadIdx.x; part < num_parts;
         part += step) {
        const long long* region = regions + part / parts_each * 3;
        const long long start = part % parts_each * PART_BYTES;
        const long long rest = region[2] - start;
        if (rest <= 0) continue;
        const long long n = rest < PART_BYTES ? rest : PART_BYTES;
        const unsigned char* data = (const unsigned char*)region[0] + start;
        unsigned crc = is_start && part == 0 ? ~0u : 0;
        long long i = 0;
        for (; i < n && (unsigned long long)(data + i) % 8; i++)
            crc = crc_byte(tables, crc, data[i]);
        for (; i + 8 <= n; i += 8)
            crc = crc_word(tables, crc, *(const unsigned long long*)(data + i));
        for (; i < n; i++) crc = crc_byte(tables, crc, data[i]);
        const unsigned* power = tables + NUM_TABLES * 256;
        for (unsigned long long behind = region[1] + (rest - n); behind; behind >>= 1, power++)
            if (behind & 1) crc = crc_product(crc, *power);
        atomicXor(sum, crc);
    }
}
"""
CHECKSUM_KERNEL = (
    CHECKSUM_KERNEL.replace("PART_BYTES", str(PART_BYTES))
    .replace("POLYNOMIAL", str(POLYNOMIAL))
    .replace("NUM_TABLES", str(NUM_TABLES))
)


def batches(addresses: Int64s, lengths: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Cut a stream of regions for launches: addresses, the bytes of the stream behind each region,
    lengths."""
    starts = np.cumsum(lengths) - lengths
    nbytes = int(lengths.sum())
    addresses, starts, lengths = level(addresses, starts, lengths, PART_BYTES)
    behind = nbytes - starts - lengths
    for first in range(0, len(addresses), MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        yield addresses[rows], behind[rows], lengths[rows]


@functools.cache
def tables() -> bytes:
    """Return the kernel's tables: of single bytes, and of powers."""
    words: Words = np.zeros((NUM_TABLES, 256), np.uint32)
    words[0] = np.arange(256)
    for _ in range(8):
        words[0] = (words[0] >> 1) ^ np.where(words[0] & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    for number in range(1, NUM_TABLES):
        words[number] = words[0][words[number - 1] & 255] ^ (words[number - 1] >> 8)
    powers = [1 << 23]  # x**8
    while len(powers) < NUM_POWERS:
        powers.append(product(powers[-1], powers[-1]))
    return words.tobytes() + np.array(powers, np.uint32).tobytes()


def product(one: int, other: int) -> int:
    """Multiply two polynomials modulo the one of the checksum."""
    result = 0
    for bit in range(31, -1, -1):
        result ^= other if one >> bit & 1 else 0
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return result
