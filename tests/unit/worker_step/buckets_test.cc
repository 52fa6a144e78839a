// A layer's gradient leaves bucket by bucket, while the rest of it is computed.
#include <memory>
#include <utility>
#include <vector>

#include "tests/unit/worker_step/counting_ops.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

// What a rank enqueues of gradients, in order: for a matrix's gradient 0, for
// the norm of what it drains of a bucket the number of elements.
using Enqueued = std::vector<int64_t>;

class RecordingOps final : public CountingOps {
 public:
  RecordingOps(std::unique_ptr<ops::Ops> ops, Enqueued* enqueued)
      : CountingOps(std::move(ops)), enqueued_(enqueued) {}

  absl::Status LinearBackwardWeight(ConstAct x, ConstAct d_y, int64_t tokens,
                                    int64_t in, int64_t out, bool add,
                                    float* d_w, float* d_bias,
                                    Stream& stream) override {
    enqueued_->push_back(0);
    return CountingOps::LinearBackwardWeight(x, d_y, tokens, in, out, add, d_w,
                                             d_bias, stream);
  }
  absl::Status SquaredNorm(const bf16* x, int64_t n, double* out,
                           Stream& stream) override {
    enqueued_->push_back(n);
    return CountingOps::SquaredNorm(x, n, out, stream);
  }

 private:
  Enqueued* enqueued_;
};

using BucketsTest = TrainerTest;

TEST_F(BucketsTest, GoWhileTheRestOfTheLayerIsComputed) {
  LocalJobOptions options = Options(/*tied=*/false);
  options.steps = 1;
  options.problem.batch_size = 2;  // two micro-batches
  Enqueued enqueued;
  options.wrap_ops = [&](std::unique_ptr<ops::Ops> ops) {
    return std::make_unique<RecordingOps>(std::move(ops), &enqueued);
  };
  ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));

  const std::vector<policy::GradBucket> buckets =
      policy::MakeGradBuckets(result.layout, result.plan);
  Enqueued expected;
  const size_t head = 1, layers = 3, of_a_layer = 4;
  ASSERT_EQ(buckets.size(), head + layers * of_a_layer + 1);
  size_t next = 0;
  const auto drain = [&] {
    expected.push_back(
        static_cast<int64_t>(buckets[next].end - buckets[next].begin));
    ++next;
  };
  expected.insert(expected.end(), 2, 0);  // the head's product, twice
  drain();
  for (size_t layer = 0; layer < layers; ++layer) {
    // down, gate and up, o, q k v: of the first micro-batch alone.
    expected.insert(expected.end(), of_a_layer, 0);
    for (size_t i = 0; i < of_a_layer; ++i) {
      expected.push_back(0);
      drain();
    }
  }
  drain();  // the embedding
  EXPECT_EQ(enqueued, expected);
}

// Who looks at gradients sees whole ones; the bits are the same.
TEST_F(BucketsTest, ChangeNoBit) {
  for (bool tied : {false, true}) {
    LocalJobOptions options = Options(tied);
    options.problem.ranks = 2;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult buckets, RunLocalJob(options));
    options.hooks.on_gradient = [](int, const float*, uint64_t) {};
    ASSERT_OK_AND_ASSIGN(const LocalJobResult whole, RunLocalJob(options));
    ExpectSameBits(buckets, whole);
  }
}

}  // namespace
}  // namespace slidedp::step
