// What a job's data sets give its steps, from the counts in its spec.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "hostd/ctl/json_form.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

struct DataSummary {
  struct Source {
    std::string path;
    uint64_t sequences;
    double share;   // of the sequences of a step
    double passes;  // over it in an epoch
  };
  std::vector<Source> sources;
  // On average over an epoch; tokens without padding.
  double tokens_per_step = 0, labels_per_step = 0;
  double padding_share = 0;  // of the positions that are computed
  // Sequences that packing would at least take.
  uint64_t fewest_sequences = 0;
};

// The spec is complete.
DataSummary SummarizeData(const v1::JobSpec& spec);
void PrintData(const v1::JobSpec& spec, std::ostream& out);
Json JsonData(const v1::JobSpec& spec);

}  // namespace slidedp::ctl
