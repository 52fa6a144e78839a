// A run from join to end, with ranks that are the test.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "policy/wire.h"
#include "tests/unit/hostd_daemon/core_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

v1::WorkerMessage Accept() {
  v1::WorkerMessage message;
  message.mutable_accept();
  return message;
}

v1::WorkerMessage Refuse(const std::string& why) {
  v1::WorkerMessage message;
  message.mutable_refuse()->set_why(why);
  return message;
}

v1::WorkerMessage Ready(uint64_t sequences) {
  v1::WorkerMessage message;
  message.mutable_ready()->set_dataset_sequences(sequences);
  return message;
}

class JobRunTest : public CoreTest {
 protected:
  JobRunTest() {
    testing::WriteTinyModel(folder_.Sub("model"), {});
    spec_ = SampleSpec();
    spec_.set_model(folder_.Sub("model"));
    spec_.set_output(folder_.Sub("output"));
  }

  // Submits and lets `ranks` join; Propose has been sent.
  uint64_t Join(uint32_t ranks, bool peer_access = true) {
    spec_.set_ranks(ranks);
    StartCore();
    const uint64_t job = MustSubmit(spec_);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      sessions_.push_back(NewSession());
      sessions_[rank]->SayHello(job, rank, peer_access);
    }
    return job;
  }
  policy::Plan Proposed(uint32_t rank) {
    auto message = sessions_[rank]->Next();
    SDP_CHECK(message && message->has_propose(), "Propose");
    return *policy::FromWire(message->propose().plan());
  }
  // Everybody accepts; returns the attach connections with their segments.
  void AcceptAndAttach(uint64_t job) {
    for (auto& session : sessions_) session->Say(Accept());
    for (uint32_t rank = 0; rank < sessions_.size(); ++rank) {
      auto message = sessions_[rank]->Next();
      SDP_CHECK(message && message->has_attach(), "Attach");
      attach_requests_.emplace_back();
      attach_requests_[rank].set_job(job);
      attach_requests_[rank].set_rank(rank);
      attach_requests_[rank].set_nonce(message->attach().nonce());
      attached_.push_back(std::make_unique<FakeAttachment>(
          *loop_, *core_, geteuid(), attach_requests_[rank]));
      v1::AttachReply reply = attached_[rank]->Receive();
      SDP_CHECK(reply.error().empty(), reply.error());
    }
  }
  v1::FilesReply PassSource() {
    UniqueFd file = *OpenFile(folder_.Sub("model/model.safetensors"), O_RDONLY);
    return attached_[0]->Pass(v1::FilesMessage::SOURCE, {"model.safetensors"},
                              {file.get()});
  }
  void AllReadyAndStart() {
    for (auto& session : sessions_) {
      session->Say(Ready(spec_.dataset_sequences()));
    }
    for (auto& session : sessions_) {
      auto message = session->Next();
      SDP_CHECK(message && message->has_start(), "Start");
    }
  }
  void Finish() {
    for (auto& session : sessions_) (void)session->End();
  }

  v1::JobSpec spec_;
  std::vector<std::unique_ptr<FakeSession>> sessions_;
  std::vector<v1::AttachRequest> attach_requests_;
  std::vector<std::unique_ptr<FakeAttachment>> attached_;
};

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
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("has said nothing for 20 s"));
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
  EXPECT_EQ(Proposed(0).decoder.params, policy::ParamRoute::kSharded);
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

TEST_F(JobRunTest, OddSessionsAreRefusedAndHarmNobody) {
  spec_.set_ranks(2);
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  const uint64_t waiting = MustSubmit(spec_);
  auto good = NewSession();
  good->SayHello(job, 0);
  auto twice = NewSession();
  twice->SayHello(job, 0);
  EXPECT_THAT(twice->End(), StatusIs(absl::StatusCode::kAlreadyExists));
  auto beyond = NewSession();
  beyond->SayHello(job, 2);
  EXPECT_THAT(beyond->End(), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("no rank 2")));
  auto nowhere = NewSession();
  nowhere->SayHello(999, 0);
  EXPECT_THAT(nowhere->End(), StatusIs(absl::StatusCode::kNotFound));
  auto early = NewSession();
  early->SayHello(waiting, 0);
  EXPECT_THAT(early->End(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                     HasSubstr("PENDING")));
  auto silent = NewSession();
  silent->Say(Accept());
  EXPECT_THAT(silent->End(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                      HasSubstr("Hello")));
  auto old = NewSession();
  v1::WorkerMessage hello;
  hello.mutable_hello()->set_job(job);
  hello.mutable_hello()->set_rank(1);
  hello.mutable_hello()->set_protocol(999);
  old->Say(hello);
  EXPECT_THAT(old->End(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr("protocol 999")));
  auto cuda = NewSession();
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_device(v1::DEVICE_KIND_CUDA);
  cuda->Say(hello);
  EXPECT_THAT(cuda->End(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                    HasSubstr("CPU")));
  EXPECT_EQ(Info(job).state(), v1::CONFIGURING);
}

