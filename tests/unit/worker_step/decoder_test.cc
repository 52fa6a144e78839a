// Every combination of kept segments of one layer.
#include "worker/step/decoder.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/worker_step/counting_ops.h"

namespace slidedp::step {
namespace {

using policy::Bit;
using policy::kKeepAll;
using policy::Segment;

using Floats = std::vector<float>;

struct Result {
  Floats output, d_input, gradient;
  CountingOps::Counts backward;
  bool operator==(const Result& other) const {
    return output == other.output && d_input == other.d_input &&
           gradient == other.gradient;
  }
};

class DecoderTest : public ::testing::TestWithParam<bool> {
 protected:
  DecoderTest() {
    testing::TinyModelOptions options;
    options.layers = 2;
    config_ = testing::TinyConfig(options);
    config_.qk_norm = GetParam();
    layout_ = model::MakeStateLayout(config_);
    plan_.sequence_length = 13;
    plan_.micro_batch_size = 2;
    plan_.micro_batches = 2;
    plan_.window_slots = plan_.grad_slots = 1;
    plan_.head_chunk_tokens = 1;
    plan_.float32 = true;
  }

  static Floats Random(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats values(count);
    for (float& value : values) value = normal(random);
    return values;
  }

  // Both micro-batches forward, then backward; layer 1, whose place among the
  // kept ones depends on layer 0's mask.
  Result Run(uint8_t mask_before, uint8_t mask) {
    policy::Plan plan = plan_;
    plan.keep = {mask_before, mask};
    const auto device = device::NewCpuDevice({});
    CountingOps ops(ops::NewCpuOps(2));
    auto buffers = Buffers::Allocate(
        *device, policy::DeviceBuffers(config_, layout_, plan));
    EXPECT_OK(buffers.status());
    const std::vector<float> frequencies =
        model::RopeInverseFrequencies(config_);
    std::copy(frequencies.begin(), frequencies.end(),
              buffers->get<float>("rope"));
    const Activations activations =
        Activations::Create(
            {device.get(), &config_, &layout_, &plan, &*buffers, nullptr})
            .value();
    Decoder decoder(ops, config_, plan, &activations, *buffers);
    const model::Unit& unit = layout_.units[layout_.decoder_unit(1)];
    std::vector<bf16> w;
    for (float value : Random(unit.count, 1)) {
      w.push_back(FloatToBf16Even(0.2f * value));
    }
    Result result;
    result.gradient.assign(unit.count, 0.0f);
    const UnitWeights weights(unit, w.data(), result.gradient.data());
    const size_t count = plan.micro_batch_tokens() * config_.hidden;
    const Floats input = Random(2 * count, 2);
    result.output.assign(2 * count, 0.0f);
    result.d_input = Random(2 * count, 3);
    {
      auto stream = device->NewStream("compute").value();
      for (int mb = 0; mb < 2; ++mb) {
        EXPECT_OK(decoder.Forward(1, mb, weights, &input[mb * count],
                                  &result.output[mb * count], *stream));
      }
      ops.counts = {};
      for (int mb = 0; mb < 2; ++mb) {
        EXPECT_OK(decoder.Backward(1, mb, weights, &input[mb * count],
                                   &result.d_input[mb * count], Decoder::Ignore,
                                   *stream));
      }
      EXPECT_OK(device->Synchronize(*stream));
    }
    result.backward = ops.counts;
    return result;
  }

  model::ModelConfig config_;
  model::StateLayout layout_;
  policy::Plan plan_;
};

TEST_P(DecoderTest, EveryMaskGivesTheSameBits) {
  const Result reference = Run(0, 0);
  for (float value : reference.gradient) ASSERT_TRUE(std::isfinite(value));
  for (int mask = 1; mask < 1 << policy::kSegments; ++mask) {
    EXPECT_TRUE(Run(0, static_cast<uint8_t>(mask)) == reference) << mask;
    EXPECT_TRUE(Run(kKeepAll, static_cast<uint8_t>(mask)) == reference) << mask;
  }
}

// Counts are of two micro-batches.
TEST_P(DecoderTest, OnlyWhatIsMissingAndNeededIsComputedAgain) {
  const CountingOps::Counts all = Run(0, 0).backward;
  EXPECT_EQ(all.linear_forward, 6);  // qkv, o, gate and up
  EXPECT_EQ(all.attention_forward, 2);
  EXPECT_EQ(all.rope_forward, 2);
  EXPECT_EQ(all.norm_forward, 4);
  EXPECT_EQ(all.swiglu_forward, 0);

  const CountingOps::Counts none = Run(0, kKeepAll).backward;
  EXPECT_EQ(none.linear_forward, 0);
  EXPECT_EQ(none.attention_forward, 0);
  EXPECT_EQ(none.norm_forward, 0);  // their backward passes write them
  // Without QK-norm the projections are kept as they turned in place.
  EXPECT_EQ(none.rope_forward, GetParam() ? 2 : 0);

  // Its backward pass reads the attention's output and its inputs.
  const CountingOps::Counts attention =
      Run(0, Bit(Segment::kAttention)).backward;
  EXPECT_EQ(attention.attention_forward, 0);
  EXPECT_EQ(attention.linear_forward, 6);

  const CountingOps::Counts gate_up = Run(0, Bit(Segment::kGateUp)).backward;
  EXPECT_EQ(gate_up.linear_forward, 4);
  EXPECT_EQ(gate_up.norm_forward, 2);  // the input's

  // Turned projections stand for plain ones, unless QK-norm's gradient asks.
  const CountingOps::Counts rotated = Run(0, Bit(Segment::kRotated)).backward;
  EXPECT_EQ(rotated.rope_forward, 0);
  EXPECT_EQ(rotated.linear_forward, GetParam() ? 6 : 4);
}

INSTANTIATE_TEST_SUITE_P(QkNorm, DecoderTest, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "With" : "Without";
                         });

}  // namespace
}  // namespace slidedp::step
