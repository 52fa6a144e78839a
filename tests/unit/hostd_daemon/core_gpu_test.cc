// Jobs for GPUs in the queue: counted once, held whole, told why they wait.
#include <sys/stat.h>

#include "common/base/backoff.h"
#include "tests/unit/hostd_daemon/core_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::testing::HasSubstr;

class CoreGpuTest : public CoreTest {
 protected:
  CoreGpuTest() {
    config_.max_running_jobs = 4;
    // A worker that says what it was given, and stays until it may leave.
    folder_.Write("worker",
                  "#!/bin/sh\n"
                  "echo \"gpus $CUDA_VISIBLE_DEVICES args $*\"\n"
                  "until [ -e " +
                      folder_.Sub("leave-$2") +
                      " ]; do\n"
                      "  sleep 0.05\n"
                      "done\n");
    SDP_CHECK(chmod(folder_.Sub("worker").c_str(), 0755) == 0, "chmod");
    config_.worker_environment = {"CUDA_VISIBLE_DEVICES=3,2"};
    spec_ = SampleSpec();
    spec_.set_device(v1::DEVICE_KIND_CUDA);
    spec_.set_launch(v1::LAUNCH_KIND_DAEMON);
  }
  ~CoreGpuTest() override {
    for (uint64_t job = 1; job <= jobs_; ++job) LetWorkersLeave(job);
  }
  void LetWorkersLeave(uint64_t job) {
    folder_.Write("leave-" + std::to_string(job), "");
  }

  static GpuFacts Facts(std::vector<std::string> uuids) {
    GpuFacts facts;
    facts.built = true;
    for (const std::string& uuid : uuids) {
      facts.gpus.push_back({"test GPU", uuid, uint64_t{24} << 30});
    }
    return facts;
  }
  uint64_t Submit(uint32_t ranks) {
    spec_.set_ranks(ranks);
    ++jobs_;
    return MustSubmit(spec_);
  }
  v1::JobInfo AwaitNews(uint64_t job, const std::string& old_reason) {
    Backoff backoff;
    while (true) {
      v1::JobInfo info = Info(job);
      if (info.reason() != old_reason) return info;
      backoff.Pause();
    }
  }
  // The first line of the rank's log.
  std::string FirstWords(uint64_t job, uint32_t rank) {
    const std::string path =
        config_.log_folder(job) + "/rank-" + std::to_string(rank) + ".log";
    Backoff backoff;
    while (true) {
      absl::StatusOr<std::string> text = ReadFile(path, 1 << 20);
      if (text.ok() && text->find('\n') != std::string::npos) {
        return text->substr(0, text->find('\n'));
      }
      backoff.Pause();
    }
  }

  v1::JobSpec spec_;
  uint64_t jobs_ = 0;  // submitted; their ids are 1, 2, ...
};

TEST_F(CoreGpuTest, AJobWaitsForGpusThatAnotherHolds) {
  gpus_ = Facts({"GPU-a", "GPU-b", "GPU-c"});
  StartCore();
  const uint64_t first = Submit(2);
  AwaitNews(first, "counting this host's GPUs");
  EXPECT_EQ(Info(first).state(), v1::CONFIGURING);
  const uint64_t second = Submit(2);
  EXPECT_EQ(Info(second).state(), v1::PENDING);
  EXPECT_EQ(Info(second).reason(),
            "waiting for GPUs: needs 2, 1 of 3 free (job " +
                std::to_string(first) + " has the others)");
  // All ranks see the job's GPUs in rank order, and no others.
  for (uint32_t rank : {0u, 1u}) {
    EXPECT_THAT(FirstWords(first, rank),
                ::testing::AllOf(HasSubstr("gpus GPU-a,GPU-b args"),
                                 HasSubstr("--device cuda")));
  }
  ASSERT_OK(Cancel(first, self_));
  LetWorkersLeave(first);
  EXPECT_EQ(AwaitEnd(first).state(), v1::CANCELLED);
  EXPECT_THAT(FirstWords(second, 0), HasSubstr("gpus GPU-a,GPU-b args"));
  EXPECT_EQ(Info(second).state(), v1::CONFIGURING);
  EXPECT_EQ(gpu_counts_, 1);
}

TEST_F(CoreGpuTest, TwoJobsThatFitRunSideBySide) {
  gpus_ = Facts({"GPU-a", "GPU-b"});
  StartCore();
  const uint64_t first = Submit(1), second = Submit(1);
  EXPECT_THAT(FirstWords(first, 0), HasSubstr("gpus GPU-a args"));
  EXPECT_THAT(FirstWords(second, 0), HasSubstr("gpus GPU-b args"));
}

TEST_F(CoreGpuTest, MoreRanksThanGpusFailAndAskAnewNextTime) {
  gpus_ = Facts({"GPU-a"});
  StartCore();
  const uint64_t job = Submit(2);
  EXPECT_THAT(AwaitEnd(job).reason(),
              HasSubstr("2 ranks and slidedpd sees 1 GPU;"));
  EXPECT_EQ(Info(job).state(), v1::FAILED);
  const uint64_t next = Submit(1);
  EXPECT_THAT(FirstWords(next, 0), HasSubstr("gpus GPU-a args"));
  EXPECT_EQ(gpu_counts_, 2);
}

TEST_F(CoreGpuTest, AFailedCountFailsTheJobWithItsReason) {
  StartCore();
  EXPECT_THAT(AwaitEnd(Submit(1)).reason(), HasSubstr("no GPUs in this test"));
}

TEST_F(CoreGpuTest, JobsOfTheCpuAndManualOnesCountNothing) {
  StartCore();
  spec_.set_device(v1::DEVICE_KIND_CPU);
  const uint64_t cpu = Submit(1);
  EXPECT_THAT(FirstWords(cpu, 0), ::testing::AllOf(HasSubstr("gpus 3,2 args"),
                                                   HasSubstr("--device cpu")));
  spec_.set_device(v1::DEVICE_KIND_CUDA);
  spec_.set_launch(v1::LAUNCH_KIND_MANUAL);
  EXPECT_THAT(Info(Submit(2)).reason(), HasSubstr("--device cuda"));
  EXPECT_EQ(gpu_counts_, 0);
}

}  // namespace
}  // namespace slidedp::hostd
