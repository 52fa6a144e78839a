// One large decoder unit in a job's own segments, and AdamW over it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/shm/segment.h"
#include "hostd/store/host_state.h"
#include "worker/bench/machine.h"

namespace slidedp::bench {

struct UnitOptions {
  // 799.9 M parameters in one layer.
  int64_t hidden = 8192;
  int64_t intermediate = 26400;
};

class HostUnit {
 public:
  // Planes filled with random weights, moments small, gradients random.
  static absl::StatusOr<std::unique_ptr<HostUnit>> Create(
      const UnitOptions& options, int threads);

  uint64_t parameters() const { return count_; }
  // Its BF16 plane, mapped read-only as a worker maps it.
  const bf16* hi() const { return hi_; }

  // All elements once, by `threads` at once, each on a range of its own.
  void Update(int threads);
  // Runs Update(threads) again and again in the background until destroyed.
  class Background {
   public:
    Background(HostUnit& unit, int threads);
    ~Background();
    // Parameters updated so far.
    uint64_t updated() const { return updated_.load(); }

   private:
    std::atomic<bool> stop_{false};
    std::atomic<uint64_t> updated_{0};
    std::vector<std::thread> threads_;
  };

 private:
  HostUnit() = default;
  hostd::PlaneSpan planes(uint64_t begin, uint64_t count) const {
    return state_->planes(unit_, begin, count);
  }
  void UpdateRange(uint64_t begin, uint64_t end);

  std::unique_ptr<hostd::HostState> state_;
  shm::Mapping params_;
  const bf16* hi_ = nullptr;
  int unit_ = 0;
  uint64_t count_ = 0;
  std::vector<bf16> gradients_;
};

}  // namespace slidedp::bench
