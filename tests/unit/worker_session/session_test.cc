// slidedp-worker as a process, against a daemon that the test plays: every way
// to end has its exit code, says why, and leaves nothing behind.
#include <signal.h>

#include <filesystem>
#include <thread>

#include "tests/unit/worker_session/session_fixture.h"

namespace slidedp::session {
namespace {

using ::testing::HasSubstr;

TEST_F(SessionTest, AWholeJobLeavesWithZeroAndATrainedModel) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    std::unique_ptr<hostd::UpdateEngine> engine = StartEngine();
    Begin(stream);
    v1::DaemonMessage message;
    EXPECT_TRUE(Next(stream).has_steps_done());
    while (engine->steps_done() < spec_.steps()) std::this_thread::yield();
    engine->Stop();
    message.mutable_open_output();
    stream.Write(message);
    auto files = ReceiveFiles(connection_.get(), v1::FilesMessage::OUTPUT);
    EXPECT_EQ(files.size(), source_->files().size());
    std::vector<int> fds;
    for (const auto& file : files) fds.push_back(file.second.get());
    EXPECT_OK(hostd::WriteParameters(*source_, *state_, fds));
    SendFilesReply(connection_.get());
    EXPECT_TRUE(Next(stream).has_output_opened());
    EXPECT_FALSE(std::filesystem::exists(folder_.Sub("out")));
    message.mutable_commit_output();
    stream.Write(message);
    v1::WorkerMessage committed = Next(stream);
    EXPECT_EQ(committed.output_committed().path(), folder_.Sub("out"));
    return Leave(stream);
  });
  EXPECT_EQ(code, 0) << Log();
  EXPECT_EQ(steps_, 2);
  EXPECT_THAT(Outputs(), ::testing::ElementsAre("out"));
  ASSERT_OK_AND_ASSIGN(model::TensorSource trained,
                       model::OpenModelFolder(folder_.Sub("out")));
  EXPECT_OK(model::ValidateSource(layout_, trained));
  EXPECT_NE(testing::ReadWhole(folder_.Sub("out/model.safetensors")),
            testing::ReadWhole(folder_.Sub("model/model.safetensors")));
}

TEST_F(SessionTest, WithoutADaemonItIsGone) {
  StartWorker();
  EXPECT_EQ(WaitForWorker(), 4);
  EXPECT_THAT(Log(), HasSubstr("connection to the daemon"));
}

// In each of these the main thread is inside a step that never ends: nobody
// applies the gradients.
TEST_F(SessionTest, AnAbortMessageEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    Begin(stream);
    AwaitStep();
    v1::DaemonMessage message;
    message.mutable_abort()->set_why("rank 1 was killed");
    stream.Write(message);
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_THAT(Log(), HasSubstr("aborted: rank 1 was killed"));
}

TEST_F(SessionTest, TheAbortWordEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    Begin(stream);
    AwaitStep();
    state_->versions().abort().store(
        static_cast<uint64_t>(shm::AbortReason::kRankLost));
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_THAT(Log(), HasSubstr("another rank was lost"));
}

TEST_F(SessionTest, ALostDaemonEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    Begin(stream);
    AwaitStep();
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "shutting down");
  });
  EXPECT_EQ(code, 4);
  EXPECT_THAT(Log(), HasSubstr("shutting down"));
}

TEST_F(SessionTest, HeartbeatsComeInTheStreamAndInTheWord) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::WorkerMessage message;
    for (int beats = 0; beats < 2;) {
      if (!stream.Read(&message)) break;
      if (!message.has_heartbeat()) continue;
      ++beats;
      EXPECT_GT(message.heartbeat().pss_bytes(), 0);
    }
    uint64_t first = state_->reports().heartbeat(0).load();
    EXPECT_GT(first, 0);
    while (state_->reports().heartbeat(0).load() == first) {
      std::this_thread::yield();
    }
    v1::DaemonMessage leave;
    leave.mutable_leave();
    stream.Write(leave);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 0) << Log();
}

}  // namespace
}  // namespace slidedp::session
