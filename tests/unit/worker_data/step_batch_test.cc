#include "worker/data/step_batch.h"

#include <set>

#include "tests/unit/worker_data/dataset_fixture.h"

namespace slidedp::data {
namespace {

constexpr int64_t kBatchLength = 4;
constexpr uint64_t kSequences = 7;

class StepBatchTest : public DatasetTest {
 protected:
  // Sequence i has labels only in its first i positions.
  StepBatchTest() : data_(Join(MakeDataset(), 3)) {}

  static Mixture Join(Dataset dataset, uint64_t seed) {
    std::vector<Dataset> datasets;
    datasets.push_back(std::move(dataset));
    return Mixture::Create(std::move(datasets), {}, seed).value();
  }

  Dataset MakeDataset() {
    RawDataset raw = CountingStream(kSequences * kBatchLength);
    for (uint64_t i = 0; i < kSequences; ++i) {
      for (uint64_t t = i + 1; t < kBatchLength; ++t) {
        raw.tensors[1].bytes[i * kBatchLength + t] = 0;
      }
    }
    return Open(raw.Encode(), kBatchLength).value();
  }

  static BatchShape Shape(int ranks, int64_t batch_size, int64_t micro_batch) {
    BatchShape shape;
    shape.ranks = ranks;
    shape.batch_size = batch_size;
    shape.micro_batch_size = micro_batch;
    const int64_t per_pass = ranks * micro_batch;
    shape.micro_batches = (batch_size + per_pass - 1) / per_pass;
    return shape;
  }

  using Row = std::pair<std::vector<int32_t>, std::vector<int32_t>>;

  // The sequences with weight of all ranks; counts the places without.
  std::multiset<Row> Rows(const BatchShape& shape, uint64_t step, int* padding,
                          uint64_t* valid_tokens) {
    std::multiset<Row> rows;
    *padding = 0;
    uint64_t labels = 0;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      StepBatch batch;
      FillStepBatch(data_, shape, rank, step, batch);
      const int64_t places = shape.micro_batches * shape.micro_batch_size;
      EXPECT_EQ(batch.ids.size(), places * kBatchLength);
      EXPECT_EQ(batch.labels.size(), places * kBatchLength);
      for (int64_t i = 0; i < places; ++i) {
        const auto at = i * kBatchLength;
        Row row{{batch.ids.begin() + at, batch.ids.begin() + at + kBatchLength},
                {batch.labels.begin() + at,
                 batch.labels.begin() + at + kBatchLength}};
        for (const int32_t label : row.second) labels += label >= 0;
        if (row.first == std::vector<int32_t>(kBatchLength, 0)) {
          EXPECT_EQ(row.second, std::vector<int32_t>(kBatchLength, -1));
          ++*padding;
        } else {
          rows.insert(row);
        }
      }
      *valid_tokens = batch.valid_tokens;
    }
    EXPECT_EQ(labels, *valid_tokens);
    return rows;
  }

