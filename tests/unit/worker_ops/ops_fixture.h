// A CPU device, a stream and its ops; random data; comparison by max-norm.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "common/device/device.h"
#include "gtest/gtest.h"
#include "tests/unit/worker_ops/reference.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

using reference::Vec;
using Floats = std::vector<float>;
using Bf16s = std::vector<bf16>;

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Float32 arithmetic against float64, relative to the largest element: a sum of
// n products errs by about sqrt(n) * 2^-24, 2e-6 at n = 1000. A whole model has
// to keep 2e-5.
inline constexpr double kTolerance = 3e-6;

inline Floats RandomFloats(size_t n, uint32_t seed, double scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, scale);
  Floats x(n);
  for (float& value : x) value = static_cast<float>(normal(random));
  return x;
}

inline Bf16s RandomBf16s(size_t n, uint32_t seed, double mean = 0,
                         double scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(mean, scale);
  Bf16s x(n);
  for (bf16& value : x) {
    value = FloatToBf16Even(static_cast<float>(normal(random)));
  }
  return x;
}

inline std::vector<int32_t> RandomIds(size_t n, int32_t below, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % below);
  return ids;
}

inline Vec Wide(const Floats& x) { return Vec(x.begin(), x.end()); }
inline Vec Wide(const Bf16s& x) {
  Vec wide;
  for (bf16 value : x) wide.push_back(Bf16ToFloat(value));
  return wide;
}

// max |actual - expected| / max |expected|; infinity if anything is not finite.
inline double RelativeError(const Floats& actual, const Vec& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double error = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    error = std::max(error, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest == 0 ? error : error / largest;
}

inline Vec Plus(Vec a, const Floats& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

class OpsBench {
 public:
  explicit OpsBench(int threads = 2)
      : device_(device::NewCpuDevice({})),
        ops_(NewCpuOps(threads)),
        stream_(device_->NewStream("compute").value()) {}

  Ops* operator->() { return ops_.get(); }
  Stream& stream() { return *stream_; }
  // Expects the op to have been accepted, and to succeed.
  void Run(const absl::Status& enqueued) {
    ASSERT_TRUE(enqueued.ok()) << enqueued;
    const absl::Status done = device_->Synchronize(*stream_);
    ASSERT_TRUE(done.ok()) << done;
  }
  absl::Status Synchronize() { return device_->Synchronize(*stream_); }

 private:
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<Ops> ops_;
  // Last, so that it drains before what its commands use is gone.
  std::unique_ptr<Stream> stream_;
};

}  // namespace slidedp::ops
