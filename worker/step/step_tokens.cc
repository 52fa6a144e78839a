// A step's tokens: this rank's part of the batch, on its way to the device, and
// what it tells the daemon beforehand.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "worker/step/trainer_impl.h"

namespace slidedp::step {

absl::Status TrainerImpl::CheckDocuments(const char* what,
                                         int64_t documents) const {
  const int64_t room = in_.plan->documents_per_sequence;
  if ((documents > 0) == (room > 0) && documents <= room) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has up to ", documents,
                   " documents a sequence, the plan ", room));
}

absl::StatusOr<TrainerImpl::StepTokens> TrainerImpl::BeginStep(uint64_t step) {
  if (in_.mixture == nullptr) {
    FillPseudoRandomBatch(step);
  } else {
    data::FillStepBatch(*in_.mixture, in_.batch, in_.rank, step, batch_);
  }
  if (hooks_.on_batch) hooks_.on_batch(step, batch_);
  if (!in_.compute_only) {
    shm::StepReport& report = reports_.step(in_.rank, step);
    report.valid_tokens = batch_.valid_tokens;
    report.begin_ns = MonotonicNs();
    ReportUsedRows(step);
    report.begun.value.store(step + 1, std::memory_order_release);
  }
  return UploadBatch(step);
}

absl::StatusOr<TrainerImpl::StepTokens> TrainerImpl::UploadBatch(
    uint64_t step) {
  SDP_ASSIGN_OR_RETURN(StepTokens tokens, UploadTokens(step));
  tokens.scale =
      batch_.valid_tokens == 0
          ? 0.0f
          : static_cast<float>(1.0 / static_cast<double>(batch_.valid_tokens));
  tokens.loss_sum = buffers_.get<double>("scalars") + step % 2;
  SDP_RETURN_IF_ERROR(
      in_.device->FillZero(tokens.loss_sum, sizeof(double), *compute_));
  return tokens;
}

absl::StatusOr<TrainerImpl::StepTokens> TrainerImpl::UploadTokens(
    uint64_t turn) {
  const uint64_t tokens =
      in_.plan->micro_batches * in_.plan->micro_batch_tokens();
  const uint64_t ints = in_.plan->batch_ints();
  SDP_CHECK(
      batch_.ids.size() == tokens && batch_.labels.size() == tokens &&
          2 * tokens + batch_.first_rows.size() + batch_.offsets.size() == ints,
      "a batch of another size than the plan's");
  const uint64_t parity = turn % 2;
  int32_t* host = buffers_.get<int32_t>("pinned.tokens") + parity * ints;
  int32_t* device = buffers_.get<int32_t>("tokens") + parity * ints;
  int32_t* at = host;
  for (const std::vector<int32_t>* part :
       {&batch_.ids, &batch_.labels, &batch_.first_rows, &batch_.offsets}) {
    at = std::copy(part->begin(), part->end(), at);
  }
  SDP_RETURN_IF_ERROR(
      in_.device->Copy(device, host, ints * sizeof(int32_t), *compute_));
  StepTokens result = {};
  result.ids = device;
  result.labels = device + tokens;
  const bool packed = in_.plan->documents_per_sequence > 0;
  result.first_rows = packed ? device + 2 * tokens : nullptr;
  result.offsets = packed ? device + 3 * tokens : nullptr;
  return result;
}

void TrainerImpl::ReportUsedRows(uint64_t step) {
  uint64_t* used = reports_.used_rows(in_.rank, step);
  std::fill_n(used, shm::RowWords(rows_), 0);
  if (rows_ == 0) return;
  for (int32_t id : batch_.ids) used[id / 64] |= uint64_t{1} << (id % 64);
}

void TrainerImpl::FillPseudoRandomBatch(uint64_t step) {
  const uint64_t tokens =
      in_.plan->micro_batches * in_.plan->micro_batch_tokens();
  batch_.ids.resize(tokens);
  batch_.labels.resize(tokens);
  batch_.valid_tokens = tokens * in_.plan->ranks;
  // SplitMix64 over (seed, step, rank, place).
  uint64_t state = in_.seed + (step * in_.plan->ranks + in_.rank) * tokens;
  const auto next = [&] {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int32_t>((z ^ (z >> 31)) %
                                static_cast<uint64_t>(in_.config->vocab));
  };
  for (uint64_t t = 0; t < tokens; ++t) {
    batch_.ids[t] = next();
    batch_.labels[t] = next();
  }
  OneDocumentPerSequence();
}

void TrainerImpl::OneDocumentPerSequence() {
  batch_.first_rows.clear();
  batch_.offsets.clear();
  if (in_.plan->documents_per_sequence == 0) return;
  const int64_t length = in_.plan->sequence_length;
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    const auto places = static_cast<int64_t>(batch_.offsets.size()) +
                        in_.plan->micro_batch_documents() + 1;
    for (int64_t s = 0; s < in_.plan->micro_batch_size; ++s) {
      const auto row = static_cast<int32_t>(s * length);
      batch_.offsets.push_back(row);
      batch_.first_rows.insert(batch_.first_rows.end(), length, row);
    }
    batch_.offsets.resize(places,
                          static_cast<int32_t>(in_.plan->micro_batch_tokens()));
  }
}

}  // namespace slidedp::step
