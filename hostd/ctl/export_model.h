// A checkpoint's model as a Hugging Face folder.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/base/disk_calls.h"
#include "hostd/ctl/environment.h"

namespace slidedp::ctl {

// Into the new folder `to`, complete or absent: trained tensors in the dtypes
// of the source, or all in float32. Shows its progress; Cancelled after an
// interrupt.
absl::Status ExportModel(const Environment& environment,
                         const std::string& checkpoint_path,
                         const std::string& to, bool float32,
                         DiskCalls& calls = RealDiskCalls());

}  // namespace slidedp::ctl
