// Reads a log file by lines while somebody appends to it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace slidedp::hostd {

class LogLines {
 public:
  explicit LogLines(std::string path) : path_(std::move(path)) {}

  // Starts `lines` lines before the present end; 0: at the beginning.
  void SeekTail(uint64_t lines);
  // Complete lines from one piece of the file, as valid UTF-8; empty when there
  // are none now. With `at_end`, what is left after the last newline is a line
  // too. Lines longer than 32 KiB are cut.
  std::vector<std::string> Next(bool at_end);

 private:
  std::string path_;
  uint64_t offset_bytes_ = 0;
};

// Bytes that are not UTF-8 become U+FFFD, control bytes but tab, newline and
// escape too.
std::string ToValidUtf8(absl::string_view text);

// The last line of the file that says something, at most 200 bytes; "" if there
// is none.
std::string LastLine(const std::string& path);

}  // namespace slidedp::hostd
