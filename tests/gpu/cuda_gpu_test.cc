// The GPU as a whole: its memory's limit, and the list of all.
#include <string>

#include "common/base/units.h"
#include "common/device/accelerator.h"
#include "common/device/cuda_device.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::device {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

class CudaGpuTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(device_, NewCudaDevice({})); }
  Buffer OnDevice(size_t bytes) {
    return *device_->Allocate("device", bytes, Memory::kDevice);
  }

  std::unique_ptr<Device> device_;
};

// The context counts too: the limit is what a smaller GPU would have.
TEST_F(CudaGpuTest, ALimitBoundsAllThatIsInUseOfTheGpu) {
  Buffer first = OnDevice(kMiB);  // whatever the first one brings along
  const auto before = QueryCudaMemory(*device_);
  ASSERT_OK(before);
  ASSERT_OK(SetCudaMemoryLimit(*device_, before->used_bytes + 40 * kMiB));
  Buffer most = OnDevice(32 * kMiB);
  EXPECT_THAT(device_->Allocate("too much", 32 * kMiB, Memory::kDevice),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("too much"), HasSubstr("limit"),
                             HasSubstr("in use"))));
  const auto memory = QueryCudaMemory(*device_);
  ASSERT_OK(memory);
  EXPECT_EQ(memory->allocated_bytes, 33 * kMiB);
  EXPECT_LE(memory->used_bytes, before->used_bytes + 40 * kMiB);
  most = Buffer();
  EXPECT_EQ(QueryCudaMemory(*device_)->allocated_bytes, kMiB);
  EXPECT_EQ(QueryCudaMemory(*device_)->allocated_peak_bytes, 33 * kMiB);
  EXPECT_GE(QueryCudaMemory(*device_)->used_peak_bytes, 33 * kMiB);
  EXPECT_GT(memory->total_bytes, memory->used_bytes);
  ASSERT_OK(SetCudaMemoryLimit(*device_, 1));
  EXPECT_THAT(device_->Allocate("anything", 1, Memory::kDevice),
              StatusIs(absl::StatusCode::kResourceExhausted));
  ASSERT_OK(SetCudaMemoryLimit(*device_, 0));
  EXPECT_OK(device_->Allocate("anything", 1, Memory::kDevice));
}

TEST_F(CudaGpuTest, TheListOfGpusHoldsTheOneInUse) {
  const auto list = ListAccelerators();
  ASSERT_OK(list);
  const auto index = AcceleratorIndex(*device_);
  ASSERT_OK(index);
  ASSERT_LT(static_cast<size_t>(*index), list->size());
  const AcceleratorInfo& info = (*list)[*index];
  EXPECT_EQ(info.name, device_->description());
  EXPECT_EQ(info.uuid.size(), std::string("GPU-").size() + 36);
  const auto memory = QueryCudaMemory(*device_);
  ASSERT_OK(memory);
  EXPECT_NEAR(static_cast<double>(info.memory_bytes),
              static_cast<double>(memory->total_bytes), kGiB);
}

}  // namespace
}  // namespace slidedp::device
