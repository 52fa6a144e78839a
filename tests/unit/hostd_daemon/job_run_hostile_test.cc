// Ranks that do what they should not, and workers that die.
#include <signal.h>
#include <sys/stat.h>

#include <functional>

#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
                                    HasSubstr("start it with --device cpu")));
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
                         config_.control_socket(), " --device cpu"));
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
