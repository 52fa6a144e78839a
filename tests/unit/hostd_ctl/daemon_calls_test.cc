// The verbs against a daemon with scripted answers.
#include <algorithm>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/client.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/fake_daemon.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

class DaemonCallsTest : public ::testing::Test {
 protected:
  DaemonCallsTest() {
    runner_.environment.socket = daemon_.socket();
    runner_.environment.current_folder = folder_.path();
  }

  void WriteJob() {
    testing::WriteTinyModel(folder_.Sub("model"), {});
    testing::WriteTokenDataset(folder_.Sub("data.safetensors"), {});
    folder_.Write("job.yaml",
                  "model: model\ndata: data.safetensors\noutput: out\n"
                  "sequence_length: 64\nsteps: 10\nranks: 2\n");
  }

  void FailWith(grpc::StatusCode code, const std::string& message) {
    std::lock_guard<std::mutex> lock(daemon_.mutex);
    daemon_.error = grpc::Status(code, message);
  }

  testing::TempFolder folder_;
  FakeDaemon daemon_;
  CtlRunner runner_;
};

TEST_F(DaemonCallsTest, EveryStatusHasItsExitCode) {
  const std::pair<grpc::StatusCode, int> codes[] = {
      {grpc::StatusCode::NOT_FOUND, kExitNotFound},
      {grpc::StatusCode::PERMISSION_DENIED, kExitPermission},
      {grpc::StatusCode::UNAUTHENTICATED, kExitPermission},
      {grpc::StatusCode::FAILED_PRECONDITION, kExitWrongState},
      {grpc::StatusCode::ABORTED, kExitWrongState},
      {grpc::StatusCode::ALREADY_EXISTS, kExitWrongState},
      {grpc::StatusCode::INVALID_ARGUMENT, kExitFailure},
      {grpc::StatusCode::INTERNAL, kExitFailure},
      {grpc::StatusCode::RESOURCE_EXHAUSTED, kExitFailure},
      {grpc::StatusCode::UNIMPLEMENTED, kExitFailure},
      {grpc::StatusCode::UNAVAILABLE, kExitUnreachable},
  };
  for (const auto& [code, exit] : codes) {
    FailWith(code, "told so");
    for (const std::vector<std::string>& args :
         std::vector<std::vector<std::string>>{{"status", "7"},
                                               {"status"},
                                               {"show", "7"},
                                               {"cancel", "7"},
                                               {"logs", "7"},
                                               {"drain", "--reason", "x"},
                                               {"undrain"}}) {
      Outcome outcome = runner_.Run(args);
      EXPECT_EQ(outcome.code, exit) << args[0] << " " << code;
      if (code != grpc::StatusCode::UNIMPLEMENTED) {
        EXPECT_THAT(outcome.err, HasSubstr("told so")) << args[0];
      }
    }
  }
}

