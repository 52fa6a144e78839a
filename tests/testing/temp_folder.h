// A folder of its own for a test, removed with all it holds.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace slidedp::testing {

class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  // "PATH/name".
  std::string Sub(absl::string_view name) const;
  // Writes a file and returns its path. Aborts on failure.
  std::string Write(absl::string_view name, absl::string_view contents) const;

 private:
  std::string path_;
};

// A whole file; aborts on failure.
std::string ReadWhole(const std::string& path);

}  // namespace slidedp::testing
