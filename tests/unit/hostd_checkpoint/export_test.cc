// Checkpoints exported as models: complete or absent, whatever happens.
#include <filesystem>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "hostd/ctl/export_model.h"
#include "tests/testing/lossy_disk.h"
#include "tests/unit/hostd_checkpoint/state_fixture.h"

namespace slidedp::hostd {
namespace {

using testing::LossyDisk;
using Tree = LossyDisk::Tree;

class ExportTest : public StateTest {
 protected:
  ExportTest() : StateTest(testing::TempFolder::MemoryFolder()) {
    testing::TinyModelOptions options;
    options.layers = 1;
    options.hidden = 32;
    options.vocab = 64;
    options.shards = 2;
    MakeModel(options);
    SDP_CHECK(Save(10).ok(), "save");
    std::filesystem::create_directory(Exports());
    environment_.err = &err_;
    environment_.interrupt = &interrupt_;
  }
  std::string Exports() const { return folder_.Sub("exports"); }

  std::ostringstream err_;
  ctl::Interrupt interrupt_;
  ctl::Environment environment_;
};

TEST_F(ExportTest, AreCompleteOrAbsentAfterAPowerFailure) {
  for (bool float32 : {false, true}) {
    LossyDisk disk(Exports());
    const std::string name = float32 ? "exact" : "halves";
    ASSERT_OK(ctl::ExportModel(environment_, PathOf(10),
                               absl::StrCat(Exports(), "/", name), float32,
                               disk));
    const auto in_it = [&](const Tree& tree) {
      Tree in;
      for (const auto& [path, bytes] : tree) {
        if (absl::StartsWith(path, name + "/")) in[path] = bytes;
      }
      return in;
    };
    const Tree good = in_it(disk.Remains(disk.calls(), 0).front().first);
    ASSERT_GT(good.size(), 4u);
    for (size_t calls = 0; calls <= disk.calls(); ++calls) {
      for (const auto& [tree, where] :
           disk.Remains(calls, static_cast<uint32_t>(calls))) {
        const Tree in = in_it(tree);
        EXPECT_TRUE(in == good || (in.empty() && calls < disk.calls()))
            << where;
      }
    }
  }
}

TEST_F(ExportTest, AnInterruptLeavesNothing) {
  interrupt_.Raise();
  EXPECT_THAT(ctl::ExportModel(environment_, PathOf(10), Exports() + "/out",
                               /*float32=*/false),
              testing::StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_TRUE(std::filesystem::is_empty(Exports()));
}

TEST_F(ExportTest, WhatAKilledOneLeftIsReplaced) {
  const std::string left = Exports() + "/.out.tmp-export";
  std::filesystem::create_directory(left);
  std::filesystem::copy_file(PathOf(10) + "/config.json",
                             left + "/config.json");
  EXPECT_OK(ctl::ExportModel(environment_, PathOf(10), Exports() + "/out",
                             /*float32=*/false));
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(Exports() + "/out/config.json"));
}

}  // namespace
}  // namespace slidedp::hostd