TEST_F(DaemonCallsTest, SubmitPrintsTheIdFirstAndNothingElse) {
  WriteJob();
  Outcome outcome = runner_.Run({"submit", "job.yaml"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.out, "7\n");
  EXPECT_THAT(outcome.err, HasSubstr("PENDING: waiting for memory"));
  ASSERT_EQ(daemon_.submitted.size(), 1);
  const v1::JobSpec& spec = daemon_.submitted[0].spec();
  EXPECT_EQ(spec.version(), 1);
  EXPECT_EQ(spec.steps(), 10);
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_EQ(spec.dataset_sequences(), 64);
  EXPECT_EQ(spec.model(), folder_.Sub("model"));
  EXPECT_EQ(spec.model_config_json(),
            testing::ReadWhole(folder_.Sub("model/config.json")));
  EXPECT_EQ(daemon_.submitted[0].client_id().size(), 36);
}

TEST_F(DaemonCallsTest, SubmitAsJson) {
  WriteJob();
  Outcome outcome = runner_.Run({"submit", "job.yaml", "-o", "json"});
  EXPECT_EQ(outcome.json()["api_version"], "1");
  EXPECT_EQ(outcome.json()["id"], 7);
  EXPECT_EQ(outcome.json()["state"], "PENDING");
}

TEST_F(DaemonCallsTest, ARetriedSubmitIsTheSameJob) {
  WriteJob();
  daemon_.submit_failures = 2;
  Outcome outcome = runner_.Run({"submit", "job.yaml"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  ASSERT_EQ(daemon_.submitted.size(), 3);
  EXPECT_EQ(daemon_.submitted[0].client_id(), daemon_.submitted[2].client_id());
  // A second submit is another job.
  runner_.Run({"submit", "job.yaml"});
  EXPECT_NE(daemon_.submitted[0].client_id(), daemon_.submitted[3].client_id());
}

TEST_F(DaemonCallsTest, WaitPassesOnHowTheJobEnded) {
  WriteJob();
  const std::pair<v1::JobState, int> ends[] = {{v1::COMPLETED, kExitOk},
                                               {v1::FAILED, kExitFailure},
                                               {v1::CANCELLED, kExitCancelled}};
  for (const auto& [state, code] : ends) {
    daemon_.watches = {
        {InfoReply(v1::RUNNING), StepReply(1, 2.5), InfoReply(state, 10)}};
    Outcome outcome = runner_.Run({"submit", "job.yaml", "--wait"});
    EXPECT_EQ(outcome.code, code);
    EXPECT_EQ(outcome.out, "7\n");
    EXPECT_THAT(outcome.err, Not(HasSubstr("loss")));
  }
}

TEST_F(DaemonCallsTest, FollowShowsPlainLinesWithoutATerminal) {
  WriteJob();
  daemon_.watches = {{InfoReply(v1::RUNNING), StepReply(1, 2.5),
                      StepReply(2, 2.25), StepReply(10, 1.5),
                      InfoReply(v1::COMPLETED, 10)}};
  Outcome outcome = runner_.Run({"submit", "job.yaml", "--follow"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.out, "7\n");
  EXPECT_THAT(
      outcome.err,
      AllOf(HasSubstr("job 7 is RUNNING\n"),
            HasSubstr("step 1/10  loss 2.5000"), HasSubstr("512 tokens/s"),
            HasSubstr("ETA"), HasSubstr("step 10/10  loss 1.5000"),
            HasSubstr("job 7 is COMPLETED\n"), Not(HasSubstr("\r"))));
  // Between the first and the last line 30 s have not passed.
  EXPECT_THAT(outcome.err, Not(HasSubstr("step 2/10")));
}

TEST_F(DaemonCallsTest, FollowDrawsABarOnATerminal) {
  runner_.environment.err_is_terminal = true;
  runner_.environment.err_columns = 100;
  daemon_.watches = {
      {InfoReply(v1::RUNNING), StepReply(5, 2.5), InfoReply(v1::FAILED, 5)}};
  Outcome outcome = runner_.Run({"watch", "7"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("\rstep 5/10 [====="),
                    HasSubstr("job 7 is FAILED: rank 1 exited with code 1\n")));
}

TEST_F(DaemonCallsTest, FollowAsJsonIsALineForEachRecord) {
  daemon_.watches = {{InfoReply(v1::RUNNING), StepReply(1, 2.5),
                      InfoReply(v1::COMPLETED, 10)}};
  Outcome outcome = runner_.Run({"watch", "7", "-o", "json"});
  std::vector<Json> lines = outcome.lines();
  ASSERT_EQ(lines.size(), 3);
  for (const Json& line : lines) EXPECT_EQ(line["api_version"], "1");
  EXPECT_EQ(lines[0]["job"]["state"], "RUNNING");
  EXPECT_EQ(lines[1]["step_record"]["loss"], 2.5);
  EXPECT_EQ(lines[2]["job"]["state"], "COMPLETED");
  EXPECT_THAT(outcome.err, IsEmpty());
}

TEST_F(DaemonCallsTest, FollowSurvivesARestartWithoutRepeatingSteps) {
  daemon_.watches = {{InfoReply(v1::RUNNING), StepReply(4, 2.5)},
                     {InfoReply(v1::RUNNING), StepReply(5, 2.5),
                      InfoReply(v1::COMPLETED, 10)}};
  Outcome outcome = runner_.Run({"watch", "7", "-o", "json"});
  EXPECT_EQ(outcome.code, kExitOk);
  ASSERT_EQ(daemon_.watched.size(), 2);
  EXPECT_EQ(daemon_.watched[0].from_step(), 0);
  EXPECT_EQ(daemon_.watched[1].from_step(), 4);
}

TEST_F(DaemonCallsTest, EvaluationsAreFollowedOnceAcrossAReconnection) {
  v1::WatchReply eval;
  eval.mutable_eval()->set_step(4);
  eval.mutable_eval()->set_loss(2.25);
  eval.mutable_eval()->set_best(true);
  daemon_.watches = {{InfoReply(v1::RUNNING, 3), StepReply(4, 2), eval},
                     {InfoReply(v1::RUNNING, 4), eval, StepReply(5, 2),
                      InfoReply(v1::COMPLETED, 5)}};
  Outcome outcome = runner_.Run({"watch", "7"});
  EXPECT_EQ(outcome.code, kExitOk);
  const std::string text = "evaluation after step 4: loss 2.2500, best\n";
  const size_t at = outcome.err.find(text);
  EXPECT_NE(at, std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find(text, at + 1), std::string::npos);
  daemon_.watches = {{eval, InfoReply(v1::COMPLETED, 5)}};
  const std::vector<Json> lines =
      runner_.Run({"watch", "7", "-o", "json"}).lines();
  EXPECT_EQ(lines[0]["eval_record"]["loss"], 2.25);
  EXPECT_EQ(lines[0]["eval_record"]["step"], 4);
}

TEST_F(DaemonCallsTest, ATimeoutEndsTheWaitNotTheJob) {
  WriteJob();
  Outcome outcome =
      runner_.Run({"submit", "job.yaml", "--wait", "--timeout", "0.2"});
  EXPECT_EQ(outcome.code, kExitTimeout);
  EXPECT_EQ(outcome.out, "7\n");
  EXPECT_THAT(outcome.err, HasSubstr("it goes on"));
}

TEST_F(DaemonCallsTest, CtrlCLeavesTheJobRunning) {
  std::thread presser([this] {
    while (!runner_.interrupt.armed()) std::this_thread::yield();
    runner_.interrupt.Raise();
  });
  Outcome outcome = runner_.Run({"watch", "7"});
  presser.join();
  EXPECT_EQ(outcome.code, kExitInterrupted);
  EXPECT_THAT(outcome.err, HasSubstr("job 7 goes on"));
}

TEST_F(DaemonCallsTest, StatusOutputs) {
  Outcome outcome = runner_.Run({"status"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("STATE"), HasSubstr("tiny"),
                                 HasSubstr("ada"), HasSubstr("RUNNING"),
                                 HasSubstr("3/10"), HasSubstr("3.00 GiB")));
  EXPECT_THAT(runner_.Run({"status", "--no-headers"}).out,
              Not(HasSubstr("STATE")));
  EXPECT_THAT(runner_.Run({"status", "-o", "wide"}).out, HasSubstr("LOSS"));
  EXPECT_EQ(runner_.Run({"status", "-o", "name"}).out, "7\n");
  EXPECT_THAT(runner_.Run({"status", "-a"}).out,
              HasSubstr("rank 1 exited with code 1"));

  Json all = runner_.Run({"status", "-o", "json"}).json();
  EXPECT_EQ(all["api_version"], "1");
  ASSERT_EQ(all["jobs"].size(), 1);
  EXPECT_EQ(all["jobs"][0]["state"], "RUNNING");
  EXPECT_EQ(all["jobs"][0]["submitted"], "2023-11-14T22:13:20.000000Z");
  EXPECT_TRUE(all["jobs"][0]["ended"].is_null());
  EXPECT_EQ(all["draining"], false);

  Json one = runner_.Run({"status", "7", "-o", "json"}).json();
  EXPECT_EQ(one["job"]["id"], 7);
  EXPECT_EQ(runner_.Run({"status", "8"}).code, kExitNotFound);
}

TEST_F(DaemonCallsTest, HostileTextDoesNotReachTheTerminal) {
  daemon_.job.set_reason("evil \x1b]0;title\x07\nsecond line");
  EXPECT_THAT(
      runner_.Run({"status"}).out,
      AllOf(HasSubstr("evil ?]0;title??second line"), Not(HasSubstr("\x1b"))));
  v1::LogsReply line;
  line.set_line("\x1b[2Jgone");
  daemon_.logs = {line};
  EXPECT_EQ(runner_.Run({"logs", "7"}).out, "[rank 0] ?[2Jgone\n");
}

TEST_F(DaemonCallsTest, ShowOutputs) {
  daemon_.get.mutable_spec()->set_model("/models/x");
  daemon_.get.mutable_plan()->set_window_slots(3);
  v1::JobEvent& event = *daemon_.get.add_events();
  event.set_time_us(1'700'000'000'000'000);
  event.set_state(v1::PENDING);
  event.set_text("submitted");
  v1::NamedBytes& bytes = *daemon_.get.add_host_bytes();
  bytes.set_name("params");
  bytes.set_bytes(12345);
  *daemon_.get.mutable_last_step() = StepReply(3, 2.5).step();
  Outcome outcome = runner_.Run({"show", "7"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("/models/x"), HasSubstr("12345"),
                                 HasSubstr("submitted"), HasSubstr("window 3"),
                                 HasSubstr("loss 2.5")));
  Json json = runner_.Run({"show", "7", "-o", "json"}).json();
  EXPECT_EQ(json["api_version"], "1");
  EXPECT_EQ(json["spec"]["model"], "/models/x");
  EXPECT_EQ(json["plan"]["window_slots"], 3);
  EXPECT_EQ(json["host_bytes"]["params"], 12345);
  EXPECT_EQ(json["events"][0]["text"], "submitted");
  EXPECT_EQ(json["last_step"]["loss"], 2.5);
  EXPECT_EQ(runner_.Run({"show", "7", "-o", "name"}).out, "7\n");
}

TEST_F(DaemonCallsTest, ALossThatIsNotANumberIsNullInJson) {
  daemon_.watches = {{StepReply(1, std::nan("")), InfoReply(v1::FAILED)}};
  std::vector<Json> lines = runner_.Run({"watch", "7", "-o", "json"}).lines();
  EXPECT_TRUE(lines[0]["step_record"]["loss"].is_null());
}

TEST_F(DaemonCallsTest, LogsAskForWhatWasAskedFor) {
  v1::LogsReply first, second;
  first.set_rank(0);
  first.set_line("hello");
  second.set_rank(1);
  second.set_line("world");
  daemon_.logs = {first, second};
  EXPECT_EQ(runner_.Run({"logs", "7", "--tail", "5"}).out,
            "[rank 0] hello\n[rank 1] world\n");
  EXPECT_EQ(runner_.Run({"logs", "7", "--rank", "1", "-f"}).out,
            "hello\nworld\n");
  ASSERT_EQ(daemon_.logs_asked.size(), 2);
  EXPECT_EQ(daemon_.logs_asked[0].rank(), -1);
  EXPECT_EQ(daemon_.logs_asked[0].tail(), 5);
  EXPECT_FALSE(daemon_.logs_asked[0].follow());
  EXPECT_EQ(daemon_.logs_asked[1].rank(), 1);
  EXPECT_TRUE(daemon_.logs_asked[1].follow());
  std::vector<Json> lines = runner_.Run({"logs", "7", "-o", "json"}).lines();
  EXPECT_EQ(lines[1]["rank"], 1);
  EXPECT_EQ(lines[1]["line"], "world");
}

TEST_F(DaemonCallsTest, CancelOfSeveralJobsGoesOnAfterAFailure) {
  Outcome outcome = runner_.Run({"cancel", "7", "8"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_EQ(outcome.out, "7\n8\n");
  daemon_.watches = {{InfoReply(v1::CANCELLED)}};
  EXPECT_EQ(runner_.Run({"cancel", "7", "--wait"}).code, kExitOk);
  FailWith(grpc::StatusCode::FAILED_PRECONDITION, "has ended");
  outcome = runner_.Run({"cancel", "7", "8"});
  EXPECT_EQ(outcome.code, kExitWrongState);
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 2);
}

TEST_F(DaemonCallsTest, DrainShowsInStatus) {
  EXPECT_EQ(runner_.Run({"drain", "--reason", "new disk"}).code, kExitOk);
  Outcome outcome = runner_.Run({"status"});
  EXPECT_THAT(outcome.err, HasSubstr("new disk"));
  EXPECT_EQ(runner_.Run({"status", "-o", "json"}).json()["drain_reason"],
            "new disk");
  Json json = runner_.Run({"undrain", "-o", "json"}).json();
  EXPECT_EQ(json["draining"], false);
}

TEST_F(DaemonCallsTest, VersionShowsBoth) {
  EXPECT_THAT(runner_.Run({"version"}).out,
              AllOf(HasSubstr("slidedpctl "), HasSubstr("slidedpd   9.8.7")));
  Json json = runner_.Run({"version", "-o", "json"}).json();
  EXPECT_EQ(json["daemon"]["pid"], 4711);
  EXPECT_EQ(json["daemon"]["started"], "2023-11-14T22:13:20.123456Z");
}

TEST_F(DaemonCallsTest, DoctorChecksTheDaemonsProtocol) {
  runner_.environment.system_root = "";
  Outcome outcome = runner_.Run({"doctor", "-o", "json"});
  Json json = outcome.json();
  EXPECT_EQ(json["findings"].back()["check"], "daemon");
  EXPECT_EQ(json["findings"].back()["health"], "ok") << json.dump(1);
  daemon_.protocol = 99;
  outcome = runner_.Run({"doctor", "-o", "json"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_EQ(outcome.json()["findings"].back()["health"], "fail");
}

TEST(ClientIdTest, IsAVersion4Uuid) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    std::string id = NewClientId();
    ASSERT_EQ(id.size(), 36);
    EXPECT_EQ(id[14], '4');
    EXPECT_NE(std::string("89ab").find(id[19]), std::string::npos);
    for (size_t at : {8, 13, 18, 23}) EXPECT_EQ(id[at], '-');
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 1000);
}

}  // namespace
}  // namespace slidedp::ctl
