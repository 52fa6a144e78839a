// Looks at planes while the engine writes them, and distances between states.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {

inline constexpr policy::GradRoute kRoutes[] = {policy::GradRoute::kGpuRoot,
                                                policy::GradRoute::kGpuSharded,
                                                policy::GradRoute::kCpu};

// What lies at an address of a segment now, while others write: read through
// the descriptor, as the thread sanitizer must not take it for a race.
template <typename T>
T ReadShared(const HostState& state, const T* address) {
  const auto* at = reinterpret_cast<const char*>(address);
  for (const shm::Segment& segment : state.segments()) {
    const char* begin = segment.mapping().at<char>(0);
    if (at < begin || at >= begin + segment.bytes()) continue;
    T value;
    EXPECT_EQ(pread(segment.fd(), &value, sizeof(T), at - begin),
              static_cast<ssize_t>(sizeof(T)));
    return value;
  }
  ADD_FAILURE() << "in no segment";
  return T();
}

inline double Weight(const Snapshot& s, size_t i) {
  return JoinFloat(s.hi[i], s.lo[i]);
}

// |a - b| / |b| over all weights, first and second moments; the largest.
inline double RelativeDistance(const Snapshot& a, const Snapshot& b) {
  double distance[3] = {}, size[3] = {};
  for (size_t i = 0; i < a.hi.size(); ++i) {
    const double of_a[] = {Weight(a, i), std::bit_cast<float>(a.m[i]),
                           std::bit_cast<float>(a.v[i])};
    const double of_b[] = {Weight(b, i), std::bit_cast<float>(b.m[i]),
                           std::bit_cast<float>(b.v[i])};
    for (int k = 0; k < 3; ++k) {
      distance[k] += (of_a[k] - of_b[k]) * (of_a[k] - of_b[k]);
      size[k] += of_b[k] * of_b[k];
    }
  }
  double worst = 0;
  for (int k = 0; k < 3; ++k) {
    worst = std::max(worst, std::sqrt(distance[k] / size[k]));
  }
  return worst;
}

}  // namespace slidedp::hostd
