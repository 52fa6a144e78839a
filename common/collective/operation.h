// One call of a collective, as the ranks compare it. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/collective/collective.h"

namespace slidedp::collective {

enum class OperationKind : uint8_t {
  kAllReduce = 1,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBarrier,
};

struct Operation {
  OperationKind kind;
  DType dtype = DType::kF32;
  int root = 0;
  size_t count = 0;  // elements; of a shard; bytes of a shard (all-gather)

  // Everything but `count` in one word.
  uint64_t Packed() const;
};

// "all-reduce of 12 bf16".
std::string Describe(uint64_t packed, uint64_t count);

// Null or misaligned data, a root that is no rank, sizes that overflow.
absl::Status CheckOperation(const Operation& operation, const void* data,
                            int world_size);

}  // namespace slidedp::collective
