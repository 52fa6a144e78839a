// Where activations wait changes memory and time, never a bit.
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

using policy::Bit;
using policy::kKeepAll;
using policy::Segment;

class OffloadTest : public TrainerTest {
 protected:
  // Three micro-batches a rank and step, the last with an empty place.
  LocalJobOptions OffloadOptions(bool tied) {
    LocalJobOptions options = Options(tied);
    options.steps = 2;
    options.problem.batch_size = 5;
    options.problem.micro_batch_size = 2;
    return options;
  }
  void ExpectSame(const LocalJobOptions& options,
                  const LocalJobResult& reference) {
    SCOPED_TRACE(absl::StrCat(
        "offload ", absl::StrJoin(options.problem.offload_permille, " "),
        ", slots ", options.problem.stage_slots));
    ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
    ExpectSameBits(reference, result);
  }
};

TEST_F(OffloadTest, AnyShareOfAnyLayerGivesTheSameBits) {
  std::mt19937 random(2);
  for (const bool tied : {false, true}) {
    LocalJobOptions options = OffloadOptions(tied);
    ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(options));
    for (const std::vector<uint8_t>& keep : std::vector<std::vector<uint8_t>>{
             {0}, {kKeepAll}, {0, 127, Bit(Segment::kAttention)}}) {
      options.problem.keep = keep;
      for (const std::vector<uint16_t>& share :
           std::vector<std::vector<uint16_t>>{
               {1000}, {300}, {0, 1000, 0}, {1000, 0, 1}, {0, 0, 999}}) {
        options.problem.offload_permille = share;
        options.problem.stage_slots = static_cast<int>(1 + random() % 3);
        ExpectSame(options, reference);
      }
    }
  }
}

TEST_F(OffloadTest, AnyNumberOfMicroBatchesAndSlotsGivesTheSameBits) {
  std::mt19937 random(3);
  for (const int batch : {1, 2, 7}) {
    LocalJobOptions options = Options(true);
    options.steps = 3;
    options.problem.batch_size = batch;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(options));
    for (const int slots : {1, 2, 9}) {
      options.problem.stage_slots = slots;
      options.problem.offload_permille.clear();
      for (int l = 0; l < 3; ++l) {
        options.problem.offload_permille.push_back(
            static_cast<uint16_t>(random() % 1001));
      }
      options.problem.keep = {kKeepAll, static_cast<uint8_t>(random() % 128),
                              Bit(Segment::kGateUp)};
      ExpectSame(options, reference);
    }
  }
}

TEST_F(OffloadTest, RanksRoutesAndRehearsalsKeepTheirBits) {
  for (const auto route :
       {policy::GradRoute::kGpuSharded, policy::GradRoute::kCpu}) {
    LocalJobOptions options = OffloadOptions(false);
    options.problem.ranks = 2;
    options.problem.grads = route;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(options));
    options.problem.keep = {Bit(Segment::kAttention), 0, kKeepAll};
    options.problem.offload_permille = {1000, 500, 700};
    options.rehearse = true;
    ExpectSame(options, reference);
  }
}

}  // namespace
}  // namespace slidedp::step
