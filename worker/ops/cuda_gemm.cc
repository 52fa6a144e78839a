#include "worker/ops/cuda_gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"

namespace slidedp::ops {
namespace {

// What NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kCandidates = 16;
// Candidates run in rounds, each longer than the one before; those slower than
// the fastest by `dropped` leave. A GPU that was idle runs at clocks which its
// power limit does not let it keep, and there the order is another: on an H200
// up to 5 % of a product's rate. Clocks follow the load slowly: a round of 250
// ms for every candidate of these gave a step half a percent more, at 28 s of
// start.
struct Round {
  float untimed_ms, timed_ms;
  float dropped;
};
constexpr int kShortRuns = 2;  // of the first round, after one that loads it
constexpr float kFirstDropped = 1.15f;
constexpr Round kRounds[] = {{10, 20, 1.02f}, {40, 80, 1}};
constexpr int kMostRuns = 100;
// Before the first of these rounds, once.
constexpr float kHeatMs = 200;

absl::Status CublasStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  cudaGetLastError();
  return absl::InternalError(
      absl::StrCat(what, ": ", cublasLtGetStatusString(status)));
}

#define SDP_RETURN_IF_CUBLAS_ERROR(call) \
  SDP_RETURN_IF_ERROR(CublasStatus((call), #call))

// Owner of a cuBLASLt descriptor.
template <typename Handle, cublasStatus_t (*Destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) Destroy(handle_);
  }
  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};
using LtHandle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference =
    Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// What an address allows; kernels ask for 16 bytes at most.
uint32_t Alignment(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  uint32_t alignment = 16;
  while (bits % alignment != 0) alignment /= 2;
  return alignment;
}

struct PlanKey {
  GemmShape shape;
  uint32_t align_a, align_b, align_c, align_d, align_bias;

  bool operator==(const PlanKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PlanKey& k) {
    return H::combine(std::move(h), k.shape, k.align_a, k.align_b, k.align_c,
                      k.align_d, k.align_bias);
  }
};

struct Plan {
  MatmulDesc desc;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm;
};

std::string NameOf(const GemmShape& s) {
  static constexpr const char* kTypes[] = {"bf16", "bf16 into f32", "f32"};
  return absl::StrCat("matrix product of ", s.m, " x ", s.n, " x ", s.k, " (",
                      kTypes[static_cast<int>(s.type)], ")");
}

class CudaGemmImpl : public CudaGemm {
 public:
  CudaGemmImpl(CudaWorkspace& workspace, bool deterministic)
      : workspace_(workspace), deterministic_(deterministic) {}

  absl::Status Init(device::Device& device) {
    SDP_ASSIGN_OR_RETURN(auto context, device::CudaContextOf(device));
    SDP_RETURN_IF_ERROR(context->Use());
    SDP_RETURN_IF_CUBLAS_ERROR(cublasLtCreate(handle_.out()));
    SDP_ASSIGN_OR_RETURN(begin_, device.NewEvent());
    SDP_ASSIGN_OR_RETURN(end_, device.NewEvent());
    return absl::OkStatus();
  }

  void set_mode(PlanMode mode) override { mode_ = mode; }

  absl::Status Run(const GemmShape& shape, const GemmOperands& operands,
                   device::Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
    SDP_ASSIGN_OR_RETURN(void* workspace,
                         workspace_.Acquire(kWorkspaceBytes, stream));
    const absl::Status status = RunWith(shape, operands, workspace, handle);
    SDP_RETURN_IF_ERROR(workspace_.Release(stream));
    return Annotate(status, NameOf(shape));
  }

 private:
  absl::Status RunWith(const GemmShape& shape, const GemmOperands& operands,
                       void* workspace, cudaStream_t stream) {
    const PlanKey key = {shape,
                         Alignment(operands.a),
                         Alignment(operands.b),
                         Alignment(operands.c),
                         Alignment(operands.d),
                         Alignment(operands.bias)};
    auto it = plans_.find(key);
    if (it == plans_.end()) {
      if (mode_ == PlanMode::kFrozen) {
        return absl::FailedPreconditionError(
            "was not planned at warm-up; nothing is planned during steps");
      }
      SDP_ASSIGN_OR_RETURN(auto plan, Choose(key, operands, workspace, stream));
      it = plans_.emplace(key, std::move(plan)).first;
    }
    return Launch(*it->second, it->second->algorithm, shape, operands,
                  workspace, stream);
  }

