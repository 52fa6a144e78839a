#include "worker/infer/model.h"

#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/source.h"
#include "policy/plan.h"
#include "worker/step/decoder.h"
#include "worker/step/unit_weights.h"

namespace slidedp::infer {
namespace {

using model::Role;

constexpr uint64_t kPieceElements = uint64_t{1} << 20;

absl::Status ReadWeights(const model::TensorSource& source,
                         const model::StateLayout& layout, bf16* planes) {
  std::vector<float> piece(kPieceElements);
  for (const model::Unit& unit : layout.units) {
    for (const model::Tensor& tensor : unit.tensors) {
      const model::TensorSource::Ref ref = source.Find(tensor.name);
      bf16* out = planes + unit.plane_offset + tensor.offset;
      for (uint64_t at = 0; at < tensor.count; at += kPieceElements) {
        const uint64_t count = std::min(kPieceElements, tensor.count - at);
        SDP_RETURN_IF_ERROR(model::ReadAsFloat(ref, at, count, piece.data()));
        for (uint64_t i = 0; i < count; ++i) {
          out[at + i] = FloatToBf16Away(piece[i]);
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& folder,
                                                   int64_t max_tokens,
                                                   int threads) {
  const std::string config_file = absl::StrCat(folder, "/config.json");
  SDP_ASSIGN_OR_RETURN(const std::string json, ReadFile(config_file, kMiB));
  std::unique_ptr<Model> model(new Model());
  SDP_ASSIGN_OR_RETURN(model->config_,
                       model::ParseModelConfig(json, config_file));
  model->layout_ = model::MakeStateLayout(model->config_);
  model->max_tokens_ = max_tokens;
  SDP_ASSIGN_OR_RETURN(const model::TensorSource source,
                       model::OpenModelFolder(folder));
  SDP_RETURN_IF_ERROR(model::ValidateSource(model->layout_, source));

  model->device_ = device::NewCpuDevice({});
  model->ops_ = ops::NewCpuOps(threads);
  SDP_ASSIGN_OR_RETURN(
      model->weights_,
      model->device_->Allocate("weights",
                               model->layout_.plane_elements * sizeof(bf16),
                               device::Memory::kDevice));
  SDP_RETURN_IF_ERROR(
      ReadWeights(source, model->layout_, model->weights_.as<bf16>()));

  // One sequence in one layer: a training plan's layer buffers, and two hidden
  // states.
  policy::Problem problem;
  problem.config = model->config_;
  problem.sequence_length = max_tokens;
  problem.batch_size = problem.micro_batch_size = 1;
  SDP_ASSIGN_OR_RETURN(const policy::Plan plan, policy::MakePlan(problem));
  model->head_chunk_tokens_ = plan.head_chunk_tokens;
  std::vector<policy::NamedBytes> list =
      policy::DeviceBuffers(model->config_, model->layout_, plan);
  std::erase_if(list, [](const policy::NamedBytes& item) {
    return !absl::StartsWith(item.name, "layer.") &&
           item.name != "head.logits" && item.name != "rope" &&
           item.name != "scalars";
  });
  const uint64_t hidden_bytes =
      max_tokens * model->config_.hidden * model->ops_->act_bytes();
  list.push_back({"hidden.0", hidden_bytes});
  list.push_back({"hidden.1", hidden_bytes});
  list.push_back({"ids", max_tokens * sizeof(int32_t)});
  SDP_ASSIGN_OR_RETURN(model->buffers_,
                       step::Buffers::Allocate(*model->device_, list));
  SDP_ASSIGN_OR_RETURN(model->stream_, model->device_->NewStream("compute"));
  const std::vector<float> frequencies =
      model::RopeInverseFrequencies(model->config_);
  SDP_RETURN_IF_ERROR(model->device_->Copy(
      model->buffers_.get<void>("rope"), frequencies.data(),
      frequencies.size() * sizeof(float), *model->stream_));
  SDP_RETURN_IF_ERROR(model->device_->Synchronize(*model->stream_));
  return model;
}

absl::StatusOr<void*> Model::Forward(const std::vector<int32_t>& ids) {
  const int64_t tokens = static_cast<int64_t>(ids.size());
  if (tokens < 1 || tokens > max_tokens_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a sequence of ", tokens, " tokens; at least 1 and at most ",
        max_tokens_, " are possible"));
  }
  for (int32_t id : ids) {
    if (id < 0 || id >= config_.vocab) {
      return absl::InvalidArgumentError(absl::StrCat(
          "token id ", id, " is outside the vocabulary of ", config_.vocab));
    }
  }
  std::array<void*, 2> hidden = {buffers_.get<void>("hidden.0"),
                                 buffers_.get<void>("hidden.1")};
  int32_t* device_ids = buffers_.get<int32_t>("ids");
  SDP_RETURN_IF_ERROR(device_->Copy(device_ids, ids.data(),
                                    ids.size() * sizeof(int32_t), *stream_));
  const step::UnitWeights embedding(layout_.units[0], unit_data(0), nullptr);
  SDP_RETURN_IF_ERROR(ops_->EmbeddingForward(
      device_ids, embedding.w(Role::kEmbedding), tokens, config_.hidden,
      config_.vocab, hidden[0], *stream_));
  policy::Plan one;  // sequence, of which no layer keeps anything
  one.sequence_length = tokens;
  one.micro_batch_size = one.micro_batches = 1;
  step::Decoder decoder(*ops_, config_, one, /*activations=*/nullptr, buffers_);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const int unit = layout_.decoder_unit(layer);
    const step::UnitWeights weights(layout_.units[unit], unit_data(unit),
                                    nullptr);
    SDP_RETURN_IF_ERROR(decoder.Forward(layer, 0, weights, hidden[layer % 2],
                                        hidden[(layer + 1) % 2], *stream_));
  }
  return hidden[config_.layers % 2];
}

absl::Status Model::RunHead(void* hidden, int64_t rows, const int32_t* labels,
                            double* loss_sum,
                            const step::Head::OnLogits& on_logits) {
  const int unit = layout_.head_unit();
  const step::UnitWeights weights(layout_.units[unit], unit_data(unit),
                                  nullptr);
  step::Head head(*ops_, config_, rows, head_chunk_tokens_, buffers_);
  const Role table = layout_.tied() ? Role::kEmbedding : Role::kHead;
  return head.Run(
      {weights.w(Role::kFinalNorm), weights.w(table), nullptr, nullptr}, hidden,
      labels, 0.0f, loss_sum, nullptr, on_logits, *stream_);
}

absl::StatusOr<double> Model::LossSum(const std::vector<int32_t>& ids,
                                      const std::vector<int32_t>& labels) {
  SDP_ASSIGN_OR_RETURN(void* hidden, Forward(ids));
  double* loss_sum = buffers_.get<double>("scalars");
  SDP_RETURN_IF_ERROR(device_->FillZero(loss_sum, sizeof(double), *stream_));
  SDP_RETURN_IF_ERROR(RunHead(hidden, static_cast<int64_t>(ids.size()),
                              labels.data(), loss_sum, nullptr));
  SDP_RETURN_IF_ERROR(device_->Synchronize(*stream_));
  return *loss_sum;
}

absl::StatusOr<int32_t> Model::NextToken(const std::vector<int32_t>& ids) {
  SDP_ASSIGN_OR_RETURN(void* hidden, Forward(ids));
  void* last = static_cast<char*>(hidden) +
               (ids.size() - 1) * config_.hidden * ops_->act_bytes();
  const int32_t no_label = -1;
  int32_t best = 0;
  SDP_RETURN_IF_ERROR(RunHead(
      last, 1, &no_label, buffers_.get<double>("scalars"),
      [&best, this](int64_t, int64_t, const void* data) {
        return device::EnqueueOnCpu(*stream_, [&best, this, data] {
          const auto* logits = static_cast<const float*>(data);
          best = static_cast<int32_t>(
              std::max_element(logits, logits + config_.vocab) - logits);
          return absl::OkStatus();
        });
      }));
  SDP_RETURN_IF_ERROR(device_->Synchronize(*stream_));
  return best;
}

}  // namespace slidedp::infer
