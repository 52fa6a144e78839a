#include <algorithm>

#include "common/base/check.h"
#include "worker/data/dataset.h"

namespace slidedp::data {

void FillStepBatch(const Dataset& dataset, const Sampler& sampler,
                   const BatchShape& shape, int rank, uint64_t step,
                   StepBatch& batch) {
  const int64_t places = shape.micro_batches * shape.micro_batch_size;
  SDP_CHECK(rank >= 0 && rank < shape.ranks && places > 0 &&
                shape.batch_size > 0 &&
                places * shape.ranks >= shape.batch_size,
            "the ranks' micro-batches do not hold the batch");
  const int64_t length = dataset.sequence_length();
  const uint64_t first = step * shape.batch_size;
  // Places of the step that have a sequence.
  const int64_t filled =
      first >= shape.end_position
          ? 0
          : std::min<uint64_t>(shape.batch_size, shape.end_position - first);

  batch.valid_tokens = 0;
  for (int64_t place = 0; place < filled; ++place) {
    batch.valid_tokens += dataset.LabelCount(sampler.At(first + place));
  }
  batch.ids.resize(places * length);
  batch.labels.resize(places * length);
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = rank * places + i;
    int32_t* ids = batch.ids.data() + i * length;
    int32_t* labels = batch.labels.data() + i * length;
    if (place < filled) {
      dataset.Fill(sampler.At(first + place), ids, labels);
    } else {
      std::fill(ids, ids + length, 0);
      std::fill(labels, labels + length, -1);
    }
  }
}

void FillEvalBatch(const Dataset& dataset, uint64_t sequences,
                   const BatchShape& shape, int rank, uint64_t round,
                   StepBatch& batch) {
  const int64_t places = shape.micro_batches * shape.micro_batch_size;
  const int64_t length = dataset.sequence_length();
  SDP_CHECK(rank >= 0 && rank < shape.ranks && places > 0 &&
                sequences <= dataset.sequences(),
            "an evaluation of other sequences than the data set's");
  batch.valid_tokens = 0;
  batch.ids.assign(places * length, 0);
  batch.labels.assign(places * length, -1);
  const uint64_t first = (round * shape.ranks + rank) * places;
  for (uint64_t sequence = first;
       sequence < std::min<uint64_t>(first + places, sequences); ++sequence) {
    const uint64_t at = (sequence - first) * length;
    dataset.Fill(sequence, batch.ids.data() + at, batch.labels.data() + at);
    batch.valid_tokens += dataset.LabelCount(sequence);
  }
}

}  // namespace slidedp::data
