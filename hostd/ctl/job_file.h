// The job file: YAML in, JobSpec out. Every field, its meaning, default and
// range stand in one table (job_fields.cc), from which parsing, the suggestion
// for a misspelt key and --print-defaults all follow.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "hostd/ctl/yaml_tree.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

// The defaults of a Hugging Face user. Left unset (0 or empty), because they
// depend on what is read later: name, model, data, output, sequence_length,
// steps, epochs.
v1::JobSpec DefaultJobSpec();

// A job file with `sets` ("optimizer.lr=1e-4", the value is YAML) put over it,
// over the defaults. Setting `steps` replaces the file's `epochs` and the other
// way round. Every error names file, field with line, value and remedy. Paths
// and what depends on files stay as written: see resolve.h.
absl::StatusOr<v1::JobSpec> ParseJobFile(absl::string_view text,
                                         absl::string_view file,
                                         const std::vector<std::string>& sets);

// "key=value" with a known key; a usage error, found before anything is read.
absl::Status CheckSets(const std::vector<std::string>& sets);

// A commented job file that holds the defaults and parses back to them.
std::string PrintDefaults();

// Known keys, dotted, in the order of the job file.
std::vector<std::string> JobFileKeys();

}  // namespace slidedp::ctl
