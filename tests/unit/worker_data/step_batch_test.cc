#include <set>

#include "tests/unit/worker_data/dataset_fixture.h"

namespace slidedp::data {
namespace {

constexpr int64_t kLength = 4;
constexpr uint64_t kSequences = 7;

class StepBatchTest : public DatasetTest {
 protected:
  // Sequence i has labels only in its first i positions.
  StepBatchTest()
      : dataset_(MakeDataset()), sampler_(dataset_.sequences(), 3) {}

  Dataset MakeDataset() {
    RawDataset raw = CountingStream(kSequences * kLength);
    for (uint64_t i = 0; i < kSequences; ++i) {
      for (uint64_t t = i + 1; t < kLength; ++t) {
        raw.tensors[1].bytes[i * kLength + t] = 0;
      }
    }
    return Open(raw.Encode(), kLength).value();
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
      FillStepBatch(dataset_, sampler_, shape, rank, step, batch);
      const int64_t places = shape.micro_batches * shape.micro_batch_size;
      EXPECT_EQ(batch.ids.size(), places * kLength);
      EXPECT_EQ(batch.labels.size(), places * kLength);
      for (int64_t i = 0; i < places; ++i) {
        const auto at = i * kLength;
        Row row{
            {batch.ids.begin() + at, batch.ids.begin() + at + kLength},
            {batch.labels.begin() + at, batch.labels.begin() + at + kLength}};
        for (const int32_t label : row.second) labels += label >= 0;
        if (row.first == std::vector<int32_t>(kLength, 0)) {
          EXPECT_EQ(row.second, std::vector<int32_t>(kLength, -1));
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

  Dataset dataset_;
  Sampler sampler_;
};

TEST_F(StepBatchTest, RanksAndMicroBatchesCutOneAndTheSameBatch) {
  for (uint64_t step = 0; step < 6; ++step) {
    std::multiset<Row> want;
    uint64_t want_tokens = 0;
    for (uint64_t p = step * 5; p < step * 5 + 5; ++p) {
      Row row{std::vector<int32_t>(kLength), std::vector<int32_t>(kLength)};
      dataset_.Fill(sampler_.At(p), row.first.data(), row.second.data());
      want_tokens += dataset_.LabelCount(sampler_.At(p));
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
    FillStepBatch(dataset_, sampler_, shape, rank, 2, batches[rank]);
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
  EXPECT_EQ(total, 2 * dataset_.valid_tokens());
  EXPECT_TRUE(Rows(shape, 4, &padding, &tokens).empty());
  EXPECT_EQ(padding, 4);
  EXPECT_EQ(tokens, 0u);
}

TEST_F(StepBatchTest, BatchMayBeLargerThanTheDataset) {
  const BatchShape shape = Shape(2, 2 * kSequences, 3);
  int padding;
  uint64_t tokens;
  EXPECT_EQ(Rows(shape, 1, &padding, &tokens).size(), 2 * kSequences);
  EXPECT_EQ(tokens, 2 * dataset_.valid_tokens());
  EXPECT_EQ(padding, 4);
}

TEST_F(StepBatchTest, ABatchObjectIsReusedWhole) {
  StepBatch batch;
  FillStepBatch(dataset_, sampler_, Shape(1, 3, 1), 0, 0, batch);
  StepBatch fresh;
  const BatchShape shape = Shape(2, 3, 1);
  FillStepBatch(dataset_, sampler_, shape, 1, 1, batch);
  FillStepBatch(dataset_, sampler_, shape, 1, 1, fresh);
  EXPECT_EQ(batch.ids, fresh.ids);
  EXPECT_EQ(batch.labels, fresh.labels);
  EXPECT_EQ(batch.valid_tokens, fresh.valid_tokens);
}

TEST(EpochPositionsTest, RoundsUpButNotByARoundingError) {
  EXPECT_EQ(EpochPositions(1, 7), 7u);
  EXPECT_EQ(EpochPositions(0.1, 30), 3u);  // 0.1 * 30 > 3 in float64
  EXPECT_EQ(EpochPositions(0.5, 7), 4u);
  EXPECT_EQ(EpochPositions(3, 1000000007), 3000000021u);
}

}  // namespace
}  // namespace slidedp::data
