#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {

// Of rows whose losses are in the shared scratch at once.
constexpr int64_t kBlockRows = kSharedBytes / sizeof(double);

// The row's loss; the row becomes its gradient.
double RowLoss(int32_t label, int64_t vocab, float scale, float* row) {
  if (label < 0) {
    std::fill(row, row + vocab, 0.0f);
    return 0;
  }
  const float max = simd::Max(row, vocab);
  const double label_logit = row[label];
  const double sum = simd::ExpSum(max, vocab, row);
  simd::Scale(static_cast<float>(scale / sum), vocab, row);
  row[label] -= scale;
  return std::log(sum) + (max - label_logit);
}

}  // namespace

absl::Status CpuOps::CrossEntropy(Act logits, const int32_t* labels,
                                  int64_t rows, int64_t vocab, float scale,
                                  double* loss_sum, Stream& stream) {
  return Enqueue(stream, [=, this]() -> absl::Status {
    for (int64_t t = 0; t < rows; ++t) {
      if (labels[t] >= vocab) {
        return absl::InternalError(absl::StrCat(
            "cross-entropy: row ", t, " has label ", labels[t], " of ", vocab));
      }
    }
    double* losses = static_cast<double*>(shared_);
    for (int64_t first = 0; first < rows; first += kBlockRows) {
      const int64_t count = std::min(kBlockRows, rows - first);
      ForRanges(count, 1, [&](int64_t i, int64_t) {
        const int64_t t = first + i;
        losses[i] = RowLoss(labels[t], vocab, scale,
                            static_cast<float*>(logits) + t * vocab);
      });
      for (int64_t i = 0; i < count; ++i) *loss_sum += losses[i];
    }
    return absl::OkStatus();
  });
}

}  // namespace slidedp::ops
