// Of an untied embedding's gradient only used rows go down: the end is as if
// all did.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "tests/unit/worker_step/counting_ops.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

// All rows go down, as if a copy engine had done it.
class AllRows : public CountingOps {
 public:
  using CountingOps::CountingOps;
  absl::Status CopyUsedRows(const ops::UsedRows&, int64_t, int64_t,
                            int64_t count, const bf16* values, bf16* out,
                            Stream& stream) override {
    return device::EnqueueOnCpu(stream, [=] {
      std::memcpy(out, values, count * sizeof(bf16));
      return absl::OkStatus();
    });
  }
};

// What is not written is no number.
class OnlyUsedRows : public CountingOps {
 public:
  using CountingOps::CountingOps;
  absl::Status CopyUsedRows(const ops::UsedRows& used, int64_t width,
                            int64_t begin, int64_t count, const bf16* values,
                            bf16* out, Stream& stream) override {
    SDP_RETURN_IF_ERROR(device::EnqueueOnCpu(stream, [=] {
      std::memset(out, 0xff, count * sizeof(bf16));
      return absl::OkStatus();
    }));
    return CountingOps::CopyUsedRows(used, width, begin, count, values, out,
                                     stream);
  }
};

class UsedRowsTest : public TrainerTest {
 protected:
  template <typename WrappedOps>
  static absl::StatusOr<LocalJobResult> Run(LocalJobOptions options) {
    options.wrap_ops = [](std::unique_ptr<ops::Ops> ops) {
      return std::make_unique<WrappedOps>(std::move(ops));
    };
    return RunLocalJob(options);
  }

  void ExpectNoDifference(const LocalJobOptions& options) {
    ASSERT_OK_AND_ASSIGN(const LocalJobResult all, Run<AllRows>(options));
    ASSERT_OK_AND_ASSIGN(const LocalJobResult used, Run<OnlyUsedRows>(options));
    ExpectSameBits(all, used);
    for (const hostd::StepResult& step : used.steps) {
      EXPECT_FALSE(step.skipped);
    }
  }

  // A few sequences, so that most rows are not used.
  LocalJobOptions ShortOptions() {
    LocalJobOptions options = Options(/*tied=*/false);
    options.problem.sequence_length = 9;
    options.problem.batch_size = 3;
    options.steps = 3;
    options.update.schedule.total_steps = 3;
    return options;
  }
};

TEST_F(UsedRowsTest, EveryRouteAndChunk) {
  using policy::GradRoute;
  using policy::ReduceDType;
  struct Case {
    int ranks;
    GradRoute grads;
    ReduceDType reduce;
  };
  for (const Case& c : {Case{1, GradRoute::kGpuRoot, ReduceDType::kF32},
                        Case{1, GradRoute::kCpu, ReduceDType::kF32},
                        Case{2, GradRoute::kGpuRoot, ReduceDType::kF32},
                        Case{2, GradRoute::kGpuRoot, ReduceDType::kBf16},
                        Case{2, GradRoute::kGpuSharded, ReduceDType::kF32},
                        Case{3, GradRoute::kGpuSharded, ReduceDType::kBf16},
                        // Summed by hostd: all rows go down.
                        Case{2, GradRoute::kCpu, ReduceDType::kBf16}}) {
    // Of less than two rows, of an odd part of rows.
    for (uint64_t chunk_bytes : {128, 896}) {
      SCOPED_TRACE(absl::StrCat(c.ranks, " ", policy::Name(c.grads), " ",
                                policy::Name(c.reduce), " ", chunk_bytes));
      LocalJobOptions options = ShortOptions();
      options.problem.ranks = c.ranks;
      options.problem.grads = c.grads;
      options.problem.reduce = c.reduce;
      options.problem.d2h_chunk_bytes = chunk_bytes;
      ExpectNoDifference(options);
    }
  }
}

TEST_F(UsedRowsTest, EveryUpdateMode) {
  for (auto mode : {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred,
                    policy::UpdateMode::kSpeculative}) {
    // With the second, no update can be undone.
    for (double beta1 : {0.9, 0.25}) {
      SCOPED_TRACE(absl::StrCat(policy::Name(mode), " ", beta1));
      LocalJobOptions options = ShortOptions();
      options.problem.ranks = 2;
      options.update.beta1 = beta1;
      options.problem.update_mode = mode;
      if (mode == policy::UpdateMode::kEager) {
        SetEager(options);
        // Places are used again and again.
        options.problem.d2h_chunk_bytes = 896;
        options.problem.ring_chunks = 2;
      }
      ExpectNoDifference(options);
    }
  }
}

// The rehearsal does it, too, and writes nothing.
TEST_F(UsedRowsTest, AfterARehearsal) {
  LocalJobOptions options = ShortOptions();
  options.problem.ranks = 2;
  options.rehearse = true;
  ExpectNoDifference(options);
}

}  // namespace
}  // namespace slidedp::step
