// A run's checkpoints and restarts, of which the test is rank 0: well behaved,
// unlucky and hostile.
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "common/base/backoff.h"
#include "common/checkpoint/folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/checkpoint/reader.h"
#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::HasSubstr;

class JobRunCheckpointTest : public JobRunTest {
 protected:
  JobRunCheckpointTest() {
    spec_.set_steps(3);
    spec_.mutable_checkpoint()->set_folder(folder_.Sub("checkpoints"));
    spec_.mutable_checkpoint()->set_every_steps(2);
    spec_.mutable_checkpoint()->set_keep(2);
    auto source = model::OpenModelFolder(folder_.Sub("model"));
    SDP_CHECK(source.ok(), source.status().ToString());
    layout_ = model::MakeStateLayout(testing::TinyConfig({}));
    files_ = *checkpoint::MakeFiles(layout_, *source);
  }
  ~JobRunCheckpointTest() override {
    if (trainer_.joinable()) trainer_.join();
  }

  // Until the first checkpoint is asked for.
  uint64_t Train() {
    const uint64_t job = Join(1);
    plan_ = Proposed(0);
    AcceptAndAttach(job);
    SDP_CHECK(PassSource().error().empty(), "source");
    AllReadyAndStart();
    trainer_ = std::thread([this] {
      TrainOnNothing(*attached_[0], layout_, plan_, 0, spec_.steps());
    });
    auto message = sessions_[0]->Next();
    SDP_CHECK(message && message->has_open_checkpoint(), "OpenCheckpoint");
    EXPECT_EQ(message->open_checkpoint().step(), 2u);
    return job;
  }
  std::unique_ptr<checkpoint::NewCheckpoint> Make(uint64_t step = 2) {
    auto made = checkpoint::NewCheckpoint::Create(
        spec_.checkpoint().folder(), step, spec_.model(), files_, "job-1");
    SDP_CHECK(made.ok(), made.status().ToString());
    return *std::move(made);
  }
  void Pass(const checkpoint::NewCheckpoint& made) {
    std::vector<std::string> names;
    std::vector<int> fds;
    for (size_t i = 0; i < files_.size(); ++i) {
      names.push_back(files_[i].name);
      fds.push_back(made.fds()[i].get());
    }
    attached_[0]->Send(v1::FilesMessage::CHECKPOINT, names, fds);
  }
  // The daemon drops it for a reason that has `what`; rank 0 agrees.
  void ExpectDropped(const std::string& what) {
    auto message = sessions_[0]->Next();
    ASSERT_TRUE(message && message->has_drop_checkpoint());
    EXPECT_THAT(message->drop_checkpoint().why(), HasSubstr(what));
    v1::WorkerMessage failed;
    failed.mutable_checkpoint_failed()->set_why("dropped");
    sessions_[0]->Say(failed);
  }
  // The steps go on to their end, and the output is asked for.
  void ExpectGoesOn() {
    trainer_.join();
    v1::WorkerMessage done;
    done.mutable_steps_done();
    sessions_[0]->Say(done);
    auto message = sessions_[0]->Next();
    ASSERT_TRUE(message && message->has_open_output());
  }
  v1::JobProgress AwaitAttempt(uint64_t job, uint32_t attempts) {
    Backoff backoff;
    while (true) {
      const v1::JobInfo info = Info(job);
      if (info.state() == v1::CONFIGURING &&
          info.progress().attempts() == attempts) {
        return info.progress();
      }
      backoff.Pause();
    }
  }

  model::StateLayout layout_;
  policy::Plan plan_;
  std::vector<checkpoint::File> files_;
  std::thread trainer_;
};

TEST_F(JobRunCheckpointTest, IsWrittenCommittedAndTold) {
  const uint64_t job = Train();
  auto made = Make();
  Pass(*made);
  auto message = sessions_[0]->Next();
  ASSERT_TRUE(message && message->has_commit_checkpoint());
  const auto manifest =
      checkpoint::ParseManifest(message->commit_checkpoint().manifest(), "m");
  ASSERT_OK(manifest);
  EXPECT_EQ(manifest->step, 2u);
  EXPECT_EQ(manifest->updates, 2u);
  // Of both steps, though the last one's record comes after its planes.
  EXPECT_EQ(manifest->memory.losses.size(), 2u);
  ASSERT_OK(made->Commit(*manifest));
  EXPECT_TRUE(Info(job).progress().checkpointing());
  v1::WorkerMessage committed;
  committed.mutable_checkpoint_committed()->set_path(made->path());
  sessions_[0]->Say(committed);
  ExpectGoesOn();
  const v1::JobProgress progress = Info(job).progress();
  EXPECT_EQ(progress.checkpoint_step(), 2u);
  EXPECT_EQ(progress.checkpoint_path(), made->path());
  EXPECT_EQ(progress.checkpoints_ended(), 1u);
  EXPECT_FALSE(progress.checkpointing());
  const auto stored = checkpoint::ReadManifest(made->path());
  ASSERT_OK(stored);
  for (const checkpoint::FileEntry& entry : stored->files) {
    EXPECT_OK(checkpoint::CheckChecksum(made->path(), entry));
  }
}

