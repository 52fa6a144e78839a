#include "common/model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/safetensors_json.h"
#include "common/model/strict_json.h"

namespace slidedp::model {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and is read as it stands");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kDataAlignment = 8;

struct DTypeRow {
  DType dtype;
  absl::string_view name;
  uint64_t bytes;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kBf16, "BF16", 2},      {DType::kF16, "F16", 2},
    {DType::kF32, "F32", 4},        {DType::kF64, "F64", 8},
    {DType::kI64, "I64", 8},        {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},        {DType::kI8, "I8", 1},
    {DType::kU8, "U8", 1},          {DType::kBool, "BOOL", 1},
    {DType::kF8E4M3, "F8_E4M3", 1}, {DType::kF8E5M2, "F8_E5M2", 1},
};

const DTypeRow& Row(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row;
  }
  SDP_CHECK(false, "unknown dtype");
}

absl::Status BadTensor(absl::string_view file, absl::string_view name,
                       absl::string_view problem) {
  return InvalidInput(file, absl::StrCat("tensor ", Printable(name)), "",
                      problem, "");
}

// [begin, end) still relative to the data, as in the file.
absl::Status CheckExtent(const TensorEntry& entry, uint64_t data_bytes,
                         absl::string_view file) {
  std::string range =
      absl::StrCat("data_offsets [", entry.begin, ", ", entry.end, "]");
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return BadTensor(file, entry.name,
                     absl::StrCat(range, " are not a range of the file's ",
                                  data_bytes, " data bytes"));
  }
  uint64_t bytes = DTypeBytes(entry.dtype);
  bool overflow = false;
  for (int64_t extent : entry.shape) {
    overflow |=
        __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes);
  }
  if (overflow || bytes != entry.end - entry.begin) {
    return BadTensor(
        file, entry.name,
        absl::StrCat(
            range, " do not fit shape [", absl::StrJoin(entry.shape, ", "),
            "] of ", DTypeName(entry.dtype),
            overflow ? std::string(", which overflows")
                     : absl::StrCat(", which takes ", bytes, " bytes")));
  }
  return absl::OkStatus();
}

// Tensors must tile the data: no hole, no overlap, nothing after the last.
absl::Status CheckTiling(const std::vector<TensorEntry>& by_begin,
                         uint64_t data_bytes, absl::string_view file) {
  uint64_t end = 0;
  for (const TensorEntry& entry : by_begin) {
    if (entry.begin != end) {
      return BadTensor(
          file, entry.name,
          absl::StrCat(
              "data_offsets [", entry.begin, ", ", entry.end, "] ",
              entry.begin < end ? "overlap the tensor before" : "leave a hole",
              ", which ends at ", end));
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    return InvalidInput(file, "", "",
                        absl::StrCat("tensors end at data byte ", end,
                                     ", but the file has ", data_bytes),
                        "the file is damaged or was cut short");
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const std::vector<TensorEntry>& tensors,
                        absl::string_view file) {
  std::vector<absl::string_view> names;
  names.reserve(tensors.size());
  for (const TensorEntry& entry : tensors) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) return BadTensor(file, *twice, "listed twice");
  return absl::OkStatus();
}

std::string Quoted(absl::string_view text) {
  try {
    return nlohmann::json(std::string(text)).dump();
  } catch (const nlohmann::json::exception&) {
    SDP_CHECK(false, "a name to be written is not UTF-8");
  }
}

}  // namespace

absl::string_view DTypeName(DType dtype) { return Row(dtype).name; }

uint64_t DTypeBytes(DType dtype) { return Row(dtype).bytes; }

std::optional<DType> DTypeFromName(absl::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

uint64_t TensorEntry::count() const {
  uint64_t product = 1;
  for (int64_t extent : shape) product *= static_cast<uint64_t>(extent);
  return product;
}

const TensorEntry* SafetensorsHeader::Find(absl::string_view name) const {
  for (const TensorEntry& entry : tensors) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    int fd, absl::string_view file) {
  SDP_ASSIGN_OR_RETURN(uint64_t file_bytes, RegularFileBytes(fd, file));
  if (file_bytes < kLengthBytes) {
    return InvalidInput(file, "", "",
                        absl::StrCat("only ", file_bytes, " bytes"),
                        "a safetensors file starts with an 8-byte length");
  }
  uint64_t header_bytes = 0;
  SDP_RETURN_IF_ERROR(PreadFully(fd, &header_bytes, kLengthBytes, 0, file));
  if (header_bytes > kMaxSafetensorsHeaderBytes ||
      header_bytes > file_bytes - kLengthBytes) {
    return InvalidInput(
        file, "header length", absl::StrCat(header_bytes),
        absl::StrCat("more than the file's ", file_bytes,
                     " bytes or the limit of ", kMaxSafetensorsHeaderBytes),
        "the file is no safetensors file or was cut short");
  }
  std::string text(header_bytes, '\0');
  SDP_RETURN_IF_ERROR(
      PreadFully(fd, text.data(), header_bytes, kLengthBytes, file));

  SafetensorsHeader header;
  header.file_bytes = file_bytes;
  header.data_begin = kLengthBytes + header_bytes;
  SDP_RETURN_IF_ERROR(ParseSafetensorsJson(text, file, header));
  uint64_t data_bytes = file_bytes - header.data_begin;
  for (const TensorEntry& entry : header.tensors) {
    SDP_RETURN_IF_ERROR(CheckExtent(entry, data_bytes, file));
  }
  SDP_RETURN_IF_ERROR(CheckNames(header.tensors, file));
  // Empty tensors share their begin with the next one; they come first.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  SDP_RETURN_IF_ERROR(CheckTiling(header.tensors, data_bytes, file));
  for (TensorEntry& entry : header.tensors) {
    entry.begin += header.data_begin;
    entry.end += header.data_begin;
  }
  return header;
}

std::string EncodeSafetensorsHeader(
    std::vector<TensorEntry>& tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> members;
  if (!metadata.empty()) {
    members.push_back(
        absl::StrCat("\"__metadata__\":{",
                     absl::StrJoin(metadata, ",",
                                   [](std::string* out, const auto& pair) {
                                     absl::StrAppend(out, Quoted(pair.first),
                                                     ":", Quoted(pair.second));
                                   }),
                     "}"));
  }
  uint64_t end = 0;
  for (TensorEntry& entry : tensors) {
    entry.begin = end;
    end = entry.end = end + entry.count() * DTypeBytes(entry.dtype);
    members.push_back(absl::StrCat(
        Quoted(entry.name), ":{\"dtype\":\"", DTypeName(entry.dtype),
        "\",\"shape\":[", absl::StrJoin(entry.shape, ","),
        "],\"data_offsets\":[", entry.begin, ",", entry.end, "]}"));
  }
  std::string text = absl::StrCat("{", absl::StrJoin(members, ","), "}");
  text.resize(AlignUp(text.size(), kDataAlignment), ' ');
  SDP_CHECK(text.size() <= kMaxSafetensorsHeaderBytes, "header too long");

  uint64_t length = text.size();
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  bytes += text;
  for (TensorEntry& entry : tensors) {
    entry.begin += bytes.size();
    entry.end += bytes.size();
  }
  return bytes;
}

}  // namespace slidedp::model
