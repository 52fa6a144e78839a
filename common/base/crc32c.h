// CRC-32C (Castagnoli), the checksum of checkpoints. About 8 GB/s a thread
// where the CPU has the instruction, some 1 GB/s elsewhere; the same value on
// both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slidedp {

// Of the bytes that gave `crc` followed by these. Of nothing: 0.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes);

// Of a text whose parts have these checksums: pieces may be taken in any order.
uint32_t Crc32cConcat(uint32_t first, uint32_t second, uint64_t second_bytes);

// What CPUs without the instruction do; for tests.
uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t bytes);

}  // namespace slidedp
