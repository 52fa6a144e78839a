// Which rows of a table are used.
#pragma once

#include <cstdint>

namespace slidedp::ops {

// Row r if bit r % 64 of word r / 64 is set in any of the `sets` bitmaps of
// `words` words, which lie one after another in device memory.
struct UsedRows {
  const uint64_t* bitmaps;
  int64_t words;
  int sets;
};

}  // namespace slidedp::ops
