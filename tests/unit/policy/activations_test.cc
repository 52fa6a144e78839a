#include "policy/activations.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "common/base/units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/policy/problems.h"

namespace slidedp::policy {
namespace {

model::ModelConfig Config(int64_t layers) {
  testing::TinyModelOptions options;
  options.layers = static_cast<int>(layers);
  return testing::TinyConfig(options);
}

Plan AnyPlan(std::mt19937& random, int64_t layers) {
  Plan plan;
  plan.sequence_length = 1 + random() % 40;
  plan.micro_batch_size = 1 + random() % 3;
  plan.micro_batches = 1 + random() % 4;
  plan.stage_slots = 1 + static_cast<int>(random() % 3);
  plan.window_slots = plan.grad_slots = 1;
  plan.head_chunk_tokens = 1;
  for (int64_t l = 0; l < layers; ++l) {
    plan.keep.push_back(static_cast<uint8_t>(random() % 128));
    const uint16_t shares[] = {0, 1, 300, 999, 1000};
    plan.offload_permille.push_back(shares[random() % 5]);
  }
  return plan;
}

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // begin, end

void ExpectDisjoint(Ranges ranges, uint64_t end) {
  std::sort(ranges.begin(), ranges.end());
  uint64_t at = 0;
  for (const auto& [begin, stop] : ranges) {
    if (begin == stop) continue;
    EXPECT_GE(begin, at);
    at = stop;
  }
  EXPECT_LE(at, end);
}

TEST(ActivationsTest, TheShareGoesToTheHostToTheByte) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const model::ModelConfig config = Config(1 + random() % 5);
    const Plan plan = AnyPlan(random, config.layers);
    const ActivationLayout layout = LayOutActivations(config, plan);
    for (int64_t l = 0; l < config.layers; ++l) {
      uint64_t total = 0, host = 0;
      int divided = 0;
      for (const PartPlace& part : layout.layers[l]) {
        total += part.bytes;
        host += part.host_bytes;
        divided += part.staged() && part.host_bytes < part.bytes;
      }
      const uint64_t wanted = total * plan.offload_permille[l] / 1000;
      EXPECT_LE(host, wanted);
      EXPECT_GT(host + 256, wanted);
      EXPECT_LE(divided, 1);
      if (plan.offload_permille[l] == kOffloadAll) {
        EXPECT_EQ(host, total);
      }
    }
  }
}

TEST(ActivationsTest, PlacesAreDisjointAndWithinTheirBuffers) {
  std::mt19937 random(2);
  for (int i = 0; i < 200; ++i) {
    const model::ModelConfig config = Config(1 + random() % 5);
    const Plan plan = AnyPlan(random, config.layers);
    const ActivationLayout layout = LayOutActivations(config, plan);
    Ranges pool, rest;
    std::vector<Ranges> resident(kParts);
    for (const auto& parts : layout.layers) {
      Ranges slot;
      for (int p = 0; p < kParts; ++p) {
        const PartPlace& part = parts[p];
        const bool others = part.staged() && p != kInputPart;
        if (others) slot.push_back({part.offset, part.offset + part.bytes});
        for (int64_t mb = 0; mb < plan.micro_batches; ++mb) {
          if (!part.staged()) {
            const uint64_t begin = part.offset + mb * part.bytes;
            resident[p].push_back({begin, begin + part.bytes});
            continue;
          }
          uint64_t begin = part.pool_offset + mb * part.pool_stride;
          pool.push_back({begin, begin + part.host_bytes});
          begin = part.rest_offset + mb * part.rest_stride;
          rest.push_back({begin, begin + part.bytes - part.host_bytes});
        }
      }
      ExpectDisjoint(slot, layout.kept_slot_bytes);
    }
    ExpectDisjoint(pool, layout.pool_bytes);
    ExpectDisjoint(rest, layout.rest_bytes);
    for (int p = 0; p < kParts; ++p) {
      ExpectDisjoint(resident[p], p == kInputPart ? layout.head_input_offset
                                                  : layout.resident_bytes[p]);
    }
  }
}

TEST(ActivationsTest, OffloadedLayersCostTheDeviceSlotsOnly) {
  const model::ModelConfig config = Config(8);
  const model::StateLayout state = model::MakeStateLayout(config);
  std::mt19937 random(3);
  Plan plan = AnyPlan(random, config.layers);
  plan.keep.assign(8, kKeepAll);
  plan.offload_permille.assign(8, kOffloadAll);
  const auto buffers = DeviceBuffers(config, state, plan);
  const ActivationLayout layout = LayOutActivations(config, plan);
  const uint64_t m = plan.micro_batches, input = InputBytes(config, plan);
  EXPECT_EQ(Bytes(buffers, "inputs"), AlignUp(m * input, kPageBytes));
  EXPECT_EQ(Bytes(buffers, "stage.inputs"),
            AlignUp((m + plan.stage_slots) * input, kPageBytes));
  EXPECT_EQ(Bytes(buffers, "stage.kept"),
            AlignUp(plan.stage_slots * layout.kept_slot_bytes, kPageBytes));
  EXPECT_EQ(Bytes(buffers, "pinned.activations"),
            AlignUp(layout.pool_bytes, kPageBytes));
  EXPECT_GE(layout.pool_bytes,
            8 * m * (input + layout.kept_slot_bytes) - 8 * m * 512);
  EXPECT_EQ(Bytes(buffers, "kept.rest"), 0u);
  EXPECT_EQ(Bytes(buffers, KeptName(Segment::kGateUp)), 0u);
  // The host's memory is no device's.
  EXPECT_EQ(GpuBytes(buffers) + Bytes(buffers, "pinned.activations") +
                Bytes(buffers, "pinned.tokens"),
            [&] {
              uint64_t all = 0;
              for (const NamedBytes& b : buffers) all += b.bytes;
              return all;
            }());
}

}  // namespace
}  // namespace slidedp::policy
