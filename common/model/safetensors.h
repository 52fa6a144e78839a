// The safetensors format. Input is hostile: lengths, offsets, shapes, overlaps
// and holes, duplicate names and nesting are checked before anything is
// allocated for them (models.md section 8). Reads use pread, never mmap.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::model {

enum class DType {
  kBf16,
  kF16,
  kF32,
  kF64,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  kF8E4M3,
  kF8E5M2
};
absl::string_view DTypeName(DType dtype);  // as in the file: "BF16"
uint64_t DTypeBytes(DType dtype);

struct TensorEntry {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  // bytes from the start of the file

  uint64_t count() const;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // by ascending `begin`
  std::map<std::string, std::string> metadata;
  uint64_t data_begin;
  uint64_t file_bytes;

  const TensorEntry* Find(absl::string_view name) const;
};

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int fd,
                                                        absl::string_view file);

// Bytes 0 .. data_begin of a file that holds `tensors` in this order; fills in
// their begin and end. The header is padded so that data_begin % 8 == 0.
std::string EncodeSafetensorsHeader(
    std::vector<TensorEntry>& tensors,
    const std::map<std::string, std::string>& metadata);

}  // namespace slidedp::model
