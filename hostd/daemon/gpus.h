// The host's GPUs and which job holds which.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "hostd/launch/gpu_probe.h"

namespace slidedp::hostd {

// Loop thread only. A job holds whole GPUs, one for each rank, from its start
// until its workers and its memory are gone. Jobs with `launch: manual` take
// none: their user chooses GPUs. A GPU that the worker lists several times
// (SLIDEDP_RANKS_PER_GPU) is as many.
class Gpus {
 public:
  enum class Knowledge { kNone, kAsked, kKnown };

  Knowledge knowledge() const { return knowledge_; }
  void SetAsked() { knowledge_ = Knowledge::kAsked; }
  // GPUs held by running jobs stay held.
  void Set(absl::StatusOr<GpuFacts> facts);

  // Known: why a job of so many ranks can't run here, as a reason to fail. The
  // next job asks anew: a driver may be repaired.
  absl::Status FitsEver(uint32_t ranks);
  // Known: "waiting for GPUs: ..."; none if enough are free.
  std::optional<std::string> WhyNotNow(uint32_t ranks) const;
  // Their uuids in rank order. WhyNotNow has said none.
  std::vector<std::string> Take(uint64_t job, uint32_t ranks);
  void Release(uint64_t job);

 private:
  // One of gpus_ and the job that holds it; 0: free.
  struct Holding {
    const Gpu* gpu;
    uint64_t job;
  };
  std::vector<Holding> Holdings() const;

  Knowledge knowledge_ = Knowledge::kNone;
  absl::Status problem_;
  std::vector<Gpu> gpus_;
  std::multimap<std::string, uint64_t> holders_;  // uuid -> job
};

// Of a worker's environment: lets it see these GPUs, in this order.
inline constexpr absl::string_view kVisibleGpus = "CUDA_VISIBLE_DEVICES=";
std::string VisibleGpus(const std::vector<std::string>& uuids);

}  // namespace slidedp::hostd
