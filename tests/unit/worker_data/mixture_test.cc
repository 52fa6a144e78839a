#include "worker/data/mixture.h"

#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/unit/worker_data/dataset_fixture.h"
#include "worker/data/step_batch.h"

namespace slidedp::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class MixtureTest : public DatasetTest {
 protected:
  // Streams of so many sequences of 4 tokens.
  absl::StatusOr<Mixture> Mix(const std::vector<int64_t>& sequences,
                              const std::vector<double>& weights,
                              uint64_t seed = 1) {
    std::vector<Dataset> datasets;
    for (const int64_t n : sequences) {
      datasets.push_back(Open(CountingStream(4 * n).Encode(), 4).value());
    }
    return Mixture::Create(std::move(datasets), weights, seed);
  }

  static std::pair<size_t, uint64_t> At(const Mixture& mixture,
                                        uint64_t position) {
    const Mixture::Place place = mixture.At(position);
    return {&place.dataset - mixture.datasets().data(), place.sequence};
  }
};

TEST_F(MixtureTest, JoinedDataSetsHaveEverySequenceOnceAnEpoch) {
  const Mixture mixture = Mix({5, 1, 30}, {}).value();
  ASSERT_EQ(mixture.sequences(), 36u);
  EXPECT_FALSE(mixture.weighted());
  std::set<std::vector<std::pair<size_t, uint64_t>>> orders;
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<std::pair<size_t, uint64_t>> seen;
    std::vector<std::pair<size_t, uint64_t>> order;
    for (uint64_t p = 0; p < 36; ++p) {
      order.push_back(At(mixture, 36 * epoch + p));
      EXPECT_TRUE(seen.insert(order.back()).second);
      EXPECT_LT(order.back().second,
                mixture.datasets()[order.back().first].sequences());
    }
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3u);
}

TEST_F(MixtureTest, ASingleDataSetIsReadInTheSamplersOrder) {
  const Mixture mixture = Mix({17}, {}, 9).value();
  const Sampler sampler(17, 9);
  for (uint64_t p = 0; p < 50; ++p) {
    EXPECT_EQ(At(mixture, p).second, sampler.At(p));
  }
}

TEST_F(MixtureTest, EveryWindowHasExactlyTheWeightsShares) {
  const Mixture mixture = Mix({5, 7, 3}, {0.5, 0.2, 0.3}).value();
  ASSERT_EQ(mixture.window(), 10u);
  for (uint64_t begin = 0; begin < 40; ++begin) {
    std::map<size_t, int> count;
    for (uint64_t p = begin; p < begin + 10; ++p) ++count[At(mixture, p).first];
    EXPECT_EQ(count[0], 5) << begin;
    EXPECT_EQ(count[1], 2) << begin;
    EXPECT_EQ(count[2], 3) << begin;
  }
}

TEST_F(MixtureTest, SharesAreSpreadEvenly) {
  const Mixture mixture = Mix({5, 7, 3}, {0.61, 0.26, 0.13}).value();
  ASSERT_EQ(mixture.window(), 100u);
  std::vector<double> count(3, 0);
  for (uint64_t p = 0; p < 200; ++p) {
    ++count[At(mixture, p).first];
    for (size_t i = 0; i < 3; ++i) {
      const double due = static_cast<double>(p + 1) *
                         static_cast<double>(mixture.share(i)) / 100;
      EXPECT_LT(std::abs(count[i] - due), 1.0) << i << " at " << p;
    }
  }
}

TEST_F(MixtureTest, EachDataSetGoesThroughItselfAgainAndAgain) {
  const Mixture mixture = Mix({5, 7}, {3, 1}).value();
  std::vector<std::vector<uint64_t>> order(2);
  for (uint64_t p = 0; p < 400; ++p) {
    const auto [dataset, sequence] = At(mixture, p);
    order[dataset].push_back(sequence);
  }
  for (size_t i = 0; i < 2; ++i) {
    const uint64_t n = mixture.datasets()[i].sequences();
    for (size_t pass = 0; (pass + 1) * n <= order[i].size(); ++pass) {
      EXPECT_EQ(std::set<uint64_t>(order[i].begin() + pass * n,
                                   order[i].begin() + (pass + 1) * n)
                    .size(),
                n);
    }
  }
  EXPECT_EQ(mixture.sequences(), 12u);  // an epoch
}

