// Which sequence comes when.
#pragma once

#include <cstdint>

namespace slidedp::data {

// Counter based: position p (0, 1, 2, ... over all steps) is sequence
// Permute(epoch = p / sequences, p % sequences), a keyed Feistel permutation
// with cycle walking, so any position costs O(1) and resuming needs the step
// number only.
class Sampler {
 public:
  Sampler(uint64_t sequences, uint64_t seed);
  uint64_t At(uint64_t position) const;

 private:
  uint64_t sequences_, seed_;
  int half_bits_;
};

// A seed for the n-th of several orders that must not resemble each other.
uint64_t DerivedSeed(uint64_t seed, uint64_t n);

}  // namespace slidedp::data
