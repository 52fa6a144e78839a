#include "worker/bench/op_list.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::bench {
namespace {

// Forward, input gradient and weight gradient of y = x w^T.
struct Linear {
  const char* name;
  int64_t in, out;
  bool bias;
  bool residual;
};

// Operands are shared where sizes allow: `wide` ones hold the largest.
class ListBuilder {
 public:
  ListBuilder(Machine& machine, const model::ModelConfig& config,
              const OpShape& shape)
      : machine_(machine),
        ops_(machine.ops()),
        config_(config),
        shape_(shape) {}

  absl::Status AddLinear(const Linear& linear, int64_t rows, bool in_layer) {
    Machine& m = machine_;
    const std::string name = linear.name;
    const int64_t in = linear.in, out = linear.out;
    SDP_ASSIGN_OR_RETURN(void* x, m.Activations(name + ".x", rows * in, 1));
    SDP_ASSIGN_OR_RETURN(void* y, m.Zeros(name + ".y", Bytes(rows * out)));
    SDP_ASSIGN_OR_RETURN(void* d_y, m.Activations(name + ".d_y", rows * out,
                                                  kGradientDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_x, m.Zeros(name + ".d_x", Bytes(rows * in)));
    SDP_ASSIGN_OR_RETURN(bf16 * w,
                         m.Weights(name + ".w", out * in, kWeightDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_w, m.Zeros(name + ".d_w", out * in * 4));
    bf16* bias = nullptr;
    float* d_bias = nullptr;
    if (linear.bias) {
      SDP_ASSIGN_OR_RETURN(bias,
                           m.Weights(name + ".bias", out, kWeightDeviation));
      SDP_ASSIGN_OR_RETURN(void* d, m.Zeros(name + ".d_bias", out * 4));
      d_bias = static_cast<float*>(d);
    }
    void* residual = nullptr;
    if (linear.residual) {
      SDP_ASSIGN_OR_RETURN(residual,
                           m.Activations(name + ".residual", rows * out, 1));
    }
    const double flops = 2.0 * static_cast<double>(rows) *
                         static_cast<double>(in) * static_cast<double>(out);
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    list_.push_back({name + ".forward", OpKind::kGemm, flops, 0, in_layer,
                     false, [=, &ops, &stream] {
                       return ops.LinearForward(x, w, bias, rows, in, out,
                                                residual, y, stream);
                     }});
    list_.push_back({name + ".input_gradient", OpKind::kGemm, flops, 0, false,
                     in_layer, [=, &ops, &stream] {
                       return ops.LinearBackwardInput(d_y, w, rows, in, out,
                                                      /*add=*/false, d_x,
                                                      stream);
                     }});
    list_.push_back({name + ".weight_gradient", OpKind::kGemm, flops, 0, false,
                     in_layer, [=, &ops, &stream] {
                       return ops.LinearBackwardWeight(x, d_y, rows, in, out,
                                                       /*add=*/true,
                                                       static_cast<float*>(d_w),
                                                       d_bias, stream);
                     }});
    return absl::OkStatus();
  }

  absl::Status AddAttention() {
    Machine& m = machine_;
    const int64_t tokens = shape_.tokens();
    const int64_t qkv_dim = config_.qkv_dim(), q_dim = config_.q_dim();
    ops::AttentionShape shape = {shape_.batch,     shape_.sequence,
                                 config_.heads,    config_.kv_heads,
                                 config_.head_dim, config_.window[0]};
    SDP_ASSIGN_OR_RETURN(void* qkv,
                         m.Activations("attention.qkv", tokens * qkv_dim, 1));
    SDP_ASSIGN_OR_RETURN(void* out,
                         m.Zeros("attention.out", Bytes(tokens * q_dim)));
    SDP_ASSIGN_OR_RETURN(void* lse,
                         m.Zeros("attention.lse", tokens * config_.heads * 4));
    SDP_ASSIGN_OR_RETURN(
        void* d_out,
        m.Activations("attention.d_out", tokens * q_dim, kGradientDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_qkv,
                         m.Zeros("attention.d_qkv", Bytes(tokens * qkv_dim)));
    const double seen = static_cast<double>(
        shape.window == 0 ? shape_.sequence
                          : std::min(shape.window, shape_.sequence));
    const double product =
        static_cast<double>(tokens) * seen *
        static_cast<double>(q_dim);  // causal half of 2 t s q
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    list_.push_back({"attention.forward", OpKind::kAttention, 2 * product, 0,
                     true, false, [=, &ops, &stream] {
                       return ops.AttentionForward(
                           qkv, shape, out, static_cast<float*>(lse), stream);
                     }});
    list_.push_back({"attention.backward", OpKind::kAttention, 5 * product, 0,
                     false, true, [=, &ops, &stream] {
                       return ops.AttentionBackward(
                           qkv, out, static_cast<float*>(lse), d_out, shape,
                           d_qkv, stream);
                     }});
    return absl::OkStatus();
  }

  absl::Status AddNorm() {
    Machine& m = machine_;
    const int64_t t = shape_.tokens(), h = config_.hidden;
    const double eps = config_.rms_eps;
    SDP_ASSIGN_OR_RETURN(void* x, m.Activations("norm.x", t * h, 1));
    SDP_ASSIGN_OR_RETURN(void* out, m.Zeros("norm.out", Bytes(t * h)));
    SDP_ASSIGN_OR_RETURN(
        void* d_out, m.Activations("norm.d_out", t * h, kGradientDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_x, m.Zeros("norm.d_x", Bytes(t * h)));
    SDP_ASSIGN_OR_RETURN(void* rstd, m.Zeros("norm.rstd", t * 4));
    SDP_ASSIGN_OR_RETURN(void* d_w, m.Zeros("norm.d_w", h * 4));
    SDP_ASSIGN_OR_RETURN(bf16 * w, m.Weights("norm.w", h, 1));
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    Memory("rms_norm.forward", 2 * t * h, [=, &ops, &stream] {
      return ops.RmsNormForward(x, w, t, h, eps, out, static_cast<float*>(rstd),
                                stream);
    });
    Memory("rms_norm.backward", 4 * t * h, [=, &ops, &stream] {
      return ops.RmsNormBackward(x, w, static_cast<float*>(rstd), d_out, t, h,
                                 /*add=*/true, d_x, static_cast<float*>(d_w),
                                 /*normed=*/nullptr, stream);
    });
    return absl::OkStatus();
  }

  absl::Status AddRope() {
    Machine& m = machine_;
    const int64_t t = shape_.tokens(), n = config_.qkv_dim();
    const ops::AttentionShape shape = {shape_.batch,     shape_.sequence,
                                       config_.heads,    config_.kv_heads,
                                       config_.head_dim, 0};
    SDP_ASSIGN_OR_RETURN(void* qkv, m.Activations("rope.qkv", t * n, 1));
    SDP_ASSIGN_OR_RETURN(void* out, m.Zeros("rope.out", Bytes(t * n)));
    SDP_ASSIGN_OR_RETURN(
        void* d_qkv, m.Activations("rope.d_qkv", t * n, kGradientDeviation));
    SDP_ASSIGN_OR_RETURN(
        void* rstd,
        m.Zeros("rope.rstd", t * (config_.heads + config_.kv_heads) * 4));
    SDP_ASSIGN_OR_RETURN(void* frequencies,
                         m.Zeros("rope.frequencies", config_.head_dim / 2 * 4));
    SDP_RETURN_IF_ERROR(
        m.FillNormal(frequencies, config_.head_dim / 2, false, 1));
    bf16 *q_norm = nullptr, *k_norm = nullptr;
    float *d_q_norm = nullptr, *d_k_norm = nullptr;
    if (config_.qk_norm) {
      const int64_t d = config_.head_dim;
      SDP_ASSIGN_OR_RETURN(q_norm, m.Weights("rope.q_norm", d, 1));
      SDP_ASSIGN_OR_RETURN(k_norm, m.Weights("rope.k_norm", d, 1));
      SDP_ASSIGN_OR_RETURN(void* dq, m.Zeros("rope.d_q_norm", d * 4));
      SDP_ASSIGN_OR_RETURN(void* dk, m.Zeros("rope.d_k_norm", d * 4));
      d_q_norm = static_cast<float*>(dq);
      d_k_norm = static_cast<float*>(dk);
    }
    const double eps = config_.rms_eps;
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    Memory("qk_norm_rope.forward", 2 * t * n, [=, &ops, &stream] {
      return ops.QkNormRopeForward(qkv, q_norm, k_norm, eps,
                                   static_cast<float*>(frequencies), shape, out,
                                   static_cast<float*>(rstd), stream);
    });
    // v's gradient passes unchanged and need not be touched.
    const int64_t qk = t * (config_.q_dim() + config_.kv_dim());
    Memory("qk_norm_rope.backward", 3 * qk, [=, &ops, &stream] {
      return ops.QkNormRopeBackward(
          qkv, q_norm, k_norm, static_cast<float*>(frequencies), shape,
          static_cast<float*>(rstd), d_qkv, d_q_norm, d_k_norm, stream);
    });
    return absl::OkStatus();
  }

  absl::Status AddSwiGlu() {
    Machine& m = machine_;
    const int64_t t = shape_.tokens(), inner = config_.intermediate;
    SDP_ASSIGN_OR_RETURN(void* gate_up,
                         m.Activations("swiglu.gate_up", 2 * t * inner, 1));
    SDP_ASSIGN_OR_RETURN(void* out, m.Zeros("swiglu.out", Bytes(t * inner)));
    SDP_ASSIGN_OR_RETURN(void* d_out, m.Activations("swiglu.d_out", t * inner,
                                                    kGradientDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_gate_up,
                         m.Zeros("swiglu.d_gate_up", Bytes(2 * t * inner)));
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    Memory("swiglu.forward", 3 * t * inner, [=, &ops, &stream] {
      return ops.SwiGluForward(gate_up, t, inner, out, stream);
    });
    Memory("swiglu.backward", 5 * t * inner, [=, &ops, &stream] {
      return ops.SwiGluBackward(gate_up, d_out, t, inner, d_gate_up,
                                /*activated=*/nullptr, stream);
    });
    return absl::OkStatus();
  }

  absl::Status AddEmbedding() {
    Machine& m = machine_;
    const int64_t t = shape_.tokens(), h = config_.hidden, v = config_.vocab;
    SDP_ASSIGN_OR_RETURN(int32_t * ids, m.Integers("embedding.ids", Ids(t)));
    SDP_ASSIGN_OR_RETURN(bf16 * table,
                         m.Weights("embedding.table", v * h, kWeightDeviation));
    SDP_ASSIGN_OR_RETURN(void* d_table,
                         m.Zeros("embedding.d_table", v * h * 4));
    SDP_ASSIGN_OR_RETURN(
        void* out, m.Activations("embedding.out", t * h, kGradientDeviation));
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    list_.push_back({"embedding.forward", OpKind::kOther, 0,
                     static_cast<double>(t * h) * (2.0 + Element()), false,
                     false, [=, &ops, &stream] {
                       return ops.EmbeddingForward(ids, table, t, h, v, out,
                                                   stream);
                     }});
    list_.push_back({"embedding.backward", OpKind::kOther, 0,
                     static_cast<double>(t * h) * (8.0 + Element()), false,
                     false, [=, &ops, &stream] {
                       return ops.EmbeddingBackward(
                           ids, out, t, h, v, static_cast<float*>(d_table),
                           stream);
                     }});
    return absl::OkStatus();
  }

  absl::Status AddLoss() {
    Machine& m = machine_;
    const int64_t rows = shape_.head_rows, v = config_.vocab;
    SDP_ASSIGN_OR_RETURN(void* logits,
                         m.Activations("loss.logits", rows * v, 1));
    SDP_ASSIGN_OR_RETURN(int32_t * labels,
                         m.Integers("loss.labels", Ids(rows)));
    SDP_ASSIGN_OR_RETURN(void* sum, m.Zeros("loss.sum", 8));
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    Memory("cross_entropy", 2 * rows * v, [=, &ops, &stream] {
      return ops.CrossEntropy(logits, labels, rows, v, 1e-3f,
                              static_cast<double*>(sum), stream);
    });
    return absl::OkStatus();
  }

  absl::Status AddCast() {
    Machine& m = machine_;
    const int64_t n = config_.hidden * config_.intermediate;
    SDP_ASSIGN_OR_RETURN(void* x, m.Zeros("cast.x", n * 4));
    SDP_RETURN_IF_ERROR(m.FillNormal(x, n, false, 1));
    SDP_ASSIGN_OR_RETURN(bf16 * out, m.Weights("cast.out", n, 1));
    SDP_ASSIGN_OR_RETURN(void* norm, m.Zeros("cast.norm", 8));
    ops::Ops& ops = ops_;
    device::Stream& stream = m.stream();
    list_.push_back(
        {"cast_to_bf16", OpKind::kOther, 0, 6.0 * static_cast<double>(n), false,
         false, [=, &ops, &stream] {
           return ops.CastToBf16(static_cast<float*>(x), n, out, stream);
         }});
    list_.push_back(
        {"squared_norm", OpKind::kOther, 0, 2.0 * static_cast<double>(n), false,
         false, [=, &ops, &stream] {
           return ops.SquaredNorm(out, n, static_cast<double*>(norm), stream);
         }});
    return absl::OkStatus();
  }

  std::vector<Op> Take() { return std::move(list_); }

 private:
  double Element() const { return static_cast<double>(ops_.act_bytes()); }
  uint64_t Bytes(int64_t elements) const {
    return static_cast<uint64_t>(elements) * ops_.act_bytes();
  }
  // Tokens spread over the vocabulary.
  std::vector<int32_t> Ids(int64_t count) const {
    std::vector<int32_t> ids(count);
    for (int64_t i = 0; i < count; ++i) {
      ids[i] = static_cast<int32_t>(i * 7919 % config_.vocab);
    }
    return ids;
  }
  void Memory(std::string name, int64_t elements,
              std::function<absl::Status()> work) {
    list_.push_back({std::move(name), OpKind::kOther, 0,
                     static_cast<double>(elements) * Element(), false, false,
                     std::move(work)});
  }

  Machine& machine_;
  ops::Ops& ops_;
  const model::ModelConfig& config_;
  const OpShape shape_;
  std::vector<Op> list_;
};

}  // namespace

absl::StatusOr<std::vector<Op>> LayerProducts(Machine& machine,
                                              const model::ModelConfig& config,
                                              const OpShape& shape) {
  ListBuilder list(machine, config, shape);
  const int64_t h = config.hidden, inner = config.intermediate;
  for (const Linear& linear :
       {Linear{"qkv", h, config.qkv_dim(), config.qkv_bias, false},
        Linear{"o", config.q_dim(), h, false, true},
        Linear{"gate_up", h, 2 * inner, false, false},
        Linear{"down", inner, h, false, true}}) {
    SDP_RETURN_IF_ERROR(
        list.AddLinear(linear, shape.tokens(), /*in_layer=*/true));
  }
  SDP_RETURN_IF_ERROR(list.AddAttention());
  return list.Take();
}

absl::StatusOr<std::vector<Op>> OtherOps(Machine& machine,
                                         const model::ModelConfig& config,
                                         const OpShape& shape) {
  ListBuilder list(machine, config, shape);
  SDP_RETURN_IF_ERROR(list.AddNorm());
  SDP_RETURN_IF_ERROR(list.AddRope());
  SDP_RETURN_IF_ERROR(list.AddSwiGlu());
  SDP_RETURN_IF_ERROR(list.AddEmbedding());
  SDP_RETURN_IF_ERROR(list.AddLinear(
      {"head", config.hidden, config.vocab, false, false}, shape.head_rows,
      /*in_layer=*/false));
  SDP_RETURN_IF_ERROR(list.AddLoss());
  SDP_RETURN_IF_ERROR(list.AddCast());
  return list.Take();
}

}  // namespace slidedp::bench
