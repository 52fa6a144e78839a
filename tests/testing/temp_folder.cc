#include "tests/testing/temp_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/fd.h"

namespace slidedp::testing {

std::string TempFolder::DiskFolder() {
  const char* base = getenv("TMPDIR");
  return base == nullptr ? "/tmp" : base;
}

std::string TempFolder::MemoryFolder() {
  constexpr char kMemory[] = "/dev/shm";
  return access(kMemory, W_OK | X_OK) == 0 ? kMemory : DiskFolder();
}

TempFolder::TempFolder(const std::string& base)
    : path_(absl::StrCat(base, "/slidedp-test-XXXXXX")) {
  SDP_CHECK(mkdtemp(path_.data()) != nullptr, path_);
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempFolder::Sub(absl::string_view name) const {
  return absl::StrCat(path_, "/", name);
}

std::string TempFolder::Write(absl::string_view name,
                              absl::string_view contents) const {
  std::string path = Sub(name);
  auto fd = OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC);
  SDP_CHECK(fd.ok(), fd.status().ToString());
  auto status =
      PwriteFully(fd->get(), contents.data(), contents.size(), 0, path);
  SDP_CHECK(status.ok(), status.ToString());
  return path;
}

std::string ReadWhole(const std::string& path) {
  auto contents = ReadFile(path, uint64_t{1} << 32);
  SDP_CHECK(contents.ok(), contents.status().ToString());
  return *std::move(contents);
}

}  // namespace slidedp::testing
