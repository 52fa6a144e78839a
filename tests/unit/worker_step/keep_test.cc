// What layers keep changes memory and time, never a bit.
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

using policy::Bit;
using policy::kKeepAll;
using policy::Segment;

class KeepTest : public TrainerTest {
 protected:
  LocalJobOptions KeepOptions(bool tied) {
    LocalJobOptions options = Options(tied);
    options.steps = 2;
    // Three micro-batches a rank and step, the last with an empty place.
    options.problem.batch_size = 5;
    options.problem.micro_batch_size = 2;
    return options;
  }
};

TEST_F(KeepTest, AnyMixOverLayersGivesTheSameBits) {
  std::mt19937 random(1);
  const auto any = [&random] { return static_cast<uint8_t>(random() % 128); };
  std::vector<std::vector<uint8_t>> mixes = {
      {kKeepAll, kKeepAll, kKeepAll},
      {0, 0, kKeepAll},
      {kKeepAll, 0, 0},
      {0, kKeepAll, 127},
      {127, 127, 127},
  };
  for (int s = 0; s < policy::kSegments; ++s) {
    const uint8_t bit = Bit(static_cast<Segment>(s));
    mixes.push_back({bit, bit, bit});
  }
  for (int i = 0; i < 5; ++i) mixes.push_back({any(), any(), any()});
  for (const bool tied : {false, true}) {
    ASSERT_OK_AND_ASSIGN(const LocalJobResult reference,
                         RunLocalJob(KeepOptions(tied)));
    for (const std::vector<uint8_t>& mix : mixes) {
      SCOPED_TRACE(absl::StrCat(mix[0], " ", mix[1], " ", mix[2]));
      LocalJobOptions options = KeepOptions(tied);
      options.problem.keep = mix;
      ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
      ExpectSameBits(reference, result);
    }
  }
}

TEST_F(KeepTest, RanksAndRoutesKeepTheirBits) {
  for (const auto route :
       {policy::GradRoute::kGpuSharded, policy::GradRoute::kCpu}) {
    LocalJobOptions options = KeepOptions(false);
    options.problem.ranks = 2;
    options.problem.grads = route;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(options));
    options.problem.keep = {Bit(Segment::kAttention), 0, kKeepAll};
    ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
    ExpectSameBits(reference, result);
  }
}

// A rehearsal leaves nothing behind, on any number of ranks.
TEST_F(KeepTest, RehearsalChangesNoBit) {
  for (const int ranks : {1, 2}) {
    for (const bool tied : {false, true}) {
      LocalJobOptions options = KeepOptions(tied);
      options.problem.ranks = ranks;
      options.problem.keep = {0, Bit(Segment::kMiddle), kKeepAll};
      options.problem.head_chunk_tokens = 30;  // a smaller last chunk
      ASSERT_OK_AND_ASSIGN(const LocalJobResult reference,
                           RunLocalJob(options));
      options.rehearse = true;
      ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
      ExpectSameBits(reference, result);
    }
  }
}

}  // namespace
}  // namespace slidedp::step
