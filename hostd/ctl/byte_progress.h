// How far a long operation on files is: one line on stderr, redrawn, on a
// terminal; nothing elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "hostd/ctl/environment.h"

namespace slidedp::ctl {

class ByteProgress {
 public:
  ByteProgress(const Environment& environment, std::string what,
               uint64_t total_bytes);
  ~ByteProgress();  // takes the line away
  void Add(uint64_t bytes);

  // "verify   42 %  1.20 GiB of 2.85 GiB".
  static std::string Line(const std::string& what, uint64_t done_bytes,
                          uint64_t total_bytes);

 private:
  const Environment& environment_;
  const std::string what_;
  const uint64_t total_bytes_;
  uint64_t done_bytes_ = 0;
  int64_t shown_ns_ = 0;
};

}  // namespace slidedp::ctl