TEST_F(JobRunCheckpointTest, TheLastStepIsSavedThoughAnotherSaveWasUnderWay) {
  spec_.set_steps(4);
  Train();
  for (uint64_t step : {2, 4}) {
    auto made = Make(step);
    Pass(*made);
    auto message = sessions_[0]->Next();
    ASSERT_TRUE(message && message->has_commit_checkpoint());
    const auto manifest =
        checkpoint::ParseManifest(message->commit_checkpoint().manifest(), "m");
    ASSERT_OK(manifest);
    EXPECT_EQ(manifest->step, step);
    if (step == 2) {
      trainer_.join();
      v1::WorkerMessage done;
      done.mutable_steps_done();
      sessions_[0]->Say(done);
    }
    ASSERT_OK(made->Commit(*manifest));
    v1::WorkerMessage committed;
    committed.mutable_checkpoint_committed()->set_path(made->path());
    sessions_[0]->Say(committed);
    message = sessions_[0]->Next();
    ASSERT_TRUE(message);
    EXPECT_EQ(message->has_open_checkpoint(), step == 2);
    EXPECT_EQ(message->has_open_output(), step == 4);
  }
}

TEST_F(JobRunCheckpointTest, RanksThatCanNotMakeFilesTrainOn) {
  const uint64_t job = Train();
  attached_[0]->Send(v1::FilesMessage::CHECKPOINT, {}, {}, "no room");
  ExpectDropped("no room");
  ExpectGoesOn();
  const v1::JobInfo info = Info(job);
  EXPECT_EQ(info.progress().failures_in_a_row(), 1u);
  EXPECT_THAT(info.progress().last_failure(), HasSubstr("no room"));
}

TEST_F(JobRunCheckpointTest, FilesThatAreNotTheCheckpointsAreRefused) {
  Train();
  auto made = Make();
  ASSERT_EQ(ftruncate(made->fds().back().get(), 7), 0);
  Pass(*made);
  ExpectDropped("has 7 bytes");
  ExpectGoesOn();
}

TEST_F(JobRunCheckpointTest, FilesThatCanNotBeWrittenAreRefused) {
  Train();
  auto made = Make();
  std::vector<std::string> names;
  std::vector<int> fds;
  UniqueFd read_only = *OpenFile(folder_.Sub("model/config.json"), O_RDONLY);
  for (const checkpoint::File& file : files_) {
    names.push_back(file.name);
    fds.push_back(read_only.get());
  }
  attached_[0]->Send(v1::FilesMessage::CHECKPOINT, names, fds);
  ExpectDropped("not open for writing");
  ExpectGoesOn();
}

TEST_F(JobRunCheckpointTest, WordsOutOfTurnEndTheRun) {
  const uint64_t job = Train();
  v1::WorkerMessage committed;
  committed.mutable_checkpoint_committed()->set_path("/x");
  sessions_[0]->Say(committed);
  EXPECT_THAT(AwaitEnd(job).reason(), HasSubstr("out of turn"));
}

TEST_F(JobRunCheckpointTest, ACancelWhileFilesAreAwaitedEndsIt) {
  const uint64_t job = Train();
  EXPECT_OK(Cancel(job, self_));
  EXPECT_EQ(AwaitEnd(job).state(), v1::CANCELLED);
}

TEST_F(JobRunCheckpointTest, ALostRankCostsARetryAndThenTheJob) {
  spec_.set_retries(1);
  const uint64_t job = Train();
  sessions_[0]->Break();
  EXPECT_EQ(AwaitAttempt(job, 2).retries_used(), 1u);
  auto again = NewSession();
  again->SayHello(job, 0);
  auto message = again->Next();
  ASSERT_TRUE(message && message->has_propose());
  EXPECT_EQ(message->propose().attempt(), 1u);
  EXPECT_EQ(message->propose().resume(), "auto");
  again->Break();
  const v1::JobInfo end = AwaitEnd(job);
  EXPECT_EQ(end.state(), v1::FAILED);
  EXPECT_EQ(end.progress().retries_used(), 1u);
}

class JobRunResumeTest : public JobRunCheckpointTest {
 protected:
  // Attached, and the model's files are passed.
  uint64_t Attach() {
    spec_.set_resume("auto");
    const uint64_t job = Join(1);
    plan_ = Proposed(0);
    AcceptAndAttach(job);
    model_ = *OpenFile(folder_.Sub("model/model.safetensors"), O_RDONLY);
    attached_[0]->Send(v1::FilesMessage::SOURCE, {"model.safetensors"},
                       {model_.get()});
    return job;
  }
  v1::FilesReply PassGarbage() {
    const std::string path = folder_.Write("manifest", "{\"format\": 1}");
    UniqueFd fd = *OpenFile(path, O_RDONLY);
    return attached_[0]->Pass(v1::FilesMessage::RESUME,
                              {checkpoint::kManifestFile}, {fd.get()});
  }
  UniqueFd model_;
};

TEST_F(JobRunResumeTest, WithoutCheckpointsTheModelIsLoaded) {
  Attach();
  EXPECT_EQ(attached_[0]->Pass(v1::FilesMessage::RESUME, {}, {}).error(), "");
  sessions_[0]->Say(Ready(spec_.dataset_sequences()));
  auto message = sessions_[0]->Next();
  ASSERT_TRUE(message && message->has_start());
  EXPECT_EQ(message->start().first_step(), 0u);
}

TEST_F(JobRunResumeTest, DamagedOnesAreAnsweredAndNeverBecomeTheModel) {
  const uint64_t job = Attach();
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(PassGarbage().error(), HasSubstr("manifest.json"));
  }
  EXPECT_THAT(attached_[0]->Pass(v1::FilesMessage::RESUME, {}, {}).error(),
              HasSubstr("manifest.json"));
  const v1::JobInfo end = AwaitEnd(job);
  EXPECT_EQ(end.state(), v1::FAILED);
  EXPECT_THAT(end.reason(), HasSubstr("manifest.json"));
}

}  // namespace
}  // namespace slidedp::hostd
