#include "common/collective/operation.h"

#include <limits>

#include "common/base/status.h"

namespace slidedp::collective {
namespace {

absl::string_view KindName(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllReduce:
      return "all-reduce";
    case OperationKind::kReduce:
      return "reduce";
    case OperationKind::kReduceScatter:
      return "reduce-scatter";
    case OperationKind::kAllGather:
      return "all-gather";
    case OperationKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

bool OverShards(OperationKind kind) {
  return kind == OperationKind::kReduceScatter ||
         kind == OperationKind::kAllGather;
}

}  // namespace

uint64_t Operation::Packed() const {
  return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 |
         static_cast<uint64_t>(root) << 32;
}

std::string Describe(uint64_t packed, uint64_t count) {
  const auto kind = static_cast<OperationKind>(packed & 0xff);
  const absl::string_view name = KindName(kind);
  if (kind == OperationKind::kBarrier) return std::string(name);
  if (kind == OperationKind::kAllGather) {
    return absl::StrCat(name, " of ", count, "-byte shards");
  }
  const auto dtype = static_cast<DType>((packed >> 8) & 0xff);
  std::string text = absl::StrCat(name, " of ", count,
                                  dtype == DType::kF32 ? " f32" : " bf16");
  if (kind == OperationKind::kReduceScatter) text += " a shard";
  if (kind == OperationKind::kReduce) {
    absl::StrAppend(&text, " to rank ", packed >> 32);
  }
  return text;
}

absl::Status CheckOperation(const Operation& operation, const void* data,
                            int world_size) {
  const absl::string_view name = KindName(operation.kind);
  const bool bytes_only = operation.kind == OperationKind::kAllGather;
  const size_t element_bytes = bytes_only ? 1 : DTypeBytes(operation.dtype);
  const size_t shards = OverShards(operation.kind) ? world_size : 1;
  if (operation.count >
      std::numeric_limits<ptrdiff_t>::max() / element_bytes / shards) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": a count of ", operation.count, " is too large"));
  }
  if (operation.count != 0 &&
      (data == nullptr ||
       reinterpret_cast<uintptr_t>(data) % element_bytes != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": data must be a non-null pointer aligned to ",
                     element_bytes, " bytes"));
  }
  if (operation.root < 0 || operation.root >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": root ", operation.root, " is not one of the ",
                     world_size, " ranks"));
  }
  return absl::OkStatus();
}

}  // namespace slidedp::collective
