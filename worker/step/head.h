// Final norm, output projection and cross-entropy of one micro-batch, forward
// and backward in one pass, chunked over tokens: logits of a whole micro-batch
// never exist.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "worker/ops/ops.h"
#include "worker/step/buffers.h"

namespace slidedp::step {

class Head {
 public:
  struct Weights {
    const bf16* norm;   // [hidden]
    const bf16* table;  // [vocab, hidden]
    float* d_norm;      // null in forward only
    float* d_table;     // null also if it is frozen
    // d_table is added to from the first chunk on, which else writes it.
    bool add_to_table = false;
  };
  // Called with each chunk of logits when its place in the stream is reached by
  // the enqueueing thread: may enqueue what reads them.
  using OnLogits = std::function<absl::Status(int64_t first_row, int64_t rows,
                                              ops::ConstAct logits)>;

  Head(ops::Ops& ops, const model::ModelConfig& config, int64_t tokens,
       int64_t chunk_tokens, const Buffers& buffers);

  // *loss_sum += sum of token losses. With gradients: d_input [tokens, hidden]
  // is written, weight gradients are of scale * loss; d_norm is added to.
  absl::Status Run(const Weights& weights, ops::ConstAct input,
                   const int32_t* labels, float scale, double* loss_sum,
                   ops::Act d_input, const OnLogits& on_logits,
                   device::Stream& stream);

 private:
  ops::Ops& ops_;
  const model::ModelConfig& config_;
  int64_t tokens_, chunk_tokens_;
  void *norm_, *logits_, *d_norm_;
  float* rstd_;
};

}  // namespace slidedp::step