TEST_F(MixtureTest, DataSetsOfOneSizeAreNotReadInStep) {
  const Mixture mixture = Mix({50, 50}, {1, 1}).value();
  std::vector<std::vector<uint64_t>> order(2);
  for (uint64_t p = 0; p < 100; ++p) {
    const auto [dataset, sequence] = At(mixture, p);
    order[dataset].push_back(sequence);
  }
  EXPECT_NE(order[0], order[1]);
}

TEST_F(MixtureTest, RanksReadOneAndTheSameGlobalBatch) {
  const Mixture mixture = Mix({5, 7, 3}, {0.5, 0.2, 0.3}).value();
  std::map<int, std::multiset<std::vector<int32_t>>> batches;
  for (const int ranks : {1, 2, 4}) {
    BatchShape shape;
    shape.ranks = ranks;
    shape.batch_size = 8;
    shape.micro_batch_size = 1;
    shape.micro_batches = 8 / ranks;
    for (uint64_t step = 3; step < 6; ++step) {
      for (int rank = 0; rank < ranks; ++rank) {
        StepBatch batch;
        FillStepBatch(mixture, shape, rank, step, batch);
        for (size_t at = 0; at < batch.ids.size(); at += 4) {
          batches[ranks].insert(
              {batch.ids.begin() + at, batch.ids.begin() + at + 4});
        }
      }
    }
  }
  EXPECT_EQ(batches[1].size(), 24u);
  EXPECT_EQ(batches[1], batches[2]);
  EXPECT_EQ(batches[1], batches[4]);
}

TEST_F(MixtureTest, PositionsOfTokensAreTheFewestThatHoldThem) {
  for (const bool weighted : {false, true}) {
    std::vector<Dataset> datasets;
    for (const int64_t tokens : {13, 40}) {
      std::vector<int64_t> offsets = {0, 1, 4, 9, tokens};
      datasets.push_back(
          Open(RawDataset(Counting(tokens), std::vector<uint8_t>(tokens, 1),
                          offsets, "documents")
                   .Encode(),
               6)
              .value());
    }
    const Mixture mixture =
        Mixture::Create(
            std::move(datasets),
            weighted ? std::vector<double>{1, 2} : std::vector<double>{}, 3)
            .value();
    uint64_t seen = 0;
    for (uint64_t p = 0; p < 60; ++p) {
      const Mixture::Place place = mixture.At(p);
      const uint64_t tokens = place.dataset.TokenCount(place.sequence);
      EXPECT_EQ(mixture.PositionsOfTokens(seen + 1), p + 1);
      EXPECT_EQ(mixture.PositionsOfTokens(seen + tokens), p + 1);
      seen += tokens;
    }
  }
}

TEST_F(MixtureTest, BadWeightsNameTheFile) {
  for (const double weight : {0.0, -1.0, 1e7, std::nan("")}) {
    const absl::Status status = Mix({3, 3}, {1, weight}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(path_), HasSubstr("weight")));
  }
  EXPECT_FALSE(Mix({3, 3}, {1}).ok());
}

TEST(WholeSharesTest, AreExactWhereTheRatioAllowsAndCloseElse) {
  EXPECT_THAT(WholeShares({0.7, 0.3}), ElementsAre(7, 3));
  EXPECT_THAT(WholeShares({1, 1, 2}), ElementsAre(1, 1, 2));
  EXPECT_THAT(WholeShares({5}), ElementsAre(1));
  EXPECT_THAT(WholeShares({0.125, 0.875}), ElementsAre(1, 7));
  // None is left out, however small.
  EXPECT_THAT(WholeShares({1e-6, 1e6}), ElementsAre(1, 65536));
  const std::vector<double> weights = {1.0 / 3, 0.123457, 0.7};
  const std::vector<uint32_t> shares = WholeShares(weights);
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(shares[i] / sum, weights[i] / (1.0 / 3 + 0.123457 + 0.7),
                1.0 / 65536);
  }
}

}  // namespace
}  // namespace slidedp::data
