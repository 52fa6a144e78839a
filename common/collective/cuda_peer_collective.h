// Collective of GPUs that reach each other's memory: all-gather and
// reduce-scatter go by copies between the GPUs, which their copy engines do, so
// they take no multiprocessor from the computation beside them (NCCL's kernels
// do); only the sum is a kernel. What is small or rare (all-reduce, reduce,
// barrier) stays with NCCL.
//
// Each rank owns staging memory that the others map (CUDA IPC) and push their
// pieces into, announced by words in the same memory that the streams
// themselves write and wait for. Sums are taken in rank order in float32,
// rounded once, so they agree with the shared-memory implementation bit for
// bit.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/collective/nccl_collective.h"

namespace slidedp::collective {

class PeerCollective : public Collective {
 public:
  // As NcclCollective::Check, of both.
  virtual absl::Status Check() = 0;
};

// All ranks of `nccl` call it, in the same order. Null, on every rank, if not
// all of them reach each other (logged with the reason), or if NCCL_P2P_DISABLE
// says that they must not: use `nccl` then, which is left untouched. Else
// `nccl` belongs to the result. Takes `staging_bytes` of device memory and runs
// each operation once.
absl::StatusOr<std::unique_ptr<PeerCollective>> NewPeerCollective(
    device::Device& device, std::unique_ptr<NcclCollective>& nccl,
    size_t staging_bytes, int64_t deadline_ns);

}  // namespace slidedp::collective
