// A run from join to end, with ranks that are the test.
#include <filesystem>

#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(JobRunTest, RunsFromJoinToOutput) {
  const uint64_t job = Join(2);
  const policy::Plan plan = Proposed(0);
  EXPECT_EQ(policy::PlanHash(plan), policy::PlanHash(Proposed(1)));
  AcceptAndAttach(job);
  v1::FilesReply loaded = PassSource();
  EXPECT_TRUE(loaded.done());
  ASSERT_EQ(loaded.error(), "");
  AllReadyAndStart();
  EXPECT_EQ(Info(job).state(), v1::RUNNING);
  FakeStream<v1::WatchReply> watch(*loop_, *core_);
  v1::WatchRequest request;
  request.set_id(job);
  loop_->Post([&] { core_->Watch(self_, request, &watch); });
  watch.AwaitReplies(1);

  const CheckedSpec checked = *CheckSpec(spec_, {2, 1});
  std::thread other([&] {
    TrainOnNothing(*attached_[1], checked.layout, plan, 1, spec_.steps());
  });
  TrainOnNothing(*attached_[0], checked.layout, plan, 0, spec_.steps());
  other.join();
  v1::WorkerMessage steps_done;
  steps_done.mutable_steps_done();
  for (auto& session : sessions_) session->Say(steps_done);

  auto open = sessions_[0]->Next();
  ASSERT_TRUE(open && open->has_open_output());
  EXPECT_EQ(Info(job).state(), v1::COMPLETING);
  std::filesystem::copy_file(folder_.Sub("model/model.safetensors"),
                             folder_.Sub("trained"));
  UniqueFd trained = *OpenFile(folder_.Sub("trained"), O_RDWR);
  v1::FilesReply written = attached_[0]->Pass(
      v1::FilesMessage::OUTPUT, {"model.safetensors"}, {trained.get()});
  ASSERT_EQ(written.error(), "");
  v1::WorkerMessage opened;
  opened.mutable_output_opened();
  sessions_[0]->Say(opened);
  auto commit = sessions_[0]->Next();
  ASSERT_TRUE(commit && commit->has_commit_output());
  // Too late now.
  EXPECT_THAT(Cancel(job, self_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("can't be cancelled")));
  v1::WorkerMessage committed;
  committed.mutable_output_committed()->set_path(spec_.output());
  sessions_[0]->Say(committed);
  for (auto& session : sessions_) {
    auto leave = session->Next();
    ASSERT_TRUE(leave && leave->has_leave());
    EXPECT_OK(session->End());
  }

  EXPECT_OK(watch.End());
  std::vector<uint64_t> steps;
  for (const v1::WatchReply& reply : watch.replies()) {
    if (!reply.has_step()) continue;
    steps.push_back(reply.step().step());
    // 120 of each rank over 60 valid tokens.
    EXPECT_EQ(reply.step().loss(), 4.0);
    EXPECT_EQ(reply.step().grad_norm(), 0.0);
    EXPECT_EQ(reply.step().tokens(), 64);
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 2, 3));
  EXPECT_EQ(watch.replies().front().info().state(), v1::RUNNING);
  EXPECT_EQ(watch.replies().back().info().state(), v1::COMPLETED);
  ASSERT_OK_AND_ASSIGN(v1::GetReply got, Get(job));
  EXPECT_EQ(got.info().step(), 3);
  EXPECT_EQ(got.info().last_loss(), 4.0);
  EXPECT_EQ(got.plan().ranks(), 2);
  // Gradients were zero and there is no decay: the weights are the source's.
  EXPECT_EQ(testing::ReadWhole(folder_.Sub("trained")),
            testing::ReadWhole(folder_.Sub("model/model.safetensors")));
  // The records of an ended job are its file's, and the state comes last.
  FakeStream<v1::WatchReply> after(*loop_, *core_);
  request.set_from_step(1);
  loop_->Post([&] { core_->Watch(self_, request, &after); });
  EXPECT_OK(after.End());
  ASSERT_EQ(after.replies().size(), 3);
  EXPECT_EQ(after.replies()[0].step().step(), 2);
  EXPECT_EQ(after.replies()[2].info().state(), v1::COMPLETED);
}

