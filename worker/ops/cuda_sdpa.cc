#include "worker/ops/cuda_sdpa.h"

#include <cudnn_frontend.h>

#include <cmath>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_stream.h"

namespace slidedp::ops {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kStats,
  kDOut,
  kDQ,
  kDK,
  kDV,
  // RaggedRows; lengths of queries and of keys are one array.
  kQueryLengths,
  kKeyLengths,
  kQkvRows,
  kOutRows,
  kStatsRows
};

absl::Status CudnnStatus(cudnnStatus_t status, absl::string_view what) {
  if (status == CUDNN_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(what, ": ", cudnnGetErrorString(status)));
}

absl::Status FrontendStatus(fe::error_t error, absl::string_view what) {
  if (error.is_good()) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(what, ": ", error.get_message()));
}

class Handle {
 public:
  Handle() = default;
  ~Handle() {
    if (handle_ != nullptr) cudnnDestroy(handle_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  absl::Status Create() {
    return CudnnStatus(cudnnCreate(&handle_), "cudnnCreate");
  }
  cudnnHandle_t get() const { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

class Plan : public SdpaPlan {
 public:
  Plan(const Handle& handle, std::shared_ptr<fe::graph::Graph> graph)
      : handle_(handle), graph_(std::move(graph)) {}

  absl::Status Build() {
    cudnnHandle_t handle = handle_.get();
    SDP_RETURN_IF_ERROR(FrontendStatus(graph_->validate(), "validate"));
    SDP_RETURN_IF_ERROR(
        FrontendStatus(graph_->build_operation_graph(handle), "build graph"));
    SDP_RETURN_IF_ERROR(FrontendStatus(
        graph_->create_execution_plans({fe::HeurMode_t::A}), "find plans"));
    SDP_RETURN_IF_ERROR(
        FrontendStatus(graph_->check_support(), "check support"));
    SDP_RETURN_IF_ERROR(FrontendStatus(
        graph_->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE),
        "build plans"));
    int64_t bytes = 0;
    SDP_RETURN_IF_ERROR(
        FrontendStatus(graph_->get_workspace_size(bytes), "workspace size"));
    workspace_bytes_ = static_cast<size_t>(bytes);
    return absl::OkStatus();
  }

  size_t workspace_bytes() const override { return workspace_bytes_; }

  absl::Status Run(const SdpaPointers& p, void* workspace,
                   device::Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t cuda, device::UseCudaStream(stream));
    SDP_RETURN_IF_ERROR(
        CudnnStatus(cudnnSetStream(handle_.get(), cuda), "cudnnSetStream"));
    std::unordered_map<int64_t, void*> pointers = {{kQ, const_cast<void*>(p.q)},
                                                   {kK, const_cast<void*>(p.k)},
                                                   {kV, const_cast<void*>(p.v)},
                                                   {kOut, p.out},
                                                   {kStats, p.stats}};
    if (p.rows.lengths != nullptr) {
      pointers.insert({{kQueryLengths, p.rows.lengths},
                       {kKeyLengths, p.rows.lengths},
                       {kQkvRows, p.rows.qkv},
                       {kOutRows, p.rows.out},
                       {kStatsRows, p.rows.stats}});
    }
    if (p.d_q != nullptr) {
      pointers.insert({{kDOut, const_cast<void*>(p.d_out)},
                       {kDQ, p.d_q},
                       {kDK, p.d_k},
                       {kDV, p.d_v}});
    }
    try {
      fe::error_t error = graph_->execute(handle_.get(), pointers, workspace);
      if (error.is_good()) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("cuDNN attention: ", error.get_message()));
    } catch (const std::exception& e) {
      return absl::InternalError(absl::StrCat("cuDNN attention: ", e.what()));
    }
  }

 private:
  const Handle& handle_;
  const std::shared_ptr<fe::graph::Graph> graph_;
  size_t workspace_bytes_ = 0;
};

// Builds a graph over the tensors of a shape.
class Builder {
 public:
  explicit Builder(const SdpaShape& shape)
      : shape_(shape), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (!packed()) return;
    const int64_t n = shape.documents;
    query_lengths_ = Index(kQueryLengths, "query lengths", n);
    key_lengths_ = Index(kKeyLengths, "key lengths", n);
    qkv_rows_ = Index(kQkvRows, "qkv rows", n + 1);
    out_rows_ = Index(kOutRows, "out rows", n + 1);
    stats_rows_ = Index(kStatsRows, "stats rows", n + 1);
  }

