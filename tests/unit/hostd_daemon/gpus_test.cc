// Which job holds which GPU, and what the worker's probe may answer.
#include "hostd/daemon/gpus.h"

#include <sys/stat.h>

#include "hostd/launch/gpu_probe.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

GpuFacts FourGpus() {
  GpuFacts facts;
  facts.built = true;
  for (const char* uuid : {"GPU-a", "GPU-b", "GPU-c", "GPU-d"}) {
    facts.gpus.push_back({"test GPU", uuid, uint64_t{24} << 30});
  }
  return facts;
}

TEST(GpusTest, AJobGetsWholeGpusUntilItGivesThemBack) {
  Gpus gpus;
  gpus.Set(FourGpus());
  EXPECT_OK(gpus.FitsEver(4));
  EXPECT_THAT(gpus.Take(7, 1), ElementsAre("GPU-a"));
  EXPECT_THAT(gpus.Take(8, 2), ElementsAre("GPU-b", "GPU-c"));
  EXPECT_EQ(gpus.WhyNotNow(1), std::nullopt);
  EXPECT_EQ(gpus.WhyNotNow(2),
            "waiting for GPUs: needs 2, 1 of 4 free (jobs 7, 8 have the "
            "others)");
  gpus.Release(7);
  EXPECT_EQ(gpus.WhyNotNow(2), std::nullopt);
  EXPECT_THAT(gpus.Take(9, 2), ElementsAre("GPU-a", "GPU-d"));
}

TEST(GpusTest, AGpuThatIsListedTwiceIsHeldTwice) {
  GpuFacts facts;
  facts.built = true;
  for (const char* uuid : {"GPU-a", "GPU-b", "GPU-a", "GPU-b"}) {
    facts.gpus.push_back({"test GPU", uuid, uint64_t{12} << 30});
  }
  Gpus gpus;
  gpus.Set(facts);
  EXPECT_THAT(gpus.Take(7, 1), ElementsAre("GPU-a"));
  EXPECT_THAT(gpus.Take(8, 2), ElementsAre("GPU-b", "GPU-a"));
  EXPECT_THAT(gpus.WhyNotNow(2).value_or(""), HasSubstr("1 of 4 free"));
  gpus.Release(8);
  EXPECT_EQ(gpus.WhyNotNow(3), std::nullopt);
  const std::vector<std::string> taken = gpus.Take(9, 3);
  EXPECT_THAT(taken, ElementsAre("GPU-b", "GPU-a", "GPU-b"));
  EXPECT_EQ(VisibleGpus(taken), "CUDA_VISIBLE_DEVICES=GPU-b,GPU-a");
}

TEST(GpusTest, CountingAnewFreesNothing) {
  Gpus gpus;
  gpus.Set(FourGpus());
  gpus.Take(7, 3);
  gpus.Set(FourGpus());
  EXPECT_THAT(gpus.WhyNotNow(2).value_or(""), HasSubstr("1 of 4 free (job 7"));
}

TEST(GpusTest, WhatCanNeverRunSaysWhyAndTheNextJobAsksAnew) {
  Gpus gpus;
  gpus.Set(FourGpus());
  EXPECT_THAT(gpus.FitsEver(5), StatusIs(absl::StatusCode::kResourceExhausted,
                                         HasSubstr("5 ranks")));
  EXPECT_EQ(gpus.knowledge(), Gpus::Knowledge::kNone);
  GpuFacts facts = FourGpus();
  facts.problem = "system not yet initialized";
  gpus.Set(facts);
  EXPECT_THAT(gpus.FitsEver(1), StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("not yet initialized")));
  gpus.Set(GpuFacts());
  EXPECT_THAT(gpus.FitsEver(1), StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("without CUDA")));
  gpus.Set(absl::DeadlineExceededError("no answer"));
  EXPECT_THAT(gpus.FitsEver(1), StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST(GpuProbeTest, TheLastLineIsTheAnswer) {
  ASSERT_OK_AND_ASSIGN(
      GpuFacts facts,
      ParseGpuFacts("a library: talks\n"
                    R"({"cuda": true, "problem": "", "gpus": [{"name": "G",)"
                    R"( "uuid": "GPU-1", "memory_bytes": 5, "more": 1}]})"
                    "\n"));
  EXPECT_TRUE(facts.built);
  ASSERT_EQ(facts.gpus.size(), 1);
  EXPECT_EQ(facts.gpus[0].uuid, "GPU-1");
  EXPECT_EQ(facts.gpus[0].memory_bytes, 5);
}

TEST(GpuProbeTest, OtherAnswersAreErrors) {
  for (const char* output :
       {"", "no", "[]", "{}", R"({"cuda": 1, "problem": "", "gpus": []})",
        R"({"cuda": true, "problem": null, "gpus": []})",
        R"({"cuda": true, "problem": "", "gpus": {}})",
        R"({"cuda": true, "problem": "", "gpus": [1]})",
        R"({"cuda": true, "problem": "", "gpus": [{"name": "G"}]})",
        R"({"cuda": true, "problem": "", "gpus": [{"name": "G",)"
        R"( "uuid": "GPU-1", "memory_bytes": -5}]})",
        R"({"cuda": true, "problem": "", "gpus": [{"name": "G",)"
        R"( "uuid": "GPU-1,GPU-2", "memory_bytes": 5}]})",
        R"({"cuda": true, "problem": "", "gpus": [{"name": "G",)"
        R"( "uuid": "", "memory_bytes": 5}]})"}) {
    EXPECT_THAT(ParseGpuFacts(output), StatusIs(absl::StatusCode::kInternal))
        << output;
  }
}

TEST(GpuProbeTest, RunsTheWorkerWithTheEnvironmentGiven) {
  testing::TempFolder folder;
  const std::string worker = folder.Sub("worker");
  folder.Write("worker",
               "#!/bin/sh\n"
               "[ \"$1\" = --probe ] || exit 2\n"
               "echo '{\"cuda\": true, \"problem\": \"'$WHAT'\", "
               "\"gpus\": []}'\n");
  ASSERT_EQ(chmod(worker.c_str(), 0755), 0);
  ASSERT_OK_AND_ASSIGN(GpuFacts facts, ProbeGpus(worker, {"WHAT=broken"}));
  EXPECT_EQ(facts.problem, "broken");
  EXPECT_THAT(ProbeGpus(folder.Sub("none"), {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  folder.Write("worker", "#!/bin/sh\necho sorry\n");
  EXPECT_THAT(ProbeGpus(worker, {}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("sorry")));
}

TEST(GpuProbeTest, ADriverShowsByItsDeviceNode) {
  testing::TempFolder root;
  EXPECT_FALSE(NvidiaIsVisible(root.path()));
  ASSERT_EQ(mkdir(root.Sub("dev").c_str(), 0755), 0);
  root.Write("dev/nvidiactl", "");
  EXPECT_TRUE(NvidiaIsVisible(root.path()));
}

}  // namespace
}  // namespace slidedp::hostd
