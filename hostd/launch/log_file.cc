#include "hostd/launch/log_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

bool WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

absl::StatusOr<LogFile> LogFile::Open(const std::string& path,
                                      uint64_t max_bytes) {
  SDP_ASSIGN_OR_RETURN(
      UniqueFd fd,
      OpenFile(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, 0600));
  SDP_ASSIGN_OR_RETURN(uint64_t bytes, RegularFileBytes(fd.get(), path));
  return LogFile(std::move(fd), bytes, max_bytes);
}

void LogFile::Append(absl::string_view text) {
  if (closed_) return;
  uint64_t room = max_bytes_ > bytes_ ? max_bytes_ - bytes_ : 0;
  absl::string_view kept = text.substr(0, room);
  bool stored = WriteAll(fd_.get(), kept);
  bytes_ += kept.size();
  if (stored && kept.size() == text.size()) return;
  closed_ = true;
  std::string note =
      stored ? absl::StrCat("\n[slidedpd: the log ends here, at its limit of ",
                            max_bytes_, " bytes]\n")
             : absl::StrCat("\n[slidedpd: the log ends here: ",
                            ErrnoStatus(errno, "write").message(), "]\n");
  WriteAll(fd_.get(), note);
}

}  // namespace slidedp::hostd
