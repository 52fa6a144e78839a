// Which device a job gets, for every state that a host's GPUs can be in, and
// what that does to estimate, submit and doctor.
#include "hostd/ctl/device.h"

#include "common/base/units.h"
#include "hostd/ctl/doctor.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

hostd::GpuFacts Facts(std::vector<uint64_t> memories) {
  hostd::GpuFacts facts;
  facts.built = true;
  for (uint64_t bytes : memories) {
    facts.gpus.push_back({"test GPU", "GPU-1", bytes});
  }
  return facts;
}
FindGpus Found(absl::StatusOr<hostd::GpuFacts> facts) {
  return [facts] { return facts; };
}
absl::StatusOr<ChosenDevice> Choose(v1::DeviceKind asked, uint32_t ranks,
                                    const FindGpus& gpus) {
  return ChooseDevice(asked, ranks, "job.yaml", gpus);
}

constexpr v1::DeviceKind kAuto = v1::DEVICE_KIND_AUTO;
constexpr v1::DeviceKind kCpu = v1::DEVICE_KIND_CPU;
constexpr v1::DeviceKind kCuda = v1::DEVICE_KIND_CUDA;

TEST(ChooseDeviceTest, CpuAsksNobody) {
  const FindGpus never = []() -> absl::StatusOr<hostd::GpuFacts> {
    ADD_FAILURE() << "GPUs were looked for";
    return absl::InternalError("");
  };
  ASSERT_OK_AND_ASSIGN(ChosenDevice chosen, Choose(kCpu, 64, never));
  EXPECT_EQ(chosen.device, kCpu);
}

TEST(ChooseDeviceTest, WithoutADriverAutoIsTheCpuAndCudaAnError) {
  for (const FindGpus& gpus : {FindGpus(), Found(absl::NotFoundError(""))}) {
    ASSERT_OK_AND_ASSIGN(ChosenDevice chosen, Choose(kAuto, 64, gpus));
    EXPECT_EQ(chosen.device, kCpu);
    EXPECT_EQ(chosen.warning, "");
    EXPECT_THAT(Choose(kCuda, 1, gpus),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("job.yaml: device = cuda"),
                               HasSubstr("no NVIDIA GPU"))));
  }
}

TEST(ChooseDeviceTest, ABuildWithoutCudaIsSaidAloud) {
  hostd::GpuFacts facts;
  ASSERT_OK_AND_ASSIGN(ChosenDevice chosen, Choose(kAuto, 1, Found(facts)));
  EXPECT_EQ(chosen.device, kCpu);
  EXPECT_THAT(chosen.warning, HasSubstr("built without CUDA"));
  EXPECT_THAT(Choose(kCuda, 1, Found(facts)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("built without CUDA")));
}

