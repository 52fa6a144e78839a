// A folder of its own for a test, removed with all it holds.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace slidedp::testing {

class TempFolder {
 public:
  TempFolder() : TempFolder(DiskFolder()) {}
  explicit TempFolder(const std::string& base);
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  // "PATH/name".
  std::string Sub(absl::string_view name) const;
  // Writes a file and returns its path. Aborts on failure.
  std::string Write(absl::string_view name, absl::string_view contents) const;

  // Where tests have their folders: TMPDIR or /tmp. And one in memory, if the
  // host has it, for tests that sync a thousand times and whose subject is not
  // the disk.
  static std::string DiskFolder();
  static std::string MemoryFolder();

 private:
  std::string path_;
};

// A whole file; aborts on failure.
std::string ReadWhole(const std::string& path);

}  // namespace slidedp::testing
