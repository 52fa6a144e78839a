// Queue, permissions, journal and streams of the core.
#include <filesystem>
#include <fstream>

#include "tests/unit/hostd_daemon/core_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST_F(CoreTest, RetriedSubmitIsTheSameJob) {
  StartCore();
  ASSERT_OK_AND_ASSIGN(v1::SubmitReply first,
                       Submit(SampleSpec(), "same", self_));
  ASSERT_OK_AND_ASSIGN(v1::SubmitReply again,
                       Submit(SampleSpec(), "same", self_));
  EXPECT_EQ(again.id(), first.id());
  v1::JobSpec other = SampleSpec();
  other.set_seed(7);
  EXPECT_THAT(Submit(other, "same", self_),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("job " + std::to_string(first.id()))));
  // Another user's name for a job is another job.
  ASSERT_OK_AND_ASSIGN(v1::SubmitReply theirs,
                       Submit(SampleSpec(), "same", stranger_));
  EXPECT_NE(theirs.id(), first.id());
  // And a later daemon knows it too.
  StopCore();
  StartCore();
  ASSERT_OK_AND_ASSIGN(v1::SubmitReply later,
                       Submit(SampleSpec(), "same", self_));
  EXPECT_EQ(later.id(), first.id());
}

TEST_F(CoreTest, BadSubmitsLeaveNothing) {
  StartCore();
  for (const char* id : {"", "a b", "a/b", "\n"}) {
    EXPECT_THAT(
        Submit(SampleSpec(), id, self_),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("client_id")));
  }
  EXPECT_FALSE(Submit(SampleSpec(), std::string(65, 'a'), self_).ok());
  v1::JobSpec bad = SampleSpec();
  bad.set_ranks(0);
  EXPECT_THAT(Submit(bad, "x", self_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ranks")));
  total_bytes_ = 1 << 20;
  EXPECT_THAT(Submit(SampleSpec(), "x", self_),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("can never fit"), HasSubstr("state"))));
  v1::ListRequest all;
  all.set_ended(true);
  EXPECT_EQ(Call([&] { return core_->List(self_, all); })->jobs_size(), 0);
}