TEST_F(JobRunTest, BrokenSessionFailsTheJobAndAbortsTheOthers) {
  const uint64_t job = Join(2);
  Proposed(0);
  Proposed(1);
  AcceptAndAttach(job);
  ASSERT_EQ(PassSource().error(), "");
  AllReadyAndStart();
  const shm::Versions versions(
      attached_[0]->segment(shm::SegmentKind::kVersions).data());
  EXPECT_EQ(versions.abort().load(), 0);
  EXPECT_GT(versions.heartbeat().load(), 0);
  sessions_[1]->Break();
  auto abort = sessions_[0]->Next();
  ASSERT_TRUE(abort && abort->has_abort());
  EXPECT_THAT(abort->abort().why(), HasSubstr("rank 1"));
  EXPECT_EQ(versions.abort().load(),
            static_cast<uint64_t>(shm::AbortReason::kRankLost));
  const v1::JobInfo end = AwaitEnd(job);
  EXPECT_EQ(end.state(), v1::FAILED);
  EXPECT_EQ(end.reason(), "rank 1 broke its session");
  Finish();
}

TEST_F(JobRunTest, FailedMessageIsTheReason) {
  const uint64_t job = Join(2);
  v1::WorkerMessage failed;
  failed.mutable_failed()->set_why("no memory for \xF0\x9F\x98\x80");
  sessions_[1]->Say(failed);
  EXPECT_EQ(AwaitEnd(job).reason(),
            "rank 1 failed: no memory for \xF0\x9F\x98\x80");
  Finish();
}

TEST_F(JobRunTest, SilentRankLosesItsLease) {
  const uint64_t job = Join(2);
  Proposed(0);
  Tick(static_cast<int64_t>(config_.lease_s) - 5);
  EXPECT_EQ(Info(job).state(), v1::CONFIGURING);
  Tick(static_cast<int64_t>(config_.lease_s) + 1);
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("has said nothing for 10 s"));
  Finish();
}

TEST_F(JobRunTest, RankThatNeverJoinsIsNamed) {
  spec_.set_ranks(2);
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  auto session = NewSession();
  session->SayHello(job, 0);
  Call([] { return 0; });
  EXPECT_THAT(Info(job).reason(), HasSubstr("waiting for rank 1 to join"));
  Tick(static_cast<int64_t>(config_.manual_join_timeout_s) - 10);
  // The one that has joined must still be heard.
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("rank 0 has said nothing"));
  (void)session->End();
  const uint64_t again = MustSubmit(spec_);
  Tick(static_cast<int64_t>(config_.manual_join_timeout_s) + 1);
  EXPECT_THAT(AwaitEnd(again).reason(),
              HasSubstr("rank 0 did not join within 3600 s"));
}

TEST_F(JobRunTest, RefusedPlanFallsBackToFullAndCpu) {
  const uint64_t job = Join(2);
  EXPECT_EQ(Proposed(0).decoder.grads, policy::GradRoute::kGpuSharded);
  Proposed(1);
  sessions_[1]->Say(Refuse("no link"));
  sessions_[0]->Say(Accept());
  for (uint32_t rank : {0u, 1u}) {
    policy::Plan plan = Proposed(rank);
    EXPECT_EQ(plan.decoder.params, policy::ParamRoute::kFull);
    EXPECT_EQ(plan.decoder.grads, policy::GradRoute::kCpu);
  }
  ASSERT_OK_AND_ASSIGN(v1::GetReply got, Get(job));
  EXPECT_EQ(got.plan().decoder().grads(), v1::GRAD_ROUTE_CPU);
  sessions_[0]->Say(Refuse("still not"));
  sessions_[1]->Say(Accept());
  EXPECT_THAT(AwaitEnd(job).reason(),
              HasSubstr("rank 0 refused the plan: still not"));
  Finish();
}

TEST_F(JobRunTest, RefusalOfFixedRoutesFailsTheJob) {
  spec_.mutable_routes()->set_params(v1::PARAM_ROUTE_SHARDED);
  spec_.mutable_routes()->set_grads(v1::GRAD_ROUTE_GPU_ROOT);
  const uint64_t job = Join(2);
  Proposed(0);
  sessions_[0]->Say(Accept());
  sessions_[1]->Say(Refuse("no link"));
  EXPECT_THAT(AwaitEnd(job).reason(),
              AllOf(HasSubstr("rank 1 refused the plan: no link"),
                    HasSubstr("fixes its routes")));
  Finish();
}

TEST_F(JobRunTest, DevicesThatDoNotReachEachOtherGetCpuRoutes) {
  Join(2, /*peer_access=*/false);
  policy::Plan plan = Proposed(0);
  EXPECT_EQ(plan.decoder.params, policy::ParamRoute::kFull);
  EXPECT_EQ(plan.decoder.grads, policy::GradRoute::kCpu);
}

}  // namespace
}  // namespace slidedp::hostd
