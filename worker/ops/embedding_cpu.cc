#include "absl/strings/str_cat.h"
#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
absl::Status CpuOps::EmbeddingForward(const int32_t* ids, const bf16* table,
                                      int64_t tokens, int64_t hidden,
                                      int64_t /*vocab*/, Act out,
                                      Stream& stream) {
  return Enqueue(stream, [=, this] {
    ForRanges(tokens, kRangeRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        simd::Upcast(table + ids[t] * hidden, hidden,
                     static_cast<float*>(out) + t * hidden);
      }
    });
  });
}

absl::Status CpuOps::EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                       int64_t tokens, int64_t hidden,
                                       int64_t vocab, float* d_table,
                                       Stream& stream) {
  return Enqueue(stream, [=, this]() -> absl::Status {
    for (int64_t t = 0; t < tokens; ++t) {
      if (ids[t] < 0 || ids[t] >= vocab) {
        return absl::InternalError(absl::StrCat("embedding gradient: token ", t,
                                                " has id ", ids[t], " of ",
                                                vocab));
      }
    }
    // A task owns columns, so that equal ids never meet.
    ForRanges(hidden, kRangeColumns, [&](int64_t begin, int64_t end) {
      for (int64_t t = 0; t < tokens; ++t) {
        simd::Add(static_cast<const float*>(d_out) + t * hidden + begin,
                  end - begin, d_table + ids[t] * hidden + begin);
      }
    });
    return absl::OkStatus();
  });
}

}  // namespace slidedp::ops