TEST_F(CoreTest, UsersDaemonStartsWorkersOfItsUserOnly) {
  own_uid_ = 1000;
  StartCore();
  v1::JobSpec spec = SampleSpec();
  spec.set_launch(v1::LAUNCH_KIND_DAEMON);
  EXPECT_THAT(Submit(spec, "x", Identity{0, true, "root"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("launch: manual")));
}

TEST_F(CoreTest, WaitingJobsSayWhy) {
  StartCore();
  const uint64_t first = MustSubmit(SampleSpec());
  const uint64_t second = MustSubmit(SampleSpec());
  const uint64_t third = MustSubmit(SampleSpec());
  EXPECT_EQ(Info(first).state(), v1::CONFIGURING);
  EXPECT_THAT(Info(first).reason(), HasSubstr("waiting for rank 0 to join"));
  EXPECT_EQ(Info(second).reason(), "waiting for job " + std::to_string(first));
  EXPECT_EQ(Info(third).reason(), "waiting for job " + std::to_string(second));

  available_bytes_ = 1 << 20;
  ASSERT_OK(Cancel(first, self_));
  EXPECT_EQ(AwaitEnd(first).state(), v1::CANCELLED);
  Tick(0);
  EXPECT_EQ(Info(second).state(), v1::PENDING);
  EXPECT_THAT(Info(second).reason(),
              AllOf(StartsWith("waiting for memory: needs"),
                    HasSubstr("1.00 MiB free")));

  available_bytes_ = uint64_t{64} << 30;
  v1::DrainRequest drain;
  drain.set_reason("new disk");
  ASSERT_OK(Call([&] { return core_->Drain(self_, drain); }));
  Tick(0);
  EXPECT_EQ(Info(second).reason(), "draining: new disk");
  EXPECT_EQ(Info(third).reason(), "draining: new disk");

  ASSERT_OK(Call([&] { return core_->Undrain(self_); }));
  EXPECT_EQ(Info(second).state(), v1::CONFIGURING);
  EXPECT_EQ(Info(third).state(), v1::PENDING);
}

TEST_F(CoreTest, JobsRunAtOnceWhileMemoryHolds) {
  config_.max_running_jobs = 3;
  StartCore();
  const uint64_t first = MustSubmit(SampleSpec());
  const uint64_t needed = Info(first).host_bytes();
  EXPECT_GT(needed, 0);
  // Room for one more, not for two: what is promised counts before it is taken.
  auto reply = Get(first);
  uint64_t segments = 0;
  for (const auto& row : reply->host_bytes()) segments += row.bytes();
  EXPECT_EQ(segments, needed);
  CheckedSpec checked = *CheckSpec(SampleSpec(), {2, 1});
  const uint64_t total =
      MakeDemand(checked.config, checked.layout, checked.plan).total_bytes();
  available_bytes_ = 3 * total - 1;
  const uint64_t second = MustSubmit(SampleSpec());
  const uint64_t third = MustSubmit(SampleSpec());
  EXPECT_EQ(Info(second).state(), v1::CONFIGURING);
  EXPECT_EQ(Info(third).state(), v1::PENDING);
  EXPECT_THAT(Info(third).reason(), StartsWith("waiting for memory"));
  available_bytes_ = 3 * total;
  Tick(0);
  EXPECT_EQ(Info(third).state(), v1::CONFIGURING);
}

TEST_F(CoreTest, StrangersSeeARedactedQueueAndNoMore) {
  StartCore();
  const uint64_t job = MustSubmit(SampleSpec());
  v1::ListRequest list;
  ASSERT_OK_AND_ASSIGN(v1::ListReply mine,
                       Call([&] { return core_->List(self_, list); }));
  EXPECT_EQ(mine.jobs(0).name(), "sample");
  ASSERT_OK_AND_ASSIGN(v1::ListReply theirs,
                       Call([&] { return core_->List(stranger_, list); }));
  ASSERT_EQ(theirs.jobs_size(), 1);
  EXPECT_EQ(theirs.jobs(0).id(), job);
  EXPECT_EQ(theirs.jobs(0).state(), v1::CONFIGURING);
  EXPECT_EQ(theirs.jobs(0).name(), "");
  EXPECT_EQ(theirs.jobs(0).reason(), "");
  EXPECT_EQ(theirs.jobs(0).client_id(), "");

  EXPECT_THAT(Cancel(job, stranger_),
              StatusIs(absl::StatusCode::kPermissionDenied));
  v1::GetRequest get;
  get.set_id(job);
  EXPECT_THAT(Call([&] { return core_->Get(stranger_, get); }),
              StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(Call([&] { return core_->Drain(stranger_, {}); }),
              StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(Call([&] { return core_->Undrain(stranger_); }),
              StatusIs(absl::StatusCode::kPermissionDenied));
  FakeStream<v1::WatchReply> watch(*loop_, *core_);
  v1::WatchRequest watched;
  watched.set_id(job);
  loop_->Post([&] { core_->Watch(stranger_, watched, &watch); });
  EXPECT_THAT(watch.End(), StatusIs(absl::StatusCode::kPermissionDenied));
  FakeStream<v1::LogsReply> logs(*loop_, *core_);
  v1::LogsRequest logged;
  logged.set_id(job);
  loop_->Post([&] { core_->Logs(stranger_, logged, &logs); });
  EXPECT_THAT(logs.End(), StatusIs(absl::StatusCode::kPermissionDenied));
  FakeSession session(*loop_, *core_, stranger_);
  session.SayHello(job, 0);
  EXPECT_THAT(session.End(), StatusIs(absl::StatusCode::kPermissionDenied));

  get.set_id(999);
  EXPECT_THAT(Call([&] { return core_->Get(self_, get); }),
              StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(Cancel(999, self_), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(CoreTest, CancelIsFinalAndRepeatable) {
  StartCore();
  const uint64_t running = MustSubmit(SampleSpec());
  const uint64_t waiting = MustSubmit(SampleSpec());
  ASSERT_OK(Cancel(waiting, self_));
  EXPECT_EQ(Info(waiting).state(), v1::CANCELLED);
  EXPECT_EQ(Info(waiting).reason(), "cancelled by self");
  EXPECT_OK(Cancel(waiting, self_));
  ASSERT_OK(Cancel(running, self_));
  EXPECT_EQ(AwaitEnd(running).state(), v1::CANCELLED);
  EXPECT_OK(Cancel(running, self_));
}

// What an earlier daemon left in each state.
TEST_F(CoreTest, RecoversEveryStateOfTheJournal) {
  uint64_t ids[7];
  {
    ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(config_.journal_file()));
    const v1::JobState states[] = {v1::PENDING,    v1::CONFIGURING, v1::RUNNING,
                                   v1::COMPLETING, v1::COMPLETED,   v1::RUNNING,
                                   v1::PENDING};
    for (int i = 0; i < 7; ++i) {
      JobRow row;
      row.client_id = std::to_string(i);
      row.uid = self_.uid;
      row.user = "self";
      row.spec = SampleSpec();
      row.state = states[i];
      row.cancel_requested = i == 5;
      // This release would not take it any more.
      if (i == 6) row.spec.set_device(v1::DEVICE_KIND_AUTO);
      ASSERT_OK_AND_ASSIGN(ids[i], journal->Insert(row, v1::JobEvent()));
    }
    // A process that is long gone, or another one by now.
    ASSERT_OK(journal->InsertWorker({ids[2], 0, getpid(), 1, "other boot"}));
    ASSERT_OK(journal->SetDrain({true, "kept", "root", 1}));
  }
  std::filesystem::create_directories(config_.log_folder(ids[2]));
  std::ofstream(config_.log_folder(ids[2]) + "/metrics.jsonl")
      << ToJsonLine([] {
           v1::StepRecord record;
           record.set_step(41);
           return record;
         }())
      << "\n";
  StartCore();
  EXPECT_EQ(Info(ids[0]).state(), v1::PENDING);
  Tick(0);
  EXPECT_EQ(Info(ids[0]).reason(), "draining: kept");
  EXPECT_EQ(Info(ids[1]).state(), v1::FAILED);
  EXPECT_EQ(Info(ids[2]).state(), v1::FAILED);
  EXPECT_EQ(Info(ids[2]).step(), 41);
  EXPECT_THAT(Info(ids[2]).reason(), HasSubstr("submit it again"));
  EXPECT_EQ(Info(ids[3]).state(), v1::FAILED);
  EXPECT_EQ(Info(ids[4]).state(), v1::COMPLETED);
  EXPECT_EQ(Info(ids[5]).state(), v1::CANCELLED);
  EXPECT_EQ(Info(ids[6]).state(), v1::FAILED);
  EXPECT_THAT(Info(ids[6]).reason(), HasSubstr("device"));
  ASSERT_OK_AND_ASSIGN(std::vector<WorkerRow> workers,
                       Call([&] { return journal_->Workers(); }));
  EXPECT_TRUE(workers.empty());
  ASSERT_OK(Call([&] { return core_->Undrain(self_); }));
  EXPECT_EQ(Info(ids[0]).state(), v1::CONFIGURING);
}

TEST_F(CoreTest, OldJobsAreForgottenWithTheirLogs) {
  config_.keep_ended_jobs = 2;
  StartCore();
  std::vector<uint64_t> jobs;
  for (int i = 0; i < 4; ++i) {
    jobs.push_back(MustSubmit(SampleSpec()));
    ASSERT_OK(Cancel(jobs.back(), self_));
    FakeStream<v1::WatchReply> stream(*loop_, *core_);
    v1::WatchRequest request;
    request.set_id(jobs.back());
    loop_->Post([&] { core_->Watch(self_, request, &stream); });
    (void)stream.End();
  }
  // A run is released in a task after its end.
  const uint64_t last = MustSubmit(SampleSpec());
  ASSERT_OK(Cancel(last, self_));
  AwaitEnd(last);
  Tick(0);
  EXPECT_THAT(Get(jobs[0]), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(Get(jobs[1]), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_FALSE(std::filesystem::exists(config_.log_folder(jobs[0])));
  EXPECT_OK(Get(last));
  // The same client_id may name a new job now.
  EXPECT_NE(Submit(SampleSpec(), "id-1", self_)->id(), jobs[0]);
}

TEST_F(CoreTest, LogsComeWithTheirRanksAndEndWithTheJob) {
  StartCore();
  v1::JobSpec spec = SampleSpec();
  spec.set_ranks(2);
  const uint64_t job = MustSubmit(spec);
  std::ofstream(config_.log_folder(job) + "/rank-0.log") << "a\nb\n";
  std::ofstream(config_.log_folder(job) + "/rank-1.log") << "c\nhalf";
  v1::LogsRequest request;
  request.set_id(job);
  request.set_rank(-1);
  FakeStream<v1::LogsReply> now(*loop_, *core_);
  loop_->Post([&] { core_->Logs(self_, request, &now); });
  EXPECT_OK(now.End());
  ASSERT_EQ(now.replies().size(), 4);
  EXPECT_EQ(now.replies()[3].line(), "half");

  request.set_follow(true);
  request.set_rank(1);
  request.set_tail(1);
  FakeStream<v1::LogsReply> follow(*loop_, *core_);
  Call([&] {
    core_->Logs(self_, request, &follow);
    return 0;
  });
  std::ofstream(config_.log_folder(job) + "/rank-1.log", std::ios::app)
      << " line\nlast";
  ASSERT_OK(Cancel(job, self_));
  EXPECT_OK(follow.End());
  ASSERT_EQ(follow.replies().size(), 2);
  EXPECT_EQ(follow.replies()[0].rank(), 1);
  EXPECT_EQ(follow.replies()[0].line(), "half line");
  EXPECT_EQ(follow.replies()[1].line(), "last");

  request.set_rank(2);
  FakeStream<v1::LogsReply> none(*loop_, *core_);
  loop_->Post([&] { core_->Logs(self_, request, &none); });
  EXPECT_THAT(none.End(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank")));
}

TEST_F(CoreTest, StopEndsJobsAndWatchers) {
  StartCore();
  const uint64_t job = MustSubmit(SampleSpec());
  const uint64_t waiting = MustSubmit(SampleSpec());
  FakeStream<v1::WatchReply> watch_job(*loop_, *core_);
  FakeStream<v1::WatchReply> watch_waiting(*loop_, *core_);
  v1::WatchRequest request;
  request.set_id(job);
  loop_->Post([&, request] { core_->Watch(self_, request, &watch_job); });
  request.set_id(waiting);
  loop_->Post([&, request] { core_->Watch(self_, request, &watch_waiting); });
  watch_waiting.AwaitReplies(1);
  std::promise<void> done;
  loop_->Post([&] { core_->Stop([&] { done.set_value(); }); });
  EXPECT_OK(watch_job.End());
  EXPECT_EQ(watch_job.replies().back().info().state(), v1::FAILED);
  EXPECT_THAT(watch_job.replies().back().info().reason(),
              HasSubstr("daemon stopped"));
  EXPECT_THAT(watch_waiting.End(), StatusIs(absl::StatusCode::kUnavailable));
  done.get_future().wait();
  EXPECT_THAT(Submit(SampleSpec(), "late", self_),
              StatusIs(absl::StatusCode::kUnavailable));
  // Not through StopCore: the core has stopped already.
  loop_->Stop();
  thread_.join();
  core_.reset();
  journal_.reset();
  StartCore();
  EXPECT_EQ(Info(job).state(), v1::FAILED);
  EXPECT_EQ(Info(waiting).state(), v1::CONFIGURING);
}

}  // namespace
}  // namespace slidedp::hostd