// Never a quiet CPU job beside a broken GPU.
TEST(ChooseDeviceTest, ADriverThatDoesNotWorkIsAnError) {
  hostd::GpuFacts facts = Facts({});
  facts.problem = "system not yet initialized";
  for (v1::DeviceKind asked : {kAuto, kCuda}) {
    EXPECT_THAT(Choose(asked, 1, Found(facts)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("not yet initialized")));
    EXPECT_THAT(
        Choose(asked, 1, Found(absl::DeadlineExceededError("no answer"))),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no answer")));
  }
}

TEST(ChooseDeviceTest, HiddenGpusAreNone) {
  ASSERT_OK_AND_ASSIGN(ChosenDevice chosen, Choose(kAuto, 1, Found(Facts({}))));
  EXPECT_EQ(chosen.device, kCpu);
  EXPECT_THAT(Choose(kCuda, 1, Found(Facts({}))),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST(ChooseDeviceTest, EveryRankNeedsAGpuAndTheSmallestCounts) {
  const FindGpus gpus = Found(Facts({80 * kGiB, 24 * kGiB}));
  for (v1::DeviceKind asked : {kAuto, kCuda}) {
    ASSERT_OK_AND_ASSIGN(ChosenDevice chosen, Choose(asked, 2, gpus));
    EXPECT_EQ(chosen.device, kCuda);
    EXPECT_EQ(chosen.gpu_memory_bytes, 24 * kGiB);
    EXPECT_THAT(Choose(asked, 3, gpus),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("job.yaml: ranks = 3"),
                               HasSubstr("2 are visible"),
                               HasSubstr("use at most 2"))));
    EXPECT_OK(Choose(asked, 0, gpus));
  }
}

class DeviceCliTest : public ::testing::Test {
 protected:
  DeviceCliTest() {
    testing::WriteTinyModel(folder_.Sub("model"), {});
    runner_.environment.current_folder = folder_.path();
    runner_.environment.find_gpus = Found(Facts({80 * kGiB}));
  }
  Outcome Estimate(std::vector<std::string> more) {
    std::vector<std::string> args = {"estimate", "model", "-o", "json"};
    args.insert(args.end(), more.begin(), more.end());
    return runner_.Run(args);
  }

  testing::TempFolder folder_;
  CtlRunner runner_;
};

TEST_F(DeviceCliTest, EstimateIsForTheGpusOfThisHost) {
  Outcome outcome = Estimate({"--ranks", "4"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  Json json = outcome.json();
  EXPECT_EQ(json["plan"]["device"], "cuda");
  EXPECT_EQ(json["gpu_memory_bytes"], 80 * kGiB);
  EXPECT_GT(json["gpu_allowance"]["nccl"], 0);
  EXPECT_EQ(json["host_bytes"], json["host_bytes_with_cpu_ranks"]);
}

TEST_F(DeviceCliTest, EstimateTakesTheGpuMemoryOfAnotherHost) {
  runner_.environment.find_gpus = nullptr;
  Outcome outcome = Estimate({"--device", "cuda"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("--gpu-memory"));
  outcome = Estimate({"--gpu-memory", "24"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.json()["gpu_memory_bytes"], 24 * kGiB);
  EXPECT_EQ(outcome.json()["plan"]["device"], "cuda");
  outcome = Estimate({"--gpu-memory", "0.5"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("512.00 MiB"));
  outcome = Estimate({"--device", "cpu", "--gpu-memory", "24"});
  EXPECT_EQ(outcome.code, kExitUsage);
  EXPECT_EQ(Estimate({"--gpu-memory", "-1"}).code, kExitUsage);
}

// A key of a job file does not undo the short forms before it.
TEST_F(DeviceCliTest, WhatNeverFitsTheGpuIsAnErrorWithBytes) {
  Outcome outcome = Estimate({"--gpu-memory", "12", "--sequence-length", "64",
                              "--micro-batch-size", "200000", "--batch-size",
                              "200000", "--set", "tuning.keep_mask=0"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("micro_batch_size = 200000"),
                                 HasSubstr("of device memory")));
}

TEST_F(DeviceCliTest, DoctorNamesTheGpusOrWhatIsWrong) {
  auto gpu = [this] {
    for (const Finding& finding : RunDoctor(runner_.environment, "/none")) {
      if (finding.check == "gpu") return finding;
    }
    return Finding{};
  };
  EXPECT_EQ(gpu().health, Health::kOk);
  EXPECT_THAT(gpu().found, HasSubstr("test GPU 80.00 GiB"));
  runner_.environment.find_gpus = nullptr;
  EXPECT_EQ(gpu().health, Health::kOk);
  hostd::GpuFacts facts = Facts({});
  facts.problem = "broken";
  for (const auto& bad : std::vector<absl::StatusOr<hostd::GpuFacts>>{
           facts, Facts({}), hostd::GpuFacts(), absl::InternalError("x")}) {
    runner_.environment.find_gpus = Found(bad);
    EXPECT_EQ(gpu().health, Health::kWarn);
    EXPECT_THAT(gpu().remedy, Not(::testing::IsEmpty()));
  }
}

}  // namespace
}  // namespace slidedp::ctl