  const std::shared_ptr<fe::graph::Graph>& graph() const { return graph_; }

  // Rows of the fused buffer.
  Tensor QkvInput(Uid uid, const char* name, int64_t heads) {
    return Input(uid, name, heads, shape_.qkv_stride, qkv_rows_);
  }
  Tensor OutInput(Uid uid, const char* name) {
    return Input(uid, name, shape_.heads, shape_.out_stride, out_rows_);
  }
  void QkvOutput(const Tensor& tensor, Uid uid, int64_t heads) {
    Output(tensor, uid, heads, shape_.qkv_stride, qkv_rows_);
  }
  void OutOutput(const Tensor& tensor) {
    Output(tensor, kOut, shape_.heads, shape_.out_stride, out_rows_);
  }
  Tensor StatsInput() {
    auto attributes = fe::graph::Tensor_attributes()
                          .set_name("stats")
                          .set_uid(kStats)
                          .set_dim(StatsDim())
                          .set_stride(StatsStride())
                          .set_data_type(fe::DataType_t::FLOAT);
    if (packed()) attributes.set_ragged_offset(stats_rows_);
    return graph_->tensor(attributes);
  }
  void StatsOutput(const Tensor& tensor) {
    tensor->set_output(true)
        .set_uid(kStats)
        .set_dim(StatsDim())
        .set_stride(StatsStride())
        .set_data_type(fe::DataType_t::FLOAT);
    if (packed()) tensor->set_ragged_offset(stats_rows_);
  }

  // Scale and mask, alike in both directions.
  template <typename Attributes>
  Attributes& Mask(Attributes& attributes) const {
    attributes
        .set_attn_scale(
            static_cast<float>(1.0 / std::sqrt(double(shape_.head_dim))))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (shape_.window > 0) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(shape_.window));
    }
    if (packed()) {
      attributes.set_padding_mask(true)
          .set_seq_len_q(query_lengths_)
          .set_seq_len_kv(key_lengths_);
    }
    return attributes;
  }

 private:
  bool packed() const { return shape_.documents > 0; }
  int64_t batch() const { return packed() ? shape_.documents : shape_.batch; }

  Tensor Index(Uid uid, const char* name, int64_t count) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
  }
  Tensor Input(Uid uid, const char* name, int64_t heads, int64_t stride,
               const Tensor& rows) {
    auto attributes = fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim(Dim(heads))
                          .set_stride(Stride(stride));
    if (packed()) attributes.set_ragged_offset(rows);
    return graph_->tensor(attributes);
  }
  void Output(const Tensor& tensor, Uid uid, int64_t heads, int64_t stride,
              const Tensor& rows) {
    tensor->set_output(true)
        .set_uid(uid)
        .set_dim(Dim(heads))
        .set_stride(Stride(stride));
    if (packed()) tensor->set_ragged_offset(rows);
  }
  std::vector<int64_t> Dim(int64_t heads) const {
    return {batch(), heads, shape_.sequence, shape_.head_dim};
  }
  std::vector<int64_t> Stride(int64_t stride) const {
    return {shape_.sequence * stride, shape_.head_dim, stride, 1};
  }
  std::vector<int64_t> StatsDim() const {
    return {batch(), shape_.heads, shape_.sequence, 1};
  }
  std::vector<int64_t> StatsStride() const {
    if (packed()) {
      return {shape_.heads * shape_.sequence, 1, shape_.heads, 1};
    }
    return {shape_.heads * shape_.sequence, shape_.sequence, 1, 1};
  }

  const SdpaShape shape_;
  const std::shared_ptr<fe::graph::Graph> graph_;
  // Packed.
  Tensor query_lengths_, key_lengths_, qkv_rows_, out_rows_, stats_rows_;
};

