#include "policy/gpu_memory.h"

#include "common/base/units.h"
#include "common/collective/exchange.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::policy {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Problem OnGpus(int ranks) {
  Problem problem;
  problem.config = testing::TinyConfig({});
  problem.device = DeviceKind::kCuda;
  problem.ranks = ranks;
  problem.sequence_length = 64;
  problem.batch_size = 8;
  problem.micro_batch_size = 2;
  return problem;
}

uint64_t Allowance(const Problem& problem) {
  uint64_t sum = 0;
  for (const NamedBytes& part : GpuAllowance(problem)) sum += part.bytes;
  return sum;
}

TEST(GpuMemoryTest, BuffersGetWhatTheAllowanceLeaves) {
  for (int ranks : {1, 2}) {
    const Problem problem = OnGpus(ranks);
    ASSERT_OK_AND_ASSIGN(uint64_t bytes, GpuBufferBytes(problem, 24 * kGiB));
    EXPECT_EQ(bytes, 24 * kGiB - Allowance(problem));
  }
  // One rank has no communicator, and nobody to exchange with.
  EXPECT_EQ(Allowance(OnGpus(2)) - Allowance(OnGpus(1)),
            kCommunicators * kGpuCommunicatorBytes +
                collective::kParamStagingBytes + collective::kGradStagingBytes);
}

TEST(GpuMemoryTest, ALimitCountsLikeASmallerGpu) {
  Problem problem = OnGpus(1);
  ASSERT_OK_AND_ASSIGN(uint64_t small, GpuBufferBytes(problem, 24 * kGiB));
  problem.gpu_memory_limit_bytes = 24 * kGiB;
  EXPECT_THAT(GpuBufferBytes(problem, 80 * kGiB), testing::IsOkAndHolds(small));
  // A limit above the GPU is none.
  EXPECT_THAT(GpuBufferBytes(problem, 20 * kGiB),
              testing::IsOkAndHolds(small - 4 * kGiB));
}

TEST(GpuMemoryTest, PackedAttentionTakesMoreWorkspace) {
  Problem problem = OnGpus(1);
  const uint64_t before = Allowance(problem);
  problem.documents_per_sequence = 3;
  // 4 query heads for 2 of keys: rows of queries, and twice two of the others.
  const uint64_t tokens = 2 * 64;
  const model::ModelConfig& config = problem.config;
  EXPECT_EQ(Allowance(problem) - before,
            tokens * (4 * (5 * config.qkv_dim() + 2 * config.heads) -
                      8 * config.q_dim()));
}

TEST(GpuMemoryTest, WorkspaceGrowsWithWhatIsComputedAtOnce) {
  Problem problem = OnGpus(1);
  const uint64_t before = Allowance(problem);
  problem.micro_batch_size *= 2;
  const uint64_t tokens = 2 * 64;
  EXPECT_EQ(Allowance(problem) - before, 8 * tokens * problem.config.q_dim());
  problem.float32 = true;
  EXPECT_GT(Allowance(problem),
            before + 4 * problem.config.vocab * problem.config.hidden);
}

TEST(GpuMemoryTest, NothingLeftNamesWhatToChange) {
  Problem problem = OnGpus(1);
  EXPECT_THAT(GpuBufferBytes(problem, kGiB),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("a GPU of 1.00 GiB"),
                             Not(HasSubstr("gpu_memory_limit")))));
  problem.gpu_memory_limit_bytes = kGiB;
  EXPECT_THAT(GpuBufferBytes(problem, 80 * kGiB),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tuning.gpu_memory_limit_gib = 1.00 GiB")));
}

TEST(GpuMemoryTest, PinnedMemoryIsNotTheGpus) {
  const std::vector<NamedBytes> buffers = {
      {"inputs", 3 * kGiB}, {"pinned.tokens", 50 * kGiB}, {"rope", kGiB}};
  EXPECT_EQ(GpuBytes(buffers), 4 * kGiB);
}

}  // namespace
}  // namespace slidedp::policy
