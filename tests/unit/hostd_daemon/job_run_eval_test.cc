// Evaluations of a run whose ranks are the test.
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class EvalTest : public JobRunTest {
 protected:
  EvalTest() {
    spec_.mutable_eval()->set_data("/data/held-out");
    spec_.mutable_eval()->set_every_steps(1);
    spec_.mutable_eval()->set_max_sequences(4);
    spec_.mutable_eval()->set_dataset_sequences(8);
    spec_.mutable_eval()->set_dataset_tokens(100);
    spec_.mutable_eval()->set_dataset_valid_tokens(50);
  }

  // Up to Start; the first evaluation is due.
  void Begin(uint32_t ranks) {
    job_ = Join(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) plan_ = Proposed(rank);
    AcceptAndAttach(job_);
    SDP_CHECK(PassSource().error().empty(), "source");
    AllReadyAndStart();
    checked_ = *CheckSpec(spec_, {2, 1});
  }
  void Report(uint32_t rank, uint64_t step, double loss_sum,
              uint64_t valid_tokens) {
    v1::WorkerMessage message;
    message.mutable_eval_report()->set_step(step);
    message.mutable_eval_report()->set_loss_sum(loss_sum);
    message.mutable_eval_report()->set_valid_tokens(valid_tokens);
    message.mutable_eval_report()->set_seconds(0.5);
    sessions_[rank]->Say(message);
  }
  // What the rank is told next; records for TensorBoard are passed over.
  v1::EvalVerdict Verdict(uint32_t rank) {
    auto message = sessions_[rank]->Next();
    SDP_CHECK(message && message->has_eval_verdict(), "EvalVerdict");
    return message->eval_verdict();
  }
  // Both ranks make one step.
  void Step(uint64_t step) {
    std::thread other([&] {
      TrainOnNothing(*attached_[1], checked_.layout, plan_, 1, step, 1, 120);
    });
    TrainOnNothing(*attached_[0], checked_.layout, plan_, 0, step, 1, 120);
    other.join();
  }

  uint64_t job_ = 0;
  policy::Plan plan_;
  CheckedSpec checked_;
};

TEST_F(EvalTest, RanksPartsAreAddedAndComeAfterTheirStep) {
  Begin(2);
  FakeStream<v1::WatchReply> watch(*loop_, *core_);
  v1::WatchRequest request;
  request.set_id(job_);
  loop_->Post([&] { core_->Watch(self_, request, &watch); });
  Report(1, 0, 100, 20);
  Report(0, 0, 50, 30);
  EXPECT_FALSE(Verdict(0).stop());
  EXPECT_EQ(Verdict(1).step(), 0u);
  Step(0);
  Report(0, 1, 40, 30);
  Report(1, 1, 60, 20);
  EXPECT_EQ(Verdict(0).step(), 1u);
  EXPECT_EQ(Verdict(1).step(), 1u);
  EXPECT_EQ(Info(job_).eval_loss(), 2.0);
  EXPECT_EQ(Info(job_).best_eval_step(), 1u);
  EXPECT_OK(Cancel(job_, self_));
  Finish();
  EXPECT_OK(watch.End());
  std::vector<std::string> order;
  for (const v1::WatchReply& reply : watch.replies()) {
    if (reply.has_step()) order.push_back("step");
    if (!reply.has_eval()) continue;
    order.push_back("eval");
    EXPECT_EQ(reply.eval().valid_tokens(), 50u);
    EXPECT_EQ(reply.eval().sequences(), 4u);
    EXPECT_EQ(reply.eval().loss(), reply.eval().step() == 0 ? 3.0 : 2.0);
    EXPECT_TRUE(reply.eval().best());
  }
  EXPECT_THAT(order, ElementsAre("eval", "step", "eval"));
}

TEST_F(EvalTest, EarlyStopEndsTheJobAsComplete) {
  spec_.mutable_early_stop()->set_patience(1);
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Report(rank, 0, 50, 25);
  EXPECT_FALSE(Verdict(0).stop());
  EXPECT_FALSE(Verdict(1).stop());
  Step(0);
  for (uint32_t rank : {0u, 1u}) Report(rank, 1, 60, 25);
  EXPECT_TRUE(Verdict(0).stop());
  EXPECT_TRUE(Verdict(1).stop());
  v1::WorkerMessage steps_done;
  steps_done.mutable_steps_done();
  for (auto& session : sessions_) session->Say(steps_done);
  auto open = sessions_[0]->Next();
  ASSERT_TRUE(open && open->has_open_output());
  std::filesystem::copy_file(folder_.Sub("model/model.safetensors"),
                             folder_.Sub("trained"));
  UniqueFd trained = *OpenFile(folder_.Sub("trained"), O_RDWR);
  ASSERT_EQ(attached_[0]
                ->Pass(v1::FilesMessage::OUTPUT, {"model.safetensors"},
                       {trained.get()})
                .error(),
            "");
  v1::WorkerMessage message;
  message.mutable_output_opened();
  sessions_[0]->Say(message);
  ASSERT_TRUE(sessions_[0]->Next()->has_commit_output());
  message.mutable_output_committed()->set_path(spec_.output());
  sessions_[0]->Say(message);
  Finish();
  const v1::JobInfo end = AwaitEnd(job_);
  EXPECT_EQ(end.state(), v1::COMPLETED);
  EXPECT_EQ(end.step(), 1u);
  EXPECT_THAT(end.reason(),
              HasSubstr("stopped early after step 1 of 3: 1 evaluations in a "
                        "row were not lower"));
}

TEST_F(EvalTest, AReportOutOfTurnIsTheRanksFailure) {
  Begin(2);
  Report(0, 0, 50, 25);
  Report(1, 1, 50, 25);
  EXPECT_THAT(AwaitEnd(job_).reason(),
              HasSubstr("rank 1 reports the evaluation after step 1, which is "
                        "not its turn"));
  Finish();
}

TEST_F(EvalTest, LabelsThatAreNotTheFilesEndTheJob) {
  Begin(2);
  Report(0, 0, 50, 25);
  Report(1, 0, 50, 26);
  EXPECT_THAT(AwaitEnd(job_).reason(),
              HasSubstr("the ranks evaluated 51 labels of /data/held-out, "
                        "there were 50"));
  Finish();
}

TEST_F(JobRunTest, AReportWithoutEvaluationsIsUnexpected) {
  const uint64_t job = Join(1);
  Proposed(0);
  AcceptAndAttach(job);
  ASSERT_EQ(PassSource().error(), "");
  AllReadyAndStart();
  v1::WorkerMessage message;
  message.mutable_eval_report();
  sessions_[0]->Say(message);
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("eval_report out of turn"));
  Finish();
}

TEST_F(EvalTest, RankZeroGetsTheRecordsForTensorBoard) {
  spec_.set_tensorboard("/home/user/runs");
  Begin(1);
  Report(0, 0, 100, 50);
  auto record = sessions_[0]->Next();
  ASSERT_TRUE(record && record->has_record());
  EXPECT_EQ(record->record().eval().loss(), 2.0);
  EXPECT_EQ(Verdict(0).step(), 0u);
  TrainOnNothing(*attached_[0], checked_.layout, plan_, 0, 0, 1, 120);
  record = sessions_[0]->Next();
  ASSERT_TRUE(record && record->has_record());
  EXPECT_EQ(record->record().step().step(), 1u);
  EXPECT_OK(Cancel(job_, self_));
  Finish();
}

}  // namespace
}  // namespace slidedp::hostd
