// What happens to a unit's gradient before it leaves the device.
#include <algorithm>
#include <cstring>

#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {
constexpr int64_t kBlock = int64_t{1} << 16;  // elements
}  // namespace

absl::Status CpuOps::CastToBf16(const float* x, int64_t count, bf16* out,
                                Stream& stream) {
  return Enqueue(stream, [=, this] {
    ForRanges(count, kBlock, [&](int64_t begin, int64_t end) {
      simd::Downcast(x + begin, end - begin, out + begin);
    });
  });
}

absl::Status CpuOps::CopyUsedRows(const UsedRows& used, int64_t width,
                                  int64_t begin, int64_t count,
                                  const bf16* values, bf16* out,
                                  Stream& stream) {
  return Enqueue(stream, [=] {
    const auto is_used = [&](int64_t row) {
      uint64_t bits = 0;
      for (int set = 0; set < used.sets; ++set) {
        bits |= used.bitmaps[set * used.words + row / 64];
      }
      return (bits >> (row % 64) & 1) != 0;
    };
    for (int64_t at = 0; at < count;) {
      const int64_t row = (begin + at) / width;
      const int64_t end = std::min((row + 1) * width - begin, count);
      if (is_used(row)) {
        std::memcpy(out + at, values + at, (end - at) * sizeof(bf16));
      }
      at = end;
    }
  });
}

absl::Status CpuOps::SquaredNorm(const bf16* x, int64_t count, double* out,
                                 Stream& stream) {
  return Enqueue(stream, [=, this] {
    double* sums = static_cast<double*>(shared_);
    constexpr int64_t kGroup = kSharedBytes / sizeof(double) * kBlock;
    *out = 0;
    for (int64_t first = 0; first < count; first += kGroup) {
      const int64_t group = std::min(kGroup, count - first);
      ForRanges(group, kBlock, [&](int64_t begin, int64_t end) {
        sums[begin / kBlock] =
            simd::SquaredNorm(x + first + begin, end - begin);
      });
      for (int64_t i = 0; i * kBlock < group; ++i) *out += sums[i];
    }
  });
}

}  // namespace slidedp::ops
