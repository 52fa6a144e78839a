#include "worker/bench/record.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>

#include "absl/strings/str_format.h"
#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"

namespace slidedp::bench {
namespace {

std::string Today() {
  const time_t seconds = static_cast<time_t>(UnixMicros() / 1'000'000);
  std::tm utc = {};
  gmtime_r(&seconds, &utc);
  return absl::StrFormat("%04d-%02d-%02d", utc.tm_year + 1900, utc.tm_mon + 1,
                         utc.tm_mday);
}

}  // namespace

Json JsonResult(const Result& result, const Origin& origin) {
  return Json{{"bench", result.bench},     {"value", result.value},
              {"unit", result.unit},       {"target", result.target},
              {"commit", origin.commit},   {"date", Today()},
              {"machine", origin.machine}, {"command", origin.command},
              {"detail", result.detail}};
}

absl::Status Report(const Result& result, const Origin& origin) {
  absl::PrintF("%s: %.4g %s%s%s\n", result.bench, result.value, result.unit,
               result.target.empty() ? "" : "; target ", result.target);
  std::fflush(stdout);
  if (origin.json_file.empty()) return absl::OkStatus();
  const std::string line = JsonResult(result, origin).dump() + "\n";
  SDP_ASSIGN_OR_RETURN(
      const UniqueFd fd,
      OpenFile(origin.json_file, O_WRONLY | O_CREAT | O_APPEND, 0644));
  const ssize_t written = write(fd.get(), line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size())) {
    return ErrnoStatus(written < 0 ? errno : ENOSPC, origin.json_file);
  }
  return absl::OkStatus();
}

}  // namespace slidedp::bench
