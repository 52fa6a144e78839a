#include "hostd/daemon/gpus.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/check.h"
#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {

void Gpus::Set(absl::StatusOr<GpuFacts> facts) {
  knowledge_ = Knowledge::kKnown;
  gpus_.clear();
  problem_ = facts.status();
  if (!facts.ok()) return;
  gpus_ = std::move(facts->gpus);
  if (!facts->built) {
    problem_ = absl::UnavailableError(
        "this slidedp-worker is built without CUDA; install a build with it, "
        "or submit with device: cpu");
  } else if (!facts->problem.empty()) {
    problem_ = absl::UnavailableError(ToValidUtf8(facts->problem));
  }
}

absl::Status Gpus::FitsEver(uint32_t ranks) {
  absl::Status status = problem_;
  if (status.ok() && gpus_.size() < ranks) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("the job has ", ranks, ranks == 1 ? " rank" : " ranks",
                     " and slidedpd sees ", gpus_.size(),
                     gpus_.size() == 1 ? " GPU" : " GPUs",
                     "; use fewer ranks or device: cpu, or look at slidedpd's "
                     "CUDA_VISIBLE_DEVICES"));
  }
  if (!status.ok()) knowledge_ = Knowledge::kNone;
  return status;
}

std::vector<Gpus::Holding> Gpus::Holdings() const {
  std::vector<Holding> holdings;
  std::multimap<std::string, uint64_t> holders = holders_;
  for (const Gpu& gpu : gpus_) {
    auto holder = holders.extract(gpu.uuid);
    holdings.push_back({&gpu, holder.empty() ? 0 : holder.mapped()});
  }
  return holdings;
}

std::optional<std::string> Gpus::WhyNotNow(uint32_t ranks) const {
  size_t free = 0;
  std::set<uint64_t> jobs;
  for (const Holding& holding : Holdings()) {
    if (holding.job == 0) {
      ++free;
    } else {
      jobs.insert(holding.job);
    }
  }
  if (free >= ranks) return std::nullopt;
  return absl::StrCat("waiting for GPUs: needs ", ranks, ", ", free, " of ",
                      gpus_.size(), " free (job", jobs.size() > 1 ? "s " : " ",
                      absl::StrJoin(jobs, ", "),
                      jobs.size() > 1 ? " have" : " has", " the others)");
}

std::vector<std::string> Gpus::Take(uint64_t job, uint32_t ranks) {
  std::vector<std::string> taken;
  for (const Holding& holding : Holdings()) {
    if (taken.size() == ranks) break;
    if (holding.job != 0) continue;
    holders_.emplace(holding.gpu->uuid, job);
    taken.push_back(holding.gpu->uuid);
  }
  SDP_CHECK(taken.size() == ranks, "more GPUs were taken than are free");
  return taken;
}

void Gpus::Release(uint64_t job) {
  std::erase_if(holders_,
                [job](const auto& held) { return held.second == job; });
}

std::string VisibleGpus(const std::vector<std::string>& uuids) {
  // CUDA refuses a list that names a GPU twice.
  std::vector<std::string> distinct;
  for (const std::string& uuid : uuids) {
    if (std::find(distinct.begin(), distinct.end(), uuid) == distinct.end()) {
      distinct.push_back(uuid);
    }
  }
  return absl::StrCat(kVisibleGpus, absl::StrJoin(distinct, ","));
}

}  // namespace slidedp::hostd
