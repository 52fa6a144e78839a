// Fills in what a job spec takes from the user's files, as the user: absolute
// paths, the model's config, the dataset's counts, the number of steps; and
// checks everything that can be known before the daemon is asked.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "hostd/ctl/device.h"
#include "policy/plan.h"
#include "proto/job.pb.h"
#include "worker/data/mixture.h"

namespace slidedp::ctl {

inline constexpr uint64_t kMaxModelConfigBytes = 1 << 20;
inline constexpr uint64_t kDefaultSequenceLength = 1024;

// A model folder's config.json and what follows from it.
struct ModelFacts {
  std::string config_json;
  model::ModelConfig config;
  model::StateLayout layout;
};
absl::StatusOr<ModelFacts> ReadModelFacts(const std::string& folder);

// The plan that policy would make on this host, and its bytes.
struct PlannedBytes {
  policy::Plan plan;
  std::vector<policy::NamedBytes> host;
  std::vector<policy::NamedBytes> device;  // of each rank
  // On GPUs: their memory, and what is set aside of it for other uses
  // (policy::GpuAllowance).
  uint64_t gpu_memory_bytes = 0;
  std::vector<policy::NamedBytes> gpu_allowance;

  static uint64_t Total(const std::vector<policy::NamedBytes>& parts);
};
// The spec's device is resolved. `gpu_memory_bytes`: of each rank's GPU.
absl::StatusOr<PlannedBytes> PlanBytes(const v1::JobSpec& spec,
                                       const ModelFacts& facts,
                                       int logical_cpus,
                                       uint64_t gpu_memory_bytes);

struct ResolveContext {
  std::string file;            // the job file, for messages
  std::string current_folder;  // absolute; relative paths start here
  int logical_cpus = 1;
  FindGpus find_gpus;
};

struct ResolvedJob {
  v1::JobSpec spec;  // complete
  ModelFacts model;
  PlannedBytes bytes;
  std::vector<std::string> warnings;
};
absl::StatusOr<ResolvedJob> ResolveJob(v1::JobSpec spec,
                                       const ResolveContext& context);

// `sequence_length` 0 becomes 1024 or the model's longest; one beyond the
// model's longest is an error.
absl::Status ResolveSequenceLength(const ModelFacts& facts,
                                   absl::string_view file, v1::JobSpec& spec);

// Opens the spec's sources, whose paths are absolute, and fills in their counts
// and totals. The sequence length is resolved.
absl::StatusOr<data::Mixture> ResolveData(const ModelFacts& facts,
                                          absl::string_view file,
                                          v1::JobSpec& spec);

// `path` made absolute from `current_folder`, without "." and "..".
std::string AbsolutePath(const std::string& path,
                         const std::string& current_folder);

}  // namespace slidedp::ctl