  absl::Status Launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                      const GemmShape& shape, const GemmOperands& operands,
                      void* workspace, cudaStream_t stream) {
    if (shape.bias) {
      SDP_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
          plan.desc.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operands.bias,
          sizeof(operands.bias)));
    }
    const float alpha = 1, beta = shape.add ? 1 : 0;
    // Without one the library still asks for an address; with beta = 0 it does
    // not read there.
    const void* c = shape.add ? operands.c : operands.d;
    SDP_RETURN_IF_CUBLAS_ERROR(cublasLtMatmul(
        handle_.get(), plan.desc.get(), &alpha, operands.a, plan.a.get(),
        operands.b, plan.b.get(), &beta, c, plan.d.get(), operands.d,
        plan.d.get(), &algorithm, workspace, kWorkspaceBytes, stream));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Plan>> Describe(const GemmShape& s,
                                                 const void* bias) {
    const cudaDataType_t in =
        s.type == GemmType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
    const cudaDataType_t out =
        s.type == GemmType::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
    auto plan = std::make_unique<Plan>();
    SDP_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescCreate(
        plan->desc.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute,
                         const auto& value) {
      return cublasLtMatmulDescSetAttribute(plan->desc.get(), attribute, &value,
                                            sizeof(value));
    };
    const cublasOperation_t op_a = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    SDP_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, op_a));
    SDP_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSB, op_b));
    if (s.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      SDP_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
      SDP_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, in));
      SDP_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
    }
    SDP_RETURN_IF_CUBLAS_ERROR(
        cublasLtMatrixLayoutCreate(plan->a.out(), in, s.transpose_a ? s.k : s.m,
                                   s.transpose_a ? s.m : s.k, s.lda));
    SDP_RETURN_IF_CUBLAS_ERROR(
        cublasLtMatrixLayoutCreate(plan->b.out(), in, s.transpose_b ? s.n : s.k,
                                   s.transpose_b ? s.k : s.n, s.ldb));
    SDP_RETURN_IF_CUBLAS_ERROR(
        cublasLtMatrixLayoutCreate(plan->d.out(), out, s.m, s.n, s.ldd));
    return plan;
  }

  absl::StatusOr<std::unique_ptr<Plan>> Choose(const PlanKey& key,
                                               const GemmOperands& operands,
                                               void* workspace,
                                               cudaStream_t stream) {
    SDP_ASSIGN_OR_RETURN(auto plan, Describe(key.shape, operands.bias));
    Preference preference;
    SDP_RETURN_IF_CUBLAS_ERROR(
        cublasLtMatmulPreferenceCreate(preference.out()));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute,
                            const auto& value) {
      return cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute,
                                                  &value, sizeof(value));
    };
    SDP_RETURN_IF_CUBLAS_ERROR(
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes));
    SDP_RETURN_IF_CUBLAS_ERROR(
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_a));
    SDP_RETURN_IF_CUBLAS_ERROR(
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_b));
    SDP_RETURN_IF_CUBLAS_ERROR(
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_c));
    SDP_RETURN_IF_CUBLAS_ERROR(
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_d));
    if (deterministic_) {
      const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE |
                               CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      SDP_RETURN_IF_CUBLAS_ERROR(
          prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes));
    }
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates;
    int found = 0;
    SDP_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulAlgoGetHeuristic(
        handle_.get(), plan->desc.get(), plan->a.get(), plan->b.get(),
        plan->d.get(), plan->d.get(), preference.get(), kCandidates,
        candidates.data(), &found));
    if (found == 0) {
      return absl::UnimplementedError("cuBLASLt has no algorithm for it");
    }
    int best = 0;
    // Timings differ between runs, and so would the bits.
    if (mode_ == PlanMode::kTimed && !deterministic_) {
      SDP_ASSIGN_OR_RETURN(
          best, Fastest(*plan, key.shape, operands,
                        {candidates.data(), static_cast<size_t>(found)},
                        workspace, stream));
    }
    plan->algorithm = candidates[best].algo;
    return plan;
  }

  absl::StatusOr<int> Fastest(
      const Plan& plan, const GemmShape& shape, const GemmOperands& operands,
      std::span<const cublasLtMatmulHeuristicResult_t> candidates,
      void* workspace, cudaStream_t stream) {
    const cudaEvent_t begin = static_cast<device::CudaEvent&>(*begin_).handle();
    const cudaEvent_t end = static_cast<device::CudaEvent&>(*end_).handle();
    // Milliseconds of a run.
    const auto time = [&](int i, int untimed,
                          int timed) -> absl::StatusOr<float> {
      for (int run = 0; run < untimed + timed; ++run) {
        if (run == untimed) {
          SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(begin, stream));
        }
        SDP_RETURN_IF_ERROR(Launch(plan, candidates[i].algo, shape, operands,
                                   workspace, stream));
      }
      SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(end, stream));
      SDP_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(end));
      float ms = 0;
      SDP_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&ms, begin, end));
      return ms / static_cast<float>(timed);
    };
    struct Candidate {
      int index;
      float ms;
    };
    std::vector<Candidate> left;
    absl::Status first_error;
    for (int i = 0; i < std::ssize(candidates); ++i) {
      // The first run loads the kernel. A candidate that its own library
      // refuses is no candidate.
      const absl::StatusOr<float> ms = time(i, 1, kShortRuns);
      if (ms.ok()) {
        left.push_back({i, *ms});
      } else {
        first_error.Update(ms.status());
      }
    }
    if (left.empty()) return first_error;
    Candidate best;
    const auto drop = [&](float dropped) {
      best = *absl::c_min_element(
          left, [](const auto& a, const auto& b) { return a.ms < b.ms; });
      std::erase_if(left, [&](const Candidate& candidate) {
        return candidate.ms > dropped * best.ms;
      });
    };
    drop(kFirstDropped);
    const auto runs = [&](float ms) {
      return static_cast<int>(
          std::clamp(std::ceil(ms / best.ms), 1.0f, float{kMostRuns}));
    };
    if (!heated_) {
      SDP_RETURN_IF_ERROR(time(best.index, 0, runs(kHeatMs)).status());
      heated_ = true;
    }
    for (const Round& round : kRounds) {
      if (left.size() == 1) break;
      const int untimed = runs(round.untimed_ms), timed = runs(round.timed_ms);
      for (Candidate& candidate : left) {
        SDP_ASSIGN_OR_RETURN(candidate.ms,
                             time(candidate.index, untimed, timed));
      }
      drop(round.dropped);
    }
    spdlog::debug("{}: algorithm {} of {}, {:.0f} TFLOP/s", NameOf(shape),
                  best.index, candidates.size(),
                  2e-9 * static_cast<double>(shape.m) *
                      static_cast<double>(shape.n) *
                      static_cast<double>(shape.k) / double{best.ms});
    return best.index;
  }

  CudaWorkspace& workspace_;
  const bool deterministic_;
  PlanMode mode_ = PlanMode::kFirstChoice;
  bool heated_ = false;
  LtHandle handle_;
  std::unique_ptr<device::Event> begin_, end_;
  absl::flat_hash_map<PlanKey, std::unique_ptr<Plan>> plans_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGemm>> CudaGemm::Create(
    device::Device& device, CudaWorkspace& workspace, bool deterministic) {
  auto gemm = std::make_unique<CudaGemmImpl>(workspace, deterministic);
  SDP_RETURN_IF_ERROR(gemm->Init(device));
  return gemm;
}

}  // namespace slidedp::ops
