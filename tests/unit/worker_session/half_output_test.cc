// An output that is not finished never stays, however its rank ends.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/unit/worker_session/session_fixture.h"

namespace slidedp::session {
namespace {

using ::testing::HasSubstr;

// The three ends of a rank that has half an output on disk.
class HalfOutputTest : public SessionTest {
 protected:
  // Runs a worker to the point where its output's files are passed, then
  // `end`s it.
  int RunToOutput(const std::function<grpc::Status(Stream&)>& end) {
    MakeState();
    return RunWorker([this, end](Stream& stream) {
      Join(stream);
      Load(stream);
      v1::DaemonMessage message;
      message.mutable_open_output();
      stream.Write(message);
      ReceiveFiles(connection_.get(), v1::FilesMessage::OUTPUT);
      EXPECT_THAT(Outputs(), ::testing::ElementsAre(".out.tmp-job-7"));
      return end(stream);
    });
  }
};

TEST_F(HalfOutputTest, IsGoneAfterAnAbort) {
  int code = RunToOutput([](Stream& stream) {
    v1::DaemonMessage message;
    message.mutable_abort()->set_why("cancelled");
    stream.Write(message);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_TRUE(OutputsVanish());
}

// All that look like this worker: the sweeper does not.
TEST_F(HalfOutputTest, IsGoneAfterKill9) {
  int code = RunToOutput([this](Stream& stream) {
    std::vector<pid_t> victims;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0 || pid == getpid()) continue;
      std::ifstream file(entry.path() / "cmdline");
      std::string line((std::istreambuf_iterator<char>(file)), {});
      if (line.find(folder_.Sub("d.sock")) != std::string::npos) {
        victims.push_back(pid);
      }
    }
    EXPECT_THAT(victims, ::testing::ElementsAre(pid_));
    for (pid_t pid : victims) kill(pid, SIGKILL);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, -SIGKILL);
  EXPECT_TRUE(OutputsVanish());
}

TEST_F(HalfOutputTest, IsGoneAfterASignalToTheGroup) {
  int code = RunToOutput([this](Stream& stream) {
    kill(pid_, SIGTERM);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, -SIGTERM);
  EXPECT_TRUE(OutputsVanish());
}

TEST_F(HalfOutputTest, IsGoneAfterAFailure) {
  int code = RunToOutput([this](Stream& stream) {
    SendFilesReply(connection_.get(), "disk full");
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("disk full"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
  EXPECT_TRUE(OutputsVanish());
}

// What another process is writing is not ours to remove.
TEST_F(HalfOutputTest, AnotherProcessesTemporaryFolderStays) {
  std::string other = folder_.Sub(".out.tmp-job-7");
  ASSERT_EQ(mkdir(other.c_str(), 0755), 0);
  UniqueFd lock(open(other.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(flock(lock.get(), LOCK_EX | LOCK_NB), 0);
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::DaemonMessage message;
    message.mutable_open_output();
    stream.Write(message);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("another process"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
  EXPECT_THAT(Outputs(), ::testing::ElementsAre(".out.tmp-job-7"));
}

}  // namespace
}  // namespace slidedp::session
