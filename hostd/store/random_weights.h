// Weights from a seed, for benchmarks and training from nothing: the default
// initialisation of transformers (initializer_range 0.02). Norms are 1, biases
// 0, everything else is normal with mean 0 and standard deviation 0.02.
//
// A value is a pure function of (seed, tensor name, element index): one 64-bit
// hash gives a sign and 31 bits of tail probability, which the inverse of the
// normal distribution maps to at most 6.4 standard deviations. Only operations
// that IEEE 754 rounds exactly are used, so that every host, compiler and
// number of threads makes the same bits.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

inline constexpr float kRandomWeightDeviation = 0.02f;

// out[i] = element first + i of the tensor's normal values (deviation 1).
void RandomNormals(uint64_t seed, absl::string_view tensor_name, uint64_t first,
                   uint64_t count, float* out);

// Fills every tensor of the layout; padding and moments stay zero. No worker
// may have the segments yet. `threads`: at least 1. `stop`: LoadParameters.
absl::Status FillRandomParameters(uint64_t seed, int threads, HostState& state,
                                  const std::atomic<bool>* stop = nullptr);

}  // namespace slidedp::hostd
