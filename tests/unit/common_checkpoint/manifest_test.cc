#include "common/checkpoint/manifest.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::StatusIs;

Manifest Sample() {
  Manifest manifest;
  manifest.step = 100;
  manifest.updates = 98;
  manifest.clip_history = ~uint64_t{0};
  manifest.layout_hash = 0xfedcba9876543210;
  manifest.sampler = {{"seed", "42"}, {"batch_size", "8"}};
  manifest.training = {{"optimizer", "lr: 0.001"}};
  manifest.memory.losses = {2.5, 1.0 / 3, 0, -1e-300};
  manifest.memory.skipped_in_a_row = 3;
  manifest.memory.held_out = {{"max_sequences", "512"}};
  manifest.memory.best_loss = 1.1;
  manifest.memory.best_step = 90;
  manifest.memory.mark = 2;
  manifest.memory.since_better = 1;
  manifest.files = {{"model.safetensors", 1000, 0xffffffff},
                    {"state-00000.safetensors", 0, 0}};
  return manifest;
}

TEST(ManifestTest, ComesBackAsItWas) {
  for (Manifest manifest : {Sample(), [] {
                              Manifest bare;
                              bare.files = {{"a", 1, 2}};
                              return bare;
                            }()}) {
    absl::StatusOr<Manifest> read = ParseManifest(ToJson(manifest), "m");
    ASSERT_OK(read);
    EXPECT_TRUE(*read == manifest);
  }
}

TEST(ManifestTest, AnyFlippedBitIsRefusedOrChangesNothing) {
  const std::string text = ToJson(Sample());
  int refused = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      absl::StatusOr<Manifest> read = ParseManifest(flipped, "m");
      if (!read.ok()) {
        ++refused;
      } else {
        EXPECT_TRUE(*read == Sample()) << flipped;
      }
    }
  }
  EXPECT_GT(refused, static_cast<int>(7 * text.size()));
}

TEST(ManifestTest, AnyShorterTextIsRefused) {
  const std::string text = ToJson(Sample());
  // The line's end alone may be missing.
  for (size_t bytes = 0; bytes + 1 < text.size(); ++bytes) {
    EXPECT_FALSE(ParseManifest(text.substr(0, bytes), "m").ok());
  }
}

TEST(ManifestTest, NamesThatLeaveTheFolderAreRefused) {
  for (std::string name :
       {"", ".", "..", "../x", "a/b", "/etc/passwd", "manifest.json"}) {
    Manifest manifest = Sample();
    manifest.files[0].name = name;
    EXPECT_THAT(ParseManifest(ToJson(manifest), "the/manifest").status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("the/manifest: files")))
        << name;
  }
  Manifest twice = Sample();
  twice.files[1].name = twice.files[0].name;
  EXPECT_THAT(
      ParseManifest(ToJson(twice), "m").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("listed twice")));
  Manifest many = Sample();
  for (uint64_t i = 0; i < kMaxFiles; ++i) {
    many.files.push_back({absl::StrCat("f", i), 0, 0});
  }
  EXPECT_FALSE(ParseManifest(ToJson(many), "m").ok());
}

TEST(ManifestTest, MoreUpdatesThanStepsIsRefused) {
  Manifest manifest = Sample();
  manifest.updates = manifest.step + 1;
  EXPECT_THAT(
      ParseManifest(ToJson(manifest), "m").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("updates")));
}

TEST(ManifestTest, MoreLossesThanAnyRunRemembersAreRefused) {
  Manifest manifest = Sample();
  manifest.memory.losses.assign(Memory::kMaxLosses, 1.5);
  EXPECT_OK(ParseManifest(ToJson(manifest), "m"));
  manifest.memory.losses.push_back(1.5);
  EXPECT_THAT(
      ParseManifest(ToJson(manifest), "m").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("memory.losses")));
}

TEST(ManifestTest, FitsOnlyItsOwnModelAndSampler) {
  const Manifest m = Sample();
  EXPECT_OK(CheckFits(m, "f", m.layout_hash, m.sampler, 100));
  EXPECT_THAT(CheckFits(m, "f", 1, m.sampler, 100),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f: layout_hash")));
  EXPECT_THAT(CheckFits(m, "f", m.layout_hash, m.sampler, 99),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the job has only 99 steps")));
  Identity other = m.sampler;
  other["seed"] = "43";
  EXPECT_THAT(CheckFits(m, "f", m.layout_hash, other, 100),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("seed was 42, is 43")));
  other = m.sampler;
  other["datasets"] = "2";
  EXPECT_THAT(CheckFits(m, "f", m.layout_hash, other, 100),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("datasets was nothing, is 2")));
}

TEST(ManifestTest, DifferencesAreNamed) {
  EXPECT_THAT(Differences({{"a", "1"}, {"b", "2"}}, {{"a", "1"}, {"b", "3"}}),
              ElementsAre("b was 2, is 3"));
  EXPECT_THAT(Differences({{"a", "1"}}, {{"a", "1"}}), IsEmpty());
}

}  // namespace
}  // namespace slidedp::checkpoint
