// What a job would take, to the byte, from the model's config alone.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/resolve.h"

namespace slidedp::ctl {

struct Estimate {
  std::string model;  // folder
  uint64_t parameters = 0;
  v1::JobSpec spec;
  PlannedBytes bytes;
};

// `spec` has the sizes and a resolved device; its sequence_length may be 0. Its
// sources, if any, have absolute paths, and are read.
// `gpu_memory_bytes`: of each GPU. No weights are opened.
absl::StatusOr<Estimate> MakeEstimate(const std::string& model_folder,
                                      v1::JobSpec spec, int logical_cpus,
                                      uint64_t gpu_memory_bytes);

Json JsonEstimate(const Estimate& estimate);
// Table of segments and buffers; `wide` also shows the small buffers one by
// one.
void PrintEstimate(const Estimate& estimate, bool headers, bool wide,
                   bool color, std::ostream& out);

}  // namespace slidedp::ctl
