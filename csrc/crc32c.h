/* CRC-32C (Castagnoli; RFC 3720, appendix B.4): compares bytes before and after a transfer. */
#ifndef P2P_CRC32C_H
#define P2P_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Needs a processor that has it. */
typedef enum { CRC32C_TABLE, CRC32C_SSE42 } crc32c_way_t;

crc32c_way_t crc32c_best_way(void);

/* Continues `crc`, which is 0 at the beginning, over nbytes more, in the best way. */
uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes);

/* For tests and benchmarks. */
uint32_t crc32c_by(crc32c_way_t way, uint32_t crc, const void* data, size_t nbytes);

#endif
