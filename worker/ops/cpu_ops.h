// The CPU implementation of Ops: float32 activations, OpenBLAS, Highway.
//
// One op runs at a time (`mutex_`), split into tasks over the pool. The tasks
// of an op depend on its shape only, never on the number of threads, and every
// output element is written by one task: same inputs, same bits. OpenBLAS is
// held to one thread of its own; the tasks call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "common/base/thread_pool.h"
#include "common/device/device.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

// Of a thread: a tile of upcast weights, or two blocks of attention scores.
inline constexpr size_t kTileFloats = size_t{128} << 10;
// Of the op: per-row losses, partial sums.
inline constexpr size_t kSharedBytes = size_t{1} << 20;
// More threads than this are not used: their tiles would pass kCpuScratchBytes.
inline constexpr int kMaxCpuThreads = static_cast<int>(
    (kCpuScratchBytes - kSharedBytes) / (kTileFloats * sizeof(float)));

// What one task of an op over rows, or of a sum over all of them, takes.
inline constexpr int64_t kRangeRows = 16;
inline constexpr int64_t kRangeColumns = 64;

class CpuOps final : public Ops {
 public:
  explicit CpuOps(int threads);

  ActDType activation_dtype() const override { return ActDType::kF32; }

  absl::Status EmbeddingForward(const int32_t* ids, const bf16* table,
                                int64_t tokens, int64_t hidden, int64_t vocab,
                                Act out, Stream& stream) override;
  absl::Status EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                 int64_t tokens, int64_t hidden, int64_t vocab,
                                 float* d_table, Stream& stream) override;
  absl::Status RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                              int64_t hidden, double eps, Act out, float* rstd,
                              Stream& stream) override;
  absl::Status RmsNormBackward(ConstAct x, const bf16* w, const float* rstd,
                               ConstAct d_out, int64_t tokens, int64_t hidden,
                               bool add, Act d_x, float* d_w, Act normed,
                               Stream& stream) override;
  absl::Status LinearForward(ConstAct x, const bf16* w, const bf16* bias,
                             int64_t tokens, int64_t in, int64_t out,
                             ConstAct residual, Act y, Stream& stream) override;
  absl::Status LinearBackwardInput(ConstAct d_y, const bf16* w, int64_t tokens,
                                   int64_t in, int64_t out, bool add, Act d_x,
                                   Stream& stream) override;
  absl::Status LinearBackwardWeight(ConstAct x, ConstAct d_y, int64_t tokens,
                                    int64_t in, int64_t out, bool add,
                                    float* d_w, float* d_bias,
                                    Stream& stream) override;
  absl::Status QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                 const bf16* k_norm, double eps,
                                 const float* inverse_frequencies,
                                 const AttentionShape& shape, Act out,
                                 float* rstd, Stream& stream) override;
  absl::Status QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                  const bf16* k_norm,
                                  const float* inverse_frequencies,
                                  const AttentionShape& shape,
                                  const float* rstd, Act d_qkv, float* d_q_norm,
                                  float* d_k_norm, Stream& stream) override;
  absl::Status AttentionForward(ConstAct qkv, const AttentionShape& shape,
                                Act out, float* lse, Stream& stream) override;
  absl::Status AttentionBackward(ConstAct qkv, ConstAct out, const float* lse,
                                 ConstAct d_out, const AttentionShape& shape,
                                 Act d_qkv, Stream& stream) override;
  absl::Status SwiGluForward(ConstAct gate_up, int64_t tokens, int64_t inner,
                             Act out, Stream& stream) override;
  absl::Status SwiGluBackward(ConstAct gate_up, ConstAct d_out, int64_t tokens,
                              int64_t inner, Act d_gate_up, Act activated,
                              Stream& stream) override;
  absl::Status CrossEntropy(Act logits, const int32_t* labels, int64_t rows,
                            int64_t vocab, float scale, double* loss_sum,
                            Stream& stream) override;
  absl::Status CastToBf16(const float* x, int64_t count, bf16* out,
                          Stream& stream) override;
  absl::Status CopyUsedRows(const UsedRows& used, int64_t width, int64_t begin,
                            int64_t count, const bf16* values, bf16* out,
                            Stream& stream) override;
  absl::Status SquaredNorm(const bf16* x, int64_t count, double* out,
                           Stream& stream) override;

 private:
  struct Free {
    void operator()(void* p) const;
  };

  // Enqueues `op`, which returns void or absl::Status.
  template <typename Op>
  absl::Status Enqueue(Stream& stream, Op op) {
    return device::EnqueueOnCpu(stream, [this, op = std::move(op)] {
      std::lock_guard<std::mutex> lock(mutex_);
      if constexpr (std::is_void_v<decltype(op())>) {
        op();
        return absl::OkStatus();
      } else {
        return op();
      }
    });
  }

  // task(i, tile) for i in [0, n), each once, in any order and on any thread;
  // `tile` [kTileFloats] is the thread's own.
  void ForTasks(int64_t n, const std::function<void(int64_t, float*)>& task);
  // body(begin, end) over ranges of [0, n) of at most `grain`; for element-wise
  // work, where the cut changes no bit.
  void ForRanges(int64_t n, int64_t grain,
                 const std::function<void(int64_t, int64_t)>& body);

  // c [m, n] = a [m, k] * W (+ bias) (+ residual [m, n], which may be c); W is
  // w [n, k] transposed if `transpose`, else w [k, n].
  void MatMulBf16(const float* a, const bf16* w, bool transpose,
                  const bf16* bias, int64_t m, int64_t n, int64_t k,
                  const float* residual, float* c);

  int threads_;
  ThreadPool pool_;
  std::mutex mutex_;  // held while an op runs; guards all below
  std::unique_ptr<float, Free> scratch_;
  float* tiles_;  // [threads_][kTileFloats]
  void* shared_;  // kSharedBytes
};

}  // namespace slidedp::ops
