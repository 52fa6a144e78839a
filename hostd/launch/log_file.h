// A worker's log: what its standard output and error say, up to a size.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/fd.h"

namespace slidedp::hostd {

class LogFile {
 public:
  // Mode 0600; appends to a file that is there.
  static absl::StatusOr<LogFile> Open(const std::string& path,
                                      uint64_t max_bytes);
  // Past the limit, and after an error (a full disk), one line says so and the
  // rest is dropped: a worker never waits for its log.
  void Append(absl::string_view text);

 private:
  LogFile(UniqueFd fd, uint64_t bytes, uint64_t max_bytes)
      : fd_(std::move(fd)), bytes_(bytes), max_bytes_(max_bytes) {}

  UniqueFd fd_;
  uint64_t bytes_;
  uint64_t max_bytes_;
  bool closed_ = false;
};

}  // namespace slidedp::hostd
