// A whole model in memory, forward only: evaluation loss and greedy generation
// on the CPU device, with the ops and layers that training uses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "worker/ops/ops.h"
#include "worker/step/buffers.h"
#include "worker/step/head.h"

namespace slidedp::infer {

class Model {
 public:
  // `max_tokens`: longest sequence that will be asked for.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder,
                                                     int64_t max_tokens,
                                                     int threads);

  const model::ModelConfig& config() const { return config_; }

  // Sum of token losses of one sequence; labels as data::Dataset::Fill gives
  // them (-1: none).
  absl::StatusOr<double> LossSum(const std::vector<int32_t>& ids,
                                 const std::vector<int32_t>& labels);
  // The most probable next token (the lowest id of equals).
  absl::StatusOr<int32_t> NextToken(const std::vector<int32_t>& ids);

 private:
  // Hidden states after the last layer.
  absl::StatusOr<void*> Forward(const std::vector<int32_t>& ids);
  absl::Status RunHead(void* hidden, int64_t rows, const int32_t* labels,
                       double* loss_sum, const step::Head::OnLogits& on_logits);
  const bf16* unit_data(int unit) const {
    return weights_.as<bf16>() + layout_.units[unit].plane_offset;
  }

  model::ModelConfig config_;
  model::StateLayout layout_;
  int64_t max_tokens_ = 0;
  int64_t head_chunk_tokens_ = 0;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<ops::Ops> ops_;
  device::Buffer weights_;
  step::Buffers buffers_;
  std::unique_ptr<device::Stream> stream_;  // ends before the buffers
};

}  // namespace slidedp::infer
