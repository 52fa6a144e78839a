#include "worker/data/step_batch.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "common/base/check.h"

namespace slidedp::data {
namespace {

// From one micro-batch's offsets, which end with its tokens.
void FillFirstRows(const std::vector<int32_t>& offsets, int32_t* first_rows) {
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    std::fill(first_rows + offsets[d], first_rows + offsets[d + 1], offsets[d]);
  }
}

// The sequences of a rank's places [0, n) as they lie in its micro-batches.
using PlaceAt = std::function<std::optional<Mixture::Place>(int64_t n)>;

void FillPlaces(const BatchShape& shape, int64_t length, const PlaceAt& at,
                StepBatch& batch) {
  const int64_t places = shape.micro_batches * shape.micro_batch_size;
  const bool packed = shape.documents_per_sequence > 0;
  batch.ids.resize(places * length);
  batch.labels.resize(places * length);
  batch.first_rows.resize(packed ? places * length : 0);
  batch.offsets.clear();
  for (int64_t mb = 0; mb < shape.micro_batches; ++mb) {
    std::vector<int32_t> offsets;
    for (int64_t i = 0; i < shape.micro_batch_size; ++i) {
      const int64_t n = mb * shape.micro_batch_size + i;
      const auto row = static_cast<int32_t>(i * length);
      int32_t* ids = batch.ids.data() + n * length;
      int32_t* labels = batch.labels.data() + n * length;
      if (const auto here = at(n)) {
        here->dataset.Fill(here->sequence, ids, labels);
        if (packed) {
          here->dataset.AppendDocuments(here->sequence, row, offsets);
        }
      } else {
        std::fill(ids, ids + length, 0);
        std::fill(labels, labels + length, -1);
        offsets.push_back(row);
      }
    }
    if (!packed) continue;
    const size_t room = shape.micro_batch_size * shape.documents_per_sequence;
    SDP_CHECK(offsets.size() <= room, "more documents than the plan has room");
    offsets.resize(room + 1,
                   static_cast<int32_t>(shape.micro_batch_size * length));
    FillFirstRows(offsets, batch.first_rows.data() +
                               mb * shape.micro_batch_size * length);
    batch.offsets.insert(batch.offsets.end(), offsets.begin(), offsets.end());
  }
}

}  // namespace

void FillStepBatch(const Mixture& data, const BatchShape& shape, int rank,
                   uint64_t step, StepBatch& batch) {
  const int64_t places = shape.micro_batches * shape.micro_batch_size;
  SDP_CHECK(rank >= 0 && rank < shape.ranks && places > 0 &&
                shape.batch_size > 0 &&
                places * shape.ranks >= shape.batch_size,
            "the ranks' micro-batches do not hold the batch");
  const int64_t length = data.sequence_length();
  const uint64_t first = step * shape.batch_size;
  // Places of the step that have a sequence.
  const int64_t filled =
      first >= shape.end_position
          ? 0
          : std::min<uint64_t>(shape.batch_size, shape.end_position - first);
  const auto at = [&](int64_t place) -> std::optional<Mixture::Place> {
    if (place >= filled) return std::nullopt;
    return data.At(first + place);
  };

  batch.valid_tokens = 0;
  for (int64_t place = 0; place < filled; ++place) {
    const Mixture::Place here = data.At(first + place);
    batch.valid_tokens += here.dataset.LabelCount(here.sequence);
  }
  FillPlaces(
      shape, length, [&](int64_t n) { return at(rank * places + n); }, batch);
}

void FillEvalBatch(const Dataset& dataset, uint64_t sequences,
                   const BatchShape& shape, int rank, uint64_t round,
                   StepBatch& batch) {
  const int64_t places = shape.micro_batches * shape.micro_batch_size;
  SDP_CHECK(rank >= 0 && rank < shape.ranks && places > 0 &&
                sequences <= dataset.sequences(),
            "an evaluation of other sequences than the data set's");
  batch.valid_tokens = 0;
  const uint64_t first = (round * shape.ranks + rank) * places;
  for (uint64_t sequence = first;
       sequence < std::min<uint64_t>(first + places, sequences); ++sequence) {
    batch.valid_tokens += dataset.LabelCount(sequence);
  }
  FillPlaces(
      shape, dataset.sequence_length(),
      [&](int64_t n) -> std::optional<Mixture::Place> {
        if (first + n >= sequences) return std::nullopt;
        return Mixture::Place{dataset, first + n};
      },
      batch);
}

}  // namespace slidedp::data
