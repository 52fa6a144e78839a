// Runs from random weights: no source, and no output unless asked for.
#include <bit>
#include <filesystem>
#include <vector>

#include "absl/strings/match.h"
#include "common/base/units.h"
#include "common/model/blank_source.h"
#include "hostd/store/random_weights.h"
#include "hostd/store/split.h"
#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 17;

class RandomRunTest : public JobRunTest {
 protected:
  RandomRunTest() { spec_.set_random_weights_seed(kSeed); }

  // From the attachment on to the end of the last step.
  void Train(uint64_t job) {
    AllReadyAndStart();
    const CheckedSpec checked = *CheckSpec(spec_, {2, 1});
    TrainOnNothing(*attached_[0], checked.layout, plan_, 0, spec_.steps());
    v1::WorkerMessage heartbeat;
    heartbeat.mutable_heartbeat()->set_pss_bytes(uint64_t{1} << 40);
    heartbeat.mutable_heartbeat()->set_device_peak_bytes(12345);
    sessions_[0]->Say(heartbeat);
    v1::WorkerMessage steps_done;
    steps_done.mutable_steps_done();
    sessions_[0]->Say(steps_done);
  }

  // The BF16 weights of a file or plane are those of the seed.
  void ExpectWeights(const model::StateLayout& layout, const bf16* params) {
    for (const model::Unit& unit : layout.units) {
      for (const model::Tensor& tensor : unit.tensors) {
        const bf16* actual = params + unit.plane_offset + tensor.offset;
        std::vector<float> values(tensor.count);
        RandomNormals(kSeed, tensor.name, 0, tensor.count, values.data());
        for (uint64_t i = 0; i < tensor.count; ++i) {
          bf16 hi;
          int16_t lo;
          SplitFloat(tensor.decay ? values[i] * kRandomWeightDeviation : 1.0f,
                     hi, lo);
          ASSERT_EQ(actual[i], hi) << tensor.name << "[" << i << "]";
        }
      }
    }
  }

  policy::Plan plan_;
};

TEST_F(RandomRunTest, WithoutOutputNeedsNoFilesAndCompletes) {
  std::filesystem::remove(folder_.Sub("model/model.safetensors"));
  spec_.clear_output();
  const uint64_t job = Join(1);
  plan_ = Proposed(0);
  AcceptAndAttach(job);
  Train(job);  // without PassSource
  const CheckedSpec checked = *CheckSpec(spec_, {2, 1});
  ExpectWeights(checked.layout,
                attached_[0]->segment(shm::SegmentKind::kParams).at<bf16>(0));
  auto leave = sessions_[0]->Next();
  ASSERT_TRUE(leave && leave->has_leave());
  EXPECT_OK(sessions_[0]->End());
  ASSERT_OK_AND_ASSIGN(v1::GetReply got, Get(job));
  EXPECT_EQ(got.info().step(), spec_.steps());
  bool told = false;
  for (const v1::JobEvent& event : got.events()) {
    told |= absl::StrContains(event.text(), "result is dropped");
  }
  EXPECT_TRUE(told);
  // The rank's share, and the daemon's own, measured when the steps ended.
  EXPECT_GT(got.info().host_pss_peak_bytes(), (uint64_t{1} << 40) + kMiB);
  EXPECT_LT(got.info().host_pss_peak_bytes(), (uint64_t{1} << 40) + 64 * kGiB);
  EXPECT_EQ(got.info().device_peak_bytes(), 12345);
}

TEST_F(RandomRunTest, OutputOfABlankSourceHoldsTheWeights) {
  const uint64_t job = Join(1);
  plan_ = Proposed(0);
  AcceptAndAttach(job);
  const CheckedSpec checked = *CheckSpec(spec_, {2, 1});
  ASSERT_OK_AND_ASSIGN(model::TensorSource blank,
                       model::BlankSource(checked.layout));
  const model::SourceFile& file = blank.files()[0];
  ASSERT_EQ(attached_[0]
                ->Pass(v1::FilesMessage::SOURCE, {file.name}, {file.fd.get()})
                .error(),
            "");
  Train(job);
  auto open = sessions_[0]->Next();
  ASSERT_TRUE(open && open->has_open_output());
  ASSERT_OK_AND_ASSIGN(model::TensorSource trained,
                       model::BlankSource(checked.layout));
  ASSERT_EQ(attached_[0]
                ->Pass(v1::FilesMessage::OUTPUT, {file.name},
                       {trained.files()[0].fd.get()})
                .error(),
            "");
  std::vector<bf16> params(checked.layout.plane_elements);
  for (const model::Unit& unit : checked.layout.units) {
    for (const model::Tensor& tensor : unit.tensors) {
      std::vector<float> values(tensor.count);
      ASSERT_OK(model::ReadAsFloat(trained.Find(tensor.name), 0, tensor.count,
                                   values.data()));
      for (uint64_t i = 0; i < tensor.count; ++i) {
        params[unit.plane_offset + tensor.offset + i] =
            static_cast<bf16>(std::bit_cast<uint32_t>(values[i]) >> 16);
      }
    }
  }
  ExpectWeights(checked.layout, params.data());
  EXPECT_OK(Cancel(job, self_));
  Finish();
}

TEST_F(RandomRunTest, OutputMayBeMissingWithRandomWeightsOnly) {
  spec_.clear_output();
  EXPECT_OK(CheckFields(spec_));
  spec_.clear_random_weights_seed();
  EXPECT_THAT(CheckFields(spec_),
              testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("output")));
}

}  // namespace
}  // namespace slidedp::hostd
