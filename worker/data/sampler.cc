#include "worker/data/sampler.h"

#include "common/base/check.h"

namespace slidedp::data {
namespace {

constexpr int kRounds = 6;

// The finalizer of splitmix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A bijection of [0, 2^(2 * half_bits)).
uint64_t Feistel(uint64_t x, uint64_t key, int half_bits) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = x >> half_bits, right = x & mask;
  for (int round = 0; round < kRounds; ++round) {
    // Odd steps by the golden ratio keep the round keys apart.
    const uint64_t round_key = Mix(key + (round + 1) * 0x9e3779b97f4a7c15u);
    const uint64_t next = left ^ (Mix(right ^ round_key) & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

Sampler::Sampler(uint64_t sequences, uint64_t seed)
    : sequences_(sequences), seed_(seed), half_bits_(1) {
  SDP_CHECK(sequences >= 1 && sequences <= uint64_t{1} << 62,
            "a sampler needs 1 to 2^62 sequences");
  // The smallest even width that holds all: at most 4 values for one used.
  while (uint64_t{1} << (2 * half_bits_) < sequences_) ++half_bits_;
}

uint64_t Sampler::At(uint64_t position) const {
  const uint64_t epoch = position / sequences_;
  const uint64_t key = Mix(Mix(seed_ + 0x9e3779b97f4a7c15u) + epoch);
  uint64_t x = position % sequences_;
  // Cycle walking: the bijection's cycle through x comes back into the range.
  do {
    x = Feistel(x, key, half_bits_);
  } while (x >= sequences_);
  return x;
}

uint64_t DerivedSeed(uint64_t seed, uint64_t n) {
  return Mix(seed + Mix(n + 0x9e3779b97f4a7c15u));
}

}  // namespace slidedp::data
