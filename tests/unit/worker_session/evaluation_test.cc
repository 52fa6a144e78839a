// A worker process that evaluates, and writes scalars.
#include <cmath>
#include <filesystem>
#include <thread>

#include "tests/unit/worker_session/session_fixture.h"

namespace slidedp::session {
namespace {

using ::testing::HasSubstr;

class SessionEvalTest : public SessionTest {
 protected:
  SessionEvalTest() {
    v1::Evaluation& eval = *spec_.mutable_eval();
    eval.set_data(folder_.Sub("data"));
    eval.set_max_sequences(3);
    eval.set_dataset_sequences(32);
    eval.set_dataset_tokens(1024);
    eval.set_dataset_valid_tokens(3 * 31);
    eval.set_dataset_crc32c(spec_.sources(0).crc32c());
  }
  static void Answer(Stream& stream, uint64_t step, bool stop) {
    v1::DaemonMessage message;
    message.mutable_eval_verdict()->set_step(step);
    message.mutable_eval_verdict()->set_stop(stop);
    stream.Write(message);
  }
};

TEST_F(SessionEvalTest, EvaluatesBeforeAndAfterAndWritesScalars) {
  spec_.set_tensorboard(folder_.Sub("runs/tiny"));
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    std::unique_ptr<hostd::UpdateEngine> engine = StartEngine();
    Begin(stream);
    v1::DaemonMessage message;
    for (uint64_t step : {0, 2}) {
      v1::WorkerMessage report = Next(stream);
      EXPECT_EQ(report.eval_report().step(), step);
      EXPECT_EQ(report.eval_report().valid_tokens(), 93u);
      EXPECT_NEAR(report.eval_report().loss_sum() / 93, std::log(256), 0.5);
      message.mutable_record()->mutable_eval()->set_step(step);
      stream.Write(message);
      Answer(stream, step, false);
    }
    EXPECT_TRUE(Next(stream).has_steps_done());
    engine->Stop();
    return Leave(stream);
  });
  EXPECT_EQ(code, 0) << Log();
  std::vector<std::filesystem::path> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(folder_.Sub("runs/tiny"))) {
    files.push_back(entry.path());
  }
  ASSERT_EQ(files.size(), 1u);
  EXPECT_THAT(files[0].filename().string(), HasSubstr("events.out.tfevents."));
  const std::string events = testing::ReadWhole(files[0]);
  EXPECT_THAT(events, HasSubstr("brain.Event:2"));
  EXPECT_LT(events.find("eval/loss"), events.rfind("eval/loss"));
}

TEST_F(SessionEvalTest, AVerdictMayEndTheJob) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    Begin(stream);
    EXPECT_TRUE(Next(stream).has_eval_report());
    Answer(stream, 0, true);
    EXPECT_TRUE(Next(stream).has_steps_done());
    EXPECT_EQ(state_->reports().step(0, 0).begun.value.load(), 0u);
    return Leave(stream);
  });
  EXPECT_EQ(code, 0) << Log();
}

TEST_F(SessionEvalTest, AVerdictOfAnotherEvaluationIsAnError) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    Begin(stream);
    EXPECT_TRUE(Next(stream).has_eval_report());
    Answer(stream, 1, false);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("one after step 1"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

TEST_F(SessionEvalTest, AChangedFileIsAnError) {
  spec_.mutable_eval()->set_dataset_tokens(1000);
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    connection_ = AcceptAttach();
    SendSegments(connection_.get(), *state_);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("was 1000"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

}  // namespace
}  // namespace slidedp::session
