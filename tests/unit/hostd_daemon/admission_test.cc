#include "hostd/daemon/admission.h"

#include "common/base/units.h"
#include "hostd/daemon/spec_check.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/hostd_daemon/sample_spec.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Optional;

Demand Needs(uint64_t segments, uint64_t device, int ranks) {
  Demand demand;
  demand.segments = {{"params", segments / 2},
                     {"state", segments - segments / 2}};
  demand.device = {{"window", device}};
  demand.ranks = ranks;
  return demand;
}

HostMemory Host(uint64_t total, uint64_t available) {
  return {total, "MemTotal of the host", available, "MemAvailable"};
}

TEST(AdmissionTest, DemandIsThePlansBytes) {
  v1::JobSpec spec = SampleSpec();
  spec.set_ranks(3);
  ASSERT_OK_AND_ASSIGN(CheckedSpec checked, CheckSpec(spec, {4, 0}));
  Demand demand = MakeDemand(checked.config, checked.layout, checked.plan);
  uint64_t segments = 0, device = 0;
  for (const auto& row : policy::HostSegments(checked.layout, checked.plan)) {
    segments += row.bytes;
  }
  for (const auto& row :
       policy::DeviceBuffers(checked.config, checked.layout, checked.plan)) {
    device += row.bytes;
  }
  EXPECT_GT(segments, 0);
  EXPECT_GT(device, 0);
  EXPECT_EQ(demand.segment_bytes(), segments);
  EXPECT_EQ(demand.device_bytes(), 3 * device);
  EXPECT_EQ(demand.total_bytes(), segments + 3 * device);
}

TEST(AdmissionTest, OfAGpuRankOnlyPinnedMemoryIsTheHosts) {
  v1::JobSpec spec = SampleSpec();
  spec.set_device(v1::DEVICE_KIND_CUDA);
  spec.set_ranks(2);
  ASSERT_OK_AND_ASSIGN(CheckedSpec checked, CheckSpec(spec, {4, 0}));
  EXPECT_EQ(checked.plan.device, policy::DeviceKind::kCuda);
  Demand demand = MakeDemand(checked.config, checked.layout, checked.plan);
  uint64_t pinned = 0;
  for (const auto& row :
       policy::DeviceBuffers(checked.config, checked.layout, checked.plan)) {
    if (row.name.rfind("pinned.", 0) == 0) pinned += row.bytes;
  }
  EXPECT_GT(pinned, 0);
  EXPECT_EQ(demand.device_bytes(), 2 * pinned);
}

// The state of 8.2 billion parameters with deferred updates.
TEST(AdmissionTest, AHostOf256GiBTakes8BillionParameters) {
  const uint64_t parameters = 8'200'000'000;
  EXPECT_OK(FitsEver(Needs(14 * parameters, 0, 2), Host(256 * kGiB, 250 * kGiB),
                     {0, 256 * kMiB}));
  EXPECT_EQ(WhyNotNow(Needs(14 * parameters, 0, 2),
                      Host(256 * kGiB, 250 * kGiB), {0, 256 * kMiB}, {}),
            std::nullopt);
}

TEST(AdmissionTest, FitsExactlyAndNotOneByteMore) {
  Demand demand = Needs(1000, 7, 2);  // 1014
  EXPECT_OK(FitsEver(demand, Host(1114, 0), {0, 100}));
  EXPECT_THAT(
      FitsEver(demand, Host(1113, 0), {0, 100}),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("can never fit"), HasSubstr("params"),
                     HasSubstr("each of 2 ranks window"), HasSubstr("sum"),
                     HasSubstr("MemTotal of the host"))));
  EXPECT_OK(FitsEver(demand, Host(9999, 0), {1014, 100}));
  EXPECT_THAT(FitsEver(demand, Host(9999, 0), {1013, 100}),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("max_host_bytes")));
  EXPECT_FALSE(FitsEver(demand, Host(50, 0), {0, 100}).ok());
}

TEST(AdmissionTest, WaitsForWhatOthersHold) {
  Demand demand = Needs(1000, 7, 2);
  const MemoryLimits limits{0, 100};
  EXPECT_EQ(WhyNotNow(demand, Host(0, 1114), limits, {}), std::nullopt);
  EXPECT_THAT(WhyNotNow(demand, Host(0, 1113), limits, {}),
              Optional(AllOf(HasSubstr("waiting for memory: needs 1014 B"),
                             HasSubstr("1013 B free"))));
  // Promised, but not yet missing from what is available.
  EXPECT_EQ(WhyNotNow(demand, Host(0, 1614), limits, {9000, 500}),
            std::nullopt);
  EXPECT_NE(WhyNotNow(demand, Host(0, 1613), limits, {9000, 500}),
            std::nullopt);
  // max_host_bytes counts all of a running job.
  EXPECT_EQ(WhyNotNow(demand, Host(0, 99999), {2014, 0}, {1000, 0}),
            std::nullopt);
  EXPECT_NE(WhyNotNow(demand, Host(0, 99999), {2013, 0}, {1000, 0}),
            std::nullopt);
  EXPECT_NE(WhyNotNow(demand, Host(0, 10), limits, {9000, 9000}), std::nullopt);
}

TEST(AdmissionTest, SumsDoNotWrapAround) {
  const uint64_t huge = uint64_t{1} << 63;
  Demand demand = Needs(huge, huge, 2);
  EXPECT_FALSE(FitsEver(demand, Host(huge, huge), {0, 0}).ok());
  EXPECT_NE(WhyNotNow(demand, Host(huge, huge), {0, 0}, {}), std::nullopt);
}

}  // namespace
}  // namespace slidedp::hostd
