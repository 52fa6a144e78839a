// Deterministic random numbers: the same on every host, compiler and library.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace slidedp::testing {

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [0, n); n > 0. Biased by less than n / 2^64.
  uint64_t Below(uint64_t n) { return Next() % n; }
  // In [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Uniform(double low, double high) {
    return low + (high - low) * Uniform();
  }
  double Normal() {
    double radius = std::sqrt(-2 * std::log(1 - Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace slidedp::testing
