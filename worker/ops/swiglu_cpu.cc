#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {
constexpr int64_t kRows = 8;
}  // namespace

absl::Status CpuOps::SwiGluForward(ConstAct gate_up, int64_t tokens,
                                   int64_t inner, Act out, Stream& stream) {
  return Enqueue(stream, [=, this] {
    ForRanges(tokens, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* gate = static_cast<const float*>(gate_up) + t * 2 * inner;
        simd::SwiGlu(gate, gate + inner, inner,
                     static_cast<float*>(out) + t * inner);
      }
    });
  });
}

absl::Status CpuOps::SwiGluBackward(ConstAct gate_up, ConstAct d_out,
                                    int64_t tokens, int64_t inner,
                                    Act d_gate_up, Act activated,
                                    Stream& stream) {
  return Enqueue(stream, [=, this] {
    ForRanges(tokens, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* gate = static_cast<const float*>(gate_up) + t * 2 * inner;
        float* d_gate = static_cast<float*>(d_gate_up) + t * 2 * inner;
        float* y = static_cast<float*>(activated);
        simd::SwiGluBackward(gate, gate + inner,
                             static_cast<const float*>(d_out) + t * inner,
                             inner, d_gate, d_gate + inner,
                             y == nullptr ? nullptr : y + t * inner);
      }
    });
  });
}

}  // namespace slidedp::ops