  Mixture data_;
};

TEST_F(StepBatchTest, RanksAndMicroBatchesCutOneAndTheSameBatch) {
  for (uint64_t step = 0; step < 6; ++step) {
    std::multiset<Row> want;
    uint64_t want_tokens = 0;
    for (uint64_t p = step * 5; p < step * 5 + 5; ++p) {
      Row row{std::vector<int32_t>(kBatchLength),
              std::vector<int32_t>(kBatchLength)};
      const Mixture::Place place = data_.At(p);
      place.dataset.Fill(place.sequence, row.first.data(), row.second.data());
      want_tokens += place.dataset.LabelCount(place.sequence);
      want.insert(row);
    }
    for (const int ranks : {1, 2, 3}) {
      for (const int64_t micro_batch : {1, 2}) {
        const BatchShape shape = Shape(ranks, 5, micro_batch);
        int padding;
        uint64_t tokens;
        EXPECT_EQ(Rows(shape, step, &padding, &tokens), want)
            << ranks << " ranks, micro-batch " << micro_batch;
        EXPECT_EQ(tokens, want_tokens);
        EXPECT_EQ(padding, ranks * shape.micro_batches * micro_batch - 5);
      }
    }
  }
}

TEST_F(StepBatchTest, EveryRankCountsTheTokensOfAllRanks) {
  const BatchShape shape = Shape(3, 5, 1);
  StepBatch batches[3];
  for (int rank = 0; rank < 3; ++rank) {
    FillStepBatch(data_, shape, rank, 2, batches[rank]);
  }
  EXPECT_EQ(batches[0].valid_tokens, batches[1].valid_tokens);
  EXPECT_EQ(batches[0].valid_tokens, batches[2].valid_tokens);
}

TEST_F(StepBatchTest, PlacesBeyondTheLastEpochHaveNoWeight) {
  BatchShape shape = Shape(2, 4, 1);
  shape.end_position = 2 * kSequences;  // 14: step 3 has 2 sequences left
  std::multiset<Row> all;
  int padding;
  uint64_t tokens, total = 0;
  for (uint64_t step = 0; step < 4; ++step) {
    for (const Row& row : Rows(shape, step, &padding, &tokens)) all.insert(row);
    total += tokens;
    EXPECT_EQ(padding, step == 3 ? 2 : 0);
  }
  EXPECT_EQ(all.size(), 2 * kSequences);
  EXPECT_EQ(total, 2 * data_.valid_tokens());
  EXPECT_TRUE(Rows(shape, 4, &padding, &tokens).empty());
  EXPECT_EQ(padding, 4);
  EXPECT_EQ(tokens, 0u);
}

TEST_F(StepBatchTest, BatchMayBeLargerThanTheDataset) {
  const BatchShape shape = Shape(2, 2 * kSequences, 3);
  int padding;
  uint64_t tokens;
  EXPECT_EQ(Rows(shape, 1, &padding, &tokens).size(), 2 * kSequences);
  EXPECT_EQ(tokens, 2 * data_.valid_tokens());
  EXPECT_EQ(padding, 4);
}

TEST_F(StepBatchTest, ABatchObjectIsReusedWhole) {
  StepBatch batch;
  FillStepBatch(data_, Shape(1, 3, 1), 0, 0, batch);
  StepBatch fresh;
  const BatchShape shape = Shape(2, 3, 1);
  FillStepBatch(data_, shape, 1, 1, batch);
  FillStepBatch(data_, shape, 1, 1, fresh);
  EXPECT_EQ(batch.ids, fresh.ids);
  EXPECT_EQ(batch.labels, fresh.labels);
  EXPECT_EQ(batch.valid_tokens, fresh.valid_tokens);
}

TEST_F(StepBatchTest, PackedMicroBatchesSayWhereTheirDocumentsLie) {
  // Of 4 positions: {2, 2}, {4}, {3, 1}, {1} and padding.
  std::vector<int32_t> ids = Counting(14);
  ids.erase(ids.begin());  // 0 is padding here
  const RawDataset raw(ids, std::vector<uint8_t>(13, 1),
                       {0, 2, 6, 8, 9, 12, 13}, "documents");
  SequenceOptions options;
  options.packing = true;
  auto dataset = Open(raw.Encode(), kBatchLength, 1000, options);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  const Mixture data = Join(*std::move(dataset), 1);
  ASSERT_EQ(data.sequences(), 4u);
  ASSERT_EQ(data.documents_per_sequence(), 2);
  for (const int ranks : {1, 2}) {
    BatchShape shape = Shape(ranks, 4, 3);
    shape.end_position = 7;  // step 1 ends with a place without a sequence
    shape.documents_per_sequence = 2;
    for (uint64_t step = 0; step < 2; ++step) {
      std::multiset<std::vector<int32_t>> documents;
      for (int rank = 0; rank < ranks; ++rank) {
        StepBatch batch;
        FillStepBatch(data, shape, rank, step, batch);
        const int64_t rows = 3 * kBatchLength;
        ASSERT_EQ(batch.first_rows.size(), shape.micro_batches * rows);
        ASSERT_EQ(batch.offsets.size(), shape.micro_batches * (3 * 2 + 1));
        for (int64_t mb = 0; mb < shape.micro_batches; ++mb) {
          const int32_t* offsets = batch.offsets.data() + mb * 7;
          const int32_t* first_rows = batch.first_rows.data() + mb * rows;
          EXPECT_EQ(offsets[0], 0);
          EXPECT_EQ(offsets[6], rows);
          for (int d = 0; offsets[d] < rows; ++d) {
            // No document crosses sequences; positions restart in each.
            EXPECT_EQ(offsets[d] / kBatchLength,
                      (offsets[d + 1] - 1) / kBatchLength);
            std::vector<int32_t> document(
                batch.ids.begin() + mb * rows + offsets[d],
                batch.ids.begin() + mb * rows + offsets[d + 1]);
            const bool padding = document[0] == 0;
            for (int32_t row = offsets[d]; row < offsets[d + 1]; ++row) {
              EXPECT_EQ(first_rows[row], offsets[d]);
              // The last token's label would be in the next document.
              const bool label = !padding && row + 1 < offsets[d + 1];
              EXPECT_EQ(batch.labels[mb * rows + row],
                        label ? batch.ids[mb * rows + row + 1] : -1);
            }
            documents.insert(document);
          }
        }
      }
      if (step > 0) continue;
      for (const std::vector<int32_t>& whole :
           std::vector<std::vector<int32_t>>{
               {1, 2}, {3, 4, 5, 6}, {7, 8}, {9}, {10, 11, 12}, {13}}) {
        EXPECT_EQ(documents.count(whole), 1u) << whole[0];
      }
    }
  }
}

TEST(EpochPositionsTest, RoundsUpButNotByARoundingError) {
  EXPECT_EQ(EpochPositions(1, 7), 7u);
  EXPECT_EQ(EpochPositions(0.1, 30), 3u);  // 0.1 * 30 > 3 in float64
  EXPECT_EQ(EpochPositions(0.5, 7), 4u);
  EXPECT_EQ(EpochPositions(3, 1000000007), 3000000021u);
}

}  // namespace
}  // namespace slidedp::data
