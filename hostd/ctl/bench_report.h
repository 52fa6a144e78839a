// What a benchmark found, as one JSON object and as lines for people. The
// names of the object are stable; numbers are in base units unless they say.
#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/shapes.h"
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

struct BenchRun {
  std::string model;  // the shape's name
  model::ModelConfig config;
  uint64_t parameters = 0;
  uint64_t warmup = 0;
  std::string command;
  v1::JobSpec spec;
  // Of the reference alone, what follows is empty.
  v1::Plan plan;
  v1::JobInfo info;
  std::vector<v1::StepRecord> records;  // every step
  // What slidedp-bench-ops step wrote: `value` and `detail`.
  std::optional<Json> reference;
};

// InternalError if a step's record is missing.
absl::StatusOr<Json> JsonBench(const BenchRun& run);
void PrintBench(const Json& bench, std::ostream& out);

// Middle of the values; of an even number the mean of the middle two.
double Median(std::vector<double> values);

}  // namespace slidedp::ctl