TEST_F(JobRunTest, MessageOutOfTurnFailsTheRank) {
  const uint64_t job = Join(1);
  v1::WorkerMessage message;
  message.mutable_output_committed()->set_path("/etc");
  sessions_[0]->Say(message);
  EXPECT_THAT(AwaitEnd(job).reason(),
              HasSubstr("rank 0 sent output_committed out of turn"));
  Finish();
}

TEST_F(JobRunTest, AttachNeedsUserRankAndFreshNonce) {
  const uint64_t job = Join(1);
  Proposed(0);
  sessions_[0]->Say(Accept());
  auto message = sessions_[0]->Next();
  ASSERT_TRUE(message && message->has_attach());
  EXPECT_EQ(message->attach().nonce().size(), 16);
  v1::AttachRequest right;
  right.set_job(job);
  right.set_rank(0);
  right.set_nonce(message->attach().nonce());
  auto refused = [&](uint32_t uid, const v1::AttachRequest& request) {
    FakeAttachment attachment(*loop_, *core_, uid, request);
    v1::AttachReply reply = attachment.Receive();
    return !reply.error().empty() && reply.segments_size() == 0;
  };
  EXPECT_TRUE(refused(geteuid() + 1, right));
  v1::AttachRequest wrong = right;
  wrong.set_nonce(std::string(16, '\0'));
  EXPECT_TRUE(refused(geteuid(), wrong));
  wrong.set_nonce(right.nonce().substr(0, 15));
  EXPECT_TRUE(refused(geteuid(), wrong));
  wrong = right;
  wrong.set_rank(1);
  EXPECT_TRUE(refused(geteuid(), wrong));
  wrong = right;
  wrong.set_job(job + 1);
  EXPECT_TRUE(refused(geteuid(), wrong));

  FakeAttachment attachment(*loop_, *core_, geteuid(), right);
  v1::AttachReply reply = attachment.Receive();
  EXPECT_EQ(reply.error(), "");
  for (const v1::SegmentInfo& segment : reply.segments()) {
    EXPECT_NE(segment.kind(), static_cast<uint32_t>(shm::SegmentKind::kState));
  }
  EXPECT_TRUE(refused(geteuid(), right));
  ASSERT_OK(Cancel(job, self_));
  AwaitEnd(job);
  Finish();
}

TEST_F(JobRunTest, BadSourceFilesFailTheJobWithTheirError) {
  struct Case {
    const char* what;
    std::function<v1::FilesReply(FakeAttachment&)> pass;
    const char* error;
  };
  folder_.Write("junk", std::string(100, 'x'));
  const Case cases[] = {
      {"junk",
       [&](FakeAttachment& a) {
         UniqueFd junk = *OpenFile(folder_.Sub("junk"), O_RDONLY);
         return a.Pass(v1::FilesMessage::SOURCE, {"junk.safetensors"},
                       {junk.get()});
       },
       "junk.safetensors"},
      {"a folder",
       [&](FakeAttachment& a) {
         UniqueFd fd = *OpenFile(folder_.path(), O_RDONLY | O_DIRECTORY);
         return a.Pass(v1::FilesMessage::SOURCE, {"model.safetensors"},
                       {fd.get()});
       },
       "model.safetensors"},
      {"more names than files",
       [&](FakeAttachment& a) {
         UniqueFd junk = *OpenFile(folder_.Sub("junk"), O_RDONLY);
         return a.Pass(v1::FilesMessage::SOURCE, {"a", "b"}, {junk.get()});
       },
       "2 names"},
      {"a path",
       [&](FakeAttachment& a) {
         UniqueFd junk = *OpenFile(folder_.Sub("junk"), O_RDONLY);
         return a.Pass(v1::FilesMessage::SOURCE, {"../a"}, {junk.get()});
       },
       "../a"},
      {"the wrong kind",
       [&](FakeAttachment& a) {
         UniqueFd junk = *OpenFile(folder_.Sub("junk"), O_RDONLY);
         return a.Pass(v1::FilesMessage::OUTPUT, {"a"}, {junk.get()});
       },
       "kind"},
      {"nothing",
       [&](FakeAttachment& a) {
         return a.Pass(v1::FilesMessage::SOURCE, {}, {});
       },
       "no files"},
  };
  StartCore();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const uint64_t job = MustSubmit(spec_);
    sessions_.clear();
    attached_.clear();
    attach_requests_.clear();
    sessions_.push_back(NewSession());
    sessions_[0]->SayHello(job, 0);
    Proposed(0);
    AcceptAndAttach(job);
    EXPECT_THAT(c.pass(*attached_[0]).error(), HasSubstr(c.error));
    const v1::JobInfo end = AwaitEnd(job);
    EXPECT_EQ(end.state(), v1::FAILED);
    EXPECT_THAT(end.reason(), HasSubstr(c.error));
    Finish();
  }
}

