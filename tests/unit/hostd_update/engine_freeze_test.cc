// The engine beside tensors and units that are not trained.
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/hostd_update/expect_reference.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::Values;

class EngineFreezeTest
    : public ::testing::TestWithParam<
          std::tuple<policy::GradRoute, policy::UpdateMode>> {
 protected:
  JobOptions Options() const {
    JobOptions options;
    options.ranks = 2;
    std::tie(options.route, options.mode) = GetParam();
    options.used_rows_percent = 50;
    return options;
  }
};

// Whole units, parts of units, all but the head.
TEST_P(EngineFreezeTest, FrozenTensorsAreLeftAlone) {
  const std::vector<std::string> sets[] = {
      {"model.embed_tokens.*"},
      {"model.layers.0.*"},
      {"*norm*", "*mlp*", "lm_head.weight"},
      {"model.layers.*", "model.embed_tokens.*"}};
  for (const std::vector<std::string>& freeze : sets) {
    SCOPED_TRACE(freeze[0]);
    JobOptions options = Options();
    options.rules.freeze = freeze;
    ExpectReference(options);
  }
}

TEST_P(EngineFreezeTest, ATiedTableBesideItsNorm) {
  JobOptions options = Options();
  options.tied = true;
  options.rules.freeze = {"model.embed_tokens.*", "model.layers.1.*"};
  ExpectReference(options);
}

std::string Name(
    const ::testing::TestParamInfo<EngineFreezeTest::ParamType>& info) {
  const auto& [route, mode] = info.param;
  return absl::StrCat(policy::Name(route), "_", policy::Name(mode));
}

INSTANTIATE_TEST_SUITE_P(
    All, EngineFreezeTest,
    Combine(Values(policy::GradRoute::kGpuRoot, policy::GradRoute::kGpuSharded,
                   policy::GradRoute::kCpu),
            Values(policy::UpdateMode::kEager, policy::UpdateMode::kDeferred)),
    Name);

TEST(EngineSkipTest, FrozenUnitsPassThroughSkippedSteps) {
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kDeferred, policy::UpdateMode::kSpeculative}) {
    JobOptions options;
    options.ranks = 2;
    options.mode = mode;
    options.route = policy::GradRoute::kCpu;
    options.rules.freeze = {"model.layers.1.*"};
    Job job(options);
    job.script[1].gradients[1][0][3] = 0x7fc0;
    job.script[2].valid_tokens = 0;
    const Outcome outcome = RunJob(job);
    EXPECT_THAT(outcome.failures, IsEmpty());
    ASSERT_THAT(outcome.results, SizeIs(options.steps));
    EXPECT_TRUE(outcome.results[1].not_finite);
    EXPECT_THAT(outcome.results[1].skip_reason, HasSubstr("(rank 1)"));
    EXPECT_TRUE(outcome.results[2].skipped);
    EXPECT_FALSE(outcome.results[2].not_finite);
    EXPECT_FALSE(outcome.results[3].skipped);
  }
}

}  // namespace
}  // namespace slidedp::hostd
