// Matrix products through cuBLASLt, one plan per shape. Column-major, as the
// library has it; linear_cuda.cc maps the row-major layers onto it.
//
//   D [m, n] = op(A) [m, k] * op(B) [k, n]  (+ C)  (+ bias [m], per column)
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "worker/ops/cuda_plan_mode.h"
#include "worker/ops/cuda_workspace.h"

namespace slidedp::ops {

enum class GemmType : uint8_t {
  kBf16,         // A, B, D and bias BF16
  kBf16IntoF32,  // A, B BF16; D float32
  kF32,          // all float32, computed in float32 (no TF32)
};

struct GemmShape {
  GemmType type;
  bool transpose_a, transpose_b;
  bool add;  // there is a C, like D in type and stride
  bool bias;
  int64_t m, n, k;
  int64_t lda, ldb, ldd;  // columns' strides, elements

  bool operator==(const GemmShape&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const GemmShape& s) {
    return H::combine(std::move(h), static_cast<int>(s.type), s.transpose_a,
                      s.transpose_b, s.add, s.bias, s.m, s.n, s.k, s.lda, s.ldb,
                      s.ldd);
  }
};

struct GemmOperands {
  const void* a;
  const void* b;
  const void* c;  // may be d
  void* d;
  const void* bias;
};

class CudaGemm {
 public:
  // deterministic: the same bits in every run on the same kind of GPU, which
  // excludes timing and reductions whose order could vary.
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Create(
      device::Device& device, CudaWorkspace& workspace, bool deterministic);
  virtual ~CudaGemm() = default;

  virtual void set_mode(PlanMode mode) = 0;
  virtual absl::Status Run(const GemmShape& shape, const GemmOperands& operands,
                           device::Stream& stream) = 0;
};

}  // namespace slidedp::ops