class SdpaImpl : public Sdpa {
 public:
  absl::Status Init(device::Device& device) {
    SDP_ASSIGN_OR_RETURN(auto context, device::CudaContextOf(device));
    SDP_RETURN_IF_ERROR(context->Use());
    return handle_.Create();
  }

  absl::StatusOr<std::unique_ptr<SdpaPlan>> PlanForward(
      const SdpaShape& s) override {
    return Guarded([&]() -> std::shared_ptr<fe::graph::Graph> {
      Builder build(s);
      const Tensor q = build.QkvInput(kQ, "q", s.heads);
      const Tensor k = build.QkvInput(kK, "k", s.kv_heads);
      const Tensor v = build.QkvInput(kV, "v", s.kv_heads);
      auto attributes = fe::graph::SDPA_attributes().set_name("attention");
      build.Mask(attributes).set_generate_stats(true);
      auto [out, stats] = build.graph()->sdpa(q, k, v, attributes);
      build.OutOutput(out);
      build.StatsOutput(stats);
      return build.graph();
    });
  }

  absl::StatusOr<std::unique_ptr<SdpaPlan>> PlanBackward(
      const SdpaShape& s, bool deterministic) override {
    return Guarded([&]() -> std::shared_ptr<fe::graph::Graph> {
      Builder build(s);
      const Tensor q = build.QkvInput(kQ, "q", s.heads);
      const Tensor k = build.QkvInput(kK, "k", s.kv_heads);
      const Tensor v = build.QkvInput(kV, "v", s.kv_heads);
      const Tensor out = build.OutInput(kOut, "out");
      const Tensor d_out = build.OutInput(kDOut, "d_out");
      const Tensor stats = build.StatsInput();
      auto attributes =
          fe::graph::SDPA_backward_attributes().set_name("attention backward");
      build.Mask(attributes).set_deterministic_algorithm(deterministic);
      if (s.documents > 0) {  // else its sums take documents x sequence rows
        attributes.set_max_total_seq_len_q(s.batch * s.sequence)
            .set_max_total_seq_len_kv(s.batch * s.sequence);
      }
      auto [d_q, d_k, d_v] =
          build.graph()->sdpa_backward(q, k, v, out, d_out, stats, attributes);
      build.QkvOutput(d_q, kDQ, s.heads);
      build.QkvOutput(d_k, kDK, s.kv_heads);
      build.QkvOutput(d_v, kDV, s.kv_heads);
      return build.graph();
    });
  }

 private:
  // The frontend throws in places.
  template <typename MakeGraph>
  absl::StatusOr<std::unique_ptr<SdpaPlan>> Guarded(MakeGraph make_graph) {
    try {
      auto plan = std::make_unique<Plan>(handle_, make_graph());
      SDP_RETURN_IF_ERROR(plan->Build());
      return plan;
    } catch (const std::exception& e) {
      return absl::UnimplementedError(e.what());
    }
  }

  Handle handle_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Sdpa>> Sdpa::Create(device::Device& device) {
  auto sdpa = std::make_unique<SdpaImpl>();
  SDP_RETURN_IF_ERROR(sdpa->Init(device));
  return sdpa;
}

size_t DeterministicWorkspaceBytes(const SdpaShape& s) {
  return 2 * s.batch * s.heads * AlignUp(s.sequence, 64) *
         AlignUp(s.sequence, 128);
}

}  // namespace slidedp::ops