TEST_F(JobRunTest, CancelWakesALoadThatWaitsForFiles) {
  const uint64_t job = Join(1);
  Proposed(0);
  AcceptAndAttach(job);
  ASSERT_OK(Cancel(job, self_));
  EXPECT_EQ(AwaitEnd(job).state(), v1::CANCELLED);
  EXPECT_EQ(Info(job).reason(), "cancelled by self");
  EXPECT_THAT(sessions_[0]->End(), StatusIs(absl::StatusCode::kAborted));
}

TEST_F(JobRunTest, CancelWhileStepping) {
  const uint64_t job = Join(1);
  Proposed(0);
  AcceptAndAttach(job);
  ASSERT_EQ(PassSource().error(), "");
  AllReadyAndStart();
  ASSERT_OK(Cancel(job, self_));
  EXPECT_EQ(AwaitEnd(job).state(), v1::CANCELLED);
  EXPECT_EQ(
      shm::Versions(attached_[0]->segment(shm::SegmentKind::kVersions).data())
          .abort()
          .load(),
      static_cast<uint64_t>(shm::AbortReason::kCancelled));
  Finish();
}

TEST_F(JobRunTest, ChangedDatasetIsNoticed) {
  const uint64_t job = Join(1);
  Proposed(0);
  AcceptAndAttach(job);
  sessions_[0]->Say(Ready(99));
  EXPECT_THAT(AwaitEnd(job).reason(),
              AllOf(HasSubstr("99 sequences"), HasSubstr("has changed")));
  Finish();
}

TEST_F(JobRunTest, WorkerThatCannotBeStartedFailsTheJob) {
  spec_.set_launch(v1::LAUNCH_KIND_DAEMON);
  StartCore();
  EXPECT_THAT(AwaitEnd(MustSubmit(spec_)).reason(),
              AllOf(HasSubstr("rank 0 could not be started"),
                    HasSubstr(config_.worker_binary)));
}

TEST_F(JobRunTest, ExitOfAWorkerIsTheReasonAndItsWordsAreKept) {
  folder_.Write("worker", "#!/bin/sh\necho \"$@\"\necho trouble >&2\nexit 3\n");
  chmod(config_.worker_binary.c_str(), 0755);
  spec_.set_launch(v1::LAUNCH_KIND_DAEMON);
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  const v1::JobInfo end = AwaitEnd(job);
  EXPECT_EQ(end.state(), v1::FAILED);
  EXPECT_THAT(end.reason(), AllOf(HasSubstr("rank 0 exited with code 3"),
                                  HasSubstr("trouble")));
  v1::LogsRequest request;
  request.set_id(job);
  request.set_follow(true);
  FakeStream<v1::LogsReply> logs(*loop_, *core_);
  loop_->Post([&] { core_->Logs(self_, request, &logs); });
  EXPECT_OK(logs.End());
  ASSERT_EQ(logs.replies().size(), 2);
  EXPECT_EQ(logs.replies()[0].line(),
            absl::StrCat("--job ", job, " --rank 0 --socket ",
                         config_.control_socket()));
}

TEST_F(JobRunTest, WorkersThatIgnoreTheAbortAreKilled) {
  folder_.Write("worker",
                "#!/bin/sh\ntrap '' TERM\necho up\nwhile :; do sleep 60; "
                "done\n");
  chmod(config_.worker_binary.c_str(), 0755);
  spec_.set_launch(v1::LAUNCH_KIND_DAEMON);
  StartCore();
  const uint64_t job = MustSubmit(spec_);
  v1::LogsRequest request;
  request.set_id(job);
  request.set_follow(true);
  FakeStream<v1::LogsReply> logs(*loop_, *core_);
  loop_->Post([&] { core_->Logs(self_, request, &logs); });
  logs.AwaitReplies(1);  // it runs, and has set its trap
  ASSERT_OK_AND_ASSIGN(std::vector<WorkerRow> workers,
                       Call([&] { return journal_->Workers(); }));
  ASSERT_EQ(workers.size(), 1);
  ASSERT_OK(Cancel(job, self_));
  Tick(4);   // SIGTERM
  Tick(10);  // SIGKILL
  EXPECT_EQ(AwaitEnd(job).state(), v1::CANCELLED);
  EXPECT_OK(logs.End());
  EXPECT_NE(kill(workers[0].pid, 0), 0);
  EXPECT_TRUE(Call([&] { return journal_->Workers(); })->empty());
}

}  // namespace
}  // namespace slidedp::hostd
