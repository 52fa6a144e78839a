#include "common/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace slidedp {
namespace {

// x^32 + ... + 1, bits reversed: the lowest coefficient is the highest bit.
constexpr uint32_t kPolynomial = 0x82f63b78u;
constexpr uint32_t kOne = uint32_t{1} << 31;  // x^0

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: the remainder of byte b followed by k zero bytes.
constexpr Tables MakeTables() {
  Tables tables = {};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    }
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      const uint32_t before = tables[k - 1][b];
      tables[k][b] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}
constexpr Tables kTables = MakeTables();

// a * b modulo the polynomial.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

// x^(2^k).
constexpr int kPowers = 67;  // bits of a 64-bit number of bytes
constexpr std::array<uint32_t, kPowers> MakePowers() {
  std::array<uint32_t, kPowers> powers = {};
  powers[0] = kOne >> 1;
  for (int k = 1; k < kPowers; ++k) {
    powers[k] = Multiply(powers[k - 1], powers[k - 1]);
  }
  return powers;
}
constexpr std::array<uint32_t, kPowers> kSquares = MakePowers();

uint64_t Load64(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t WithInstruction(
    uint32_t crc, const unsigned char* at, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; at += 8, bytes -= 8)
    wide = _mm_crc32_u64(wide, Load64(at));
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; ++at, --bytes) crc = _mm_crc32_u8(crc, *at);
  return crc;
}
bool HasInstruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
uint32_t WithInstruction(uint32_t crc, const unsigned char* at, size_t bytes) {
  for (; bytes >= 8; at += 8, bytes -= 8) crc = __crc32cd(crc, Load64(at));
  for (; bytes > 0; ++at, --bytes) crc = __crc32cb(crc, *at);
  return crc;
}
bool HasInstruction() { return true; }
#else
uint32_t WithInstruction(uint32_t crc, const unsigned char*, size_t) {
  return crc;
}
bool HasInstruction() { return false; }
#endif

}  // namespace

uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; at += 8, bytes -= 8) {
    const uint64_t word = Load64(at) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) {
      crc ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
    }
  }
  for (; bytes > 0; ++at, --bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xff];
  }
  return ~crc;
}

uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes) {
  static const bool has_instruction = HasInstruction();
  if (!has_instruction) return Crc32cPortable(crc, data, bytes);
  return ~WithInstruction(~crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t Crc32cConcat(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t shift = kOne;  // x^(8 * second_bytes)
  for (int k = 3; second_bytes != 0; ++k, second_bytes >>= 1) {
    if (second_bytes & 1) shift = Multiply(kSquares[k], shift);
  }
  return Multiply(shift, first) ^ second;
}

}  // namespace slidedp
