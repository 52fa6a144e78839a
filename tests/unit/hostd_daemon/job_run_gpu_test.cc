// A run whose ranks have GPUs: the plan follows their memory, and the daemon
// passes on what their communicators need to meet.
#include <functional>

#include "common/base/units.h"
#include "policy/gpu_memory.h"
#include "proto/protocol.h"
#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

v1::WorkerMessage Ids(std::vector<std::string> ids) {
  v1::WorkerMessage message;
  message.mutable_collective_ids();
  for (std::string& id : ids) message.mutable_collective_ids()->add_ids(id);
  return message;
}
std::string Id(char c) { return std::string(kCollectiveIdBytes, c); }

class JobRunGpuTest : public JobRunTest {
 protected:
  JobRunGpuTest() { UseGpus(80 * kGiB); }

  uint64_t Attached(uint32_t ranks) {
    const uint64_t job = Join(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) Proposed(rank);
    AcceptAndAttach(job);
    return job;
  }
  // For another Join.
  void Reset() {
    Finish();
    sessions_.clear();
    attached_.clear();
    attach_requests_.clear();
    StopCore();
  }
};

TEST_F(JobRunGpuTest, IdsOfRankZeroReachEveryRankAndThenTheyMayBeReady) {
  const uint64_t job = Attached(2);
  sessions_[0]->Say(Ids({Id('a'), Id('b')}));
  for (auto& session : sessions_) {
    auto message = session->Next();
    ASSERT_TRUE(message && message->has_collective_ids());
    ASSERT_EQ(message->collective_ids().ids_size(), policy::kCommunicators);
    EXPECT_EQ(message->collective_ids().ids(0), Id('a'));
    EXPECT_EQ(message->collective_ids().ids(1), Id('b'));
  }
  ASSERT_EQ(PassSource().error(), "");
  AllReadyAndStart();
  EXPECT_EQ(Info(job).state(), v1::RUNNING);
}

TEST_F(JobRunGpuTest, IdsOfAnotherSizeNumberOrTwiceTheSameAreRefused) {
  for (const auto& ids : std::vector<std::vector<std::string>>{
           {},
           {Id('a')},
           {Id('a'), Id('b'), Id('c')},
           {Id('a'), Id('a')},
           {Id('a'), Id('b').substr(1)},
           {Id('a'), ""},
           {Id('a'), std::string(1 << 20, 'x')}}) {
    const uint64_t job = Attached(2);
    sessions_[0]->Say(Ids(ids));
    EXPECT_THAT(AwaitEnd(job).reason(),
                AllOf(HasSubstr("rank 0 sent"), HasSubstr("collective ids"),
                      HasSubstr("128 bytes")));
    // The other rank was told to end, not to join.
    auto message = sessions_[1]->Next();
    ASSERT_TRUE(message);
    EXPECT_TRUE(message->has_abort());
    Reset();
  }
}

TEST_F(JobRunGpuTest, IdsOutOfTurnFailTheRank) {
  using Play = std::function<uint64_t()>;
  const Play plays[] = {
      // Before the attachment.
      [&] {
        const uint64_t job = Join(2);
        sessions_[0]->Say(Ids({Id('a'), Id('b')}));
        return job;
      },
      // Twice.
      [&] {
        const uint64_t job = Attached(2);
        sessions_[0]->Say(Ids({Id('a'), Id('b')}));
        sessions_[0]->Say(Ids({Id('c'), Id('d')}));
        return job;
      },
      // Of one rank alone.
      [&] {
        const uint64_t job = Attached(1);
        sessions_[0]->Say(Ids({Id('a'), Id('b')}));
        return job;
      },
      // Of another rank.
      [&] {
        const uint64_t job = Attached(2);
        sessions_[1]->Say(Ids({Id('a'), Id('b')}));
        return job;
      },
  };
  for (const Play& play : plays) {
    EXPECT_THAT(AwaitEnd(play()).reason(),
                HasSubstr("collective_ids out of turn"));
    Reset();
  }
}

TEST_F(JobRunGpuTest, ReadyBeforeTheRanksCanHaveMetIsOutOfTurn) {
  const uint64_t job = Attached(2);
  sessions_[0]->Say(Ready(spec_.dataset_sequences()));
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("ready out of turn"));
  Finish();
}

TEST_F(JobRunGpuTest, OneRankNeedsNoIds) {
  const uint64_t job = Attached(1);
  ASSERT_EQ(PassSource().error(), "");
  AllReadyAndStart();
  EXPECT_EQ(Info(job).state(), v1::RUNNING);
}

TEST_F(JobRunGpuTest, ThePlanIsForTheSmallestGpu) {
  spec_.set_ranks(2);
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  for (uint32_t rank : {0u, 1u}) {
    sessions_.push_back(NewSession());
    sessions_[rank]->SayHello(job, rank, true, rank == 0 ? 80 * kGiB : kGiB);
  }
  // A GiB is less than CUDA itself takes.
  EXPECT_THAT(AwaitEnd(job).reason(), AllOf(HasSubstr("a GPU of 1.00 GiB"),
                                            HasSubstr("leaves nothing")));
  Finish();
}

TEST_F(JobRunGpuTest, TheUsersLimitCountsLikeASmallerGpu) {
  spec_.mutable_tuning()->set_gpu_memory_limit_bytes(kGiB);
  const uint64_t job = Join(1);
  EXPECT_THAT(AwaitEnd(job).reason(),
              AllOf(HasSubstr("tuning.gpu_memory_limit_gib"),
                    HasSubstr("leaves nothing")));
  Finish();
}

TEST_F(JobRunGpuTest, ThePlanIsForGpusAndSaysWhich) {
  const uint64_t job = Join(1);
  EXPECT_EQ(Proposed(0).device, policy::DeviceKind::kCuda);
  ASSERT_OK_AND_ASSIGN(v1::GetReply got, Get(job));
  std::string events;
  for (const v1::JobEvent& event : got.events()) events += event.text() + "\n";
  EXPECT_THAT(events, HasSubstr("devices: 1 x test GPU, 80.00 GiB"));
}

TEST_F(JobRunGpuTest, AGpuWithoutMemoryIsRefused) {
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  auto session = NewSession();
  v1::WorkerMessage message;
  message.mutable_hello()->set_job(job);
  message.mutable_hello()->set_protocol(kProtocolVersion);
  message.mutable_hello()->set_device(v1::DEVICE_KIND_CUDA);
  session->Say(message);
  EXPECT_THAT(session->End(), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("how much memory")));
}

}  // namespace
}  // namespace slidedp::hostd
