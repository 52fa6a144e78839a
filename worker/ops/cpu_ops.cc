#include "worker/ops/cpu_ops.h"

#include <cblas.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "common/base/check.h"
#include "common/base/units.h"

namespace slidedp::ops {

void CpuOps::Free::operator()(void* p) const { std::free(p); }

CpuOps::CpuOps(int threads)
    : threads_(std::min(threads, kMaxCpuThreads)), pool_(threads_) {
  // Of the process; nothing else in a worker uses a BLAS.
  openblas_set_num_threads(1);
  const size_t tile_bytes = threads_ * kTileFloats * sizeof(float);
  static_assert(kMaxCpuThreads * kTileFloats * sizeof(float) + kSharedBytes <=
                kCpuScratchBytes);
  scratch_.reset(static_cast<float*>(
      std::aligned_alloc(kPageBytes, tile_bytes + kSharedBytes)));
  SDP_CHECK(scratch_ != nullptr, "no memory for the scratch of the CPU ops");
  tiles_ = scratch_.get();
  shared_ = tiles_ + threads_ * kTileFloats;
}

void CpuOps::ForTasks(int64_t n,
                      const std::function<void(int64_t, float*)>& task) {
  std::atomic<int64_t> next{0};
  // One part a thread; tasks are handed out as threads get free, since causal
  // attention makes them unequal.
  const auto part = [&](size_t begin, size_t end) {
    for (size_t slot = begin; slot < end; ++slot) {
      float* tile = tiles_ + slot * kTileFloats;
      int64_t i;
      while ((i = next.fetch_add(1, std::memory_order_relaxed)) < n) {
        task(i, tile);
      }
    }
  };
  pool_.ParallelFor(std::min<int64_t>(n, threads_), 1, std::cref(part));
}

void CpuOps::ForRanges(int64_t n, int64_t grain,
                       const std::function<void(int64_t, int64_t)>& body) {
  const auto task = [&](int64_t i, float*) {
    body(i * grain, std::min(n, (i + 1) * grain));
  };
  ForTasks((n + grain - 1) / grain, std::cref(task));
}

std::unique_ptr<Ops> NewCpuOps(int threads) {
  return std::make_unique<CpuOps>(threads);
}

}  // namespace slidedp::ops
