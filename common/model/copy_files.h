// Which files of a model folder go along with trained weights, and copying.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/base/disk_calls.h"

namespace slidedp::model {

// Configs, tokenizer, chat template, licence. Never weights.
bool IsCompanionFile(absl::string_view name);

// Bytes [begin, end) to the same place of another file.
absl::Status CopyRange(int from, int to, uint64_t begin, uint64_t end,
                       const std::string& name,
                       DiskCalls& calls = RealDiskCalls());

// Copies every companion of `source_folder` (regular files, also through
// symbolic links, as in a download cache) into the open folder `to_fd`, each
// fsynced. config.json must be among them.
absl::Status CopyCompanions(const std::string& source_folder, int to_fd,
                            const std::string& to_name,
                            DiskCalls& calls = RealDiskCalls());

}  // namespace slidedp::model
