// A daemon that sends what does not fit: refused, or the end, with the reason.
#include "tests/unit/worker_session/session_fixture.h"

namespace slidedp::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(SessionTest, ADaemonThatRefusesTheRankIsAFailure) {
  int code = RunWorker([](Stream& stream) {
    Next(stream);
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                        "job 7 is another user's");
  });
  EXPECT_EQ(code, 1);
  EXPECT_THAT(Log(), HasSubstr("job 7 is another user's"));
}

TEST_F(SessionTest, APlanThatIsNotTheSpecsIsRefusedAndTheNextOneTaken) {
  int code = RunWorker([this](Stream& stream) {
    Next(stream);
    const std::pair<std::function<void(v1::Propose&)>, const char*> cases[] = {
        {[](v1::Propose& p) { p.mutable_plan()->set_ranks(2); }, "ranks"},
        {[](v1::Propose& p) { p.mutable_plan()->set_version(2); }, "version"},
        {[](v1::Propose& p) { p.mutable_spec()->set_version(2); }, "version"},
        {[](v1::Propose& p) { p.mutable_plan()->set_micro_batches(1); },
         "micro_batches"},
        {[](v1::Propose& p) { p.mutable_plan()->set_sequence_length(16); },
         "sequence_length"},
        {[](v1::Propose& p) {
           p.mutable_plan()->set_update_mode(v1::UPDATE_MODE_EAGER);
         },
         "max_grad_norm"},
        {[](v1::Propose& p) {
           p.mutable_plan()->set_device(v1::DEVICE_KIND_CUDA);
         },
         "CUDA"},
        {[](v1::Propose& p) {
           p.mutable_spec()->set_device(v1::DEVICE_KIND_CUDA);
         },
         "CUDA"},
        {[](v1::Propose& p) {
           p.mutable_spec()->set_device(v1::DEVICE_KIND_AUTO);
           p.mutable_plan()->set_device(v1::DEVICE_KIND_AUTO);
         },
         "device"},
        {[](v1::Propose& p) { p.mutable_spec()->set_model_config_json("{"); },
         "config.json"},
        {[](v1::Propose& p) { p.mutable_spec()->set_steps(0); }, "steps"},
        {[](v1::Propose& p) { p.clear_plan(); }, "version"},
        {[](v1::Propose& p) { p.clear_spec(); }, "version"},
    };
    for (const auto& [change, part] : cases) {
      v1::DaemonMessage message = ProposeMessage();
      change(*message.mutable_propose());
      stream.Write(message);
      v1::WorkerMessage answer = Next(stream);
      EXPECT_TRUE(answer.has_refuse()) << part;
      EXPECT_THAT(answer.refuse().why(), HasSubstr(part));
    }
    stream.Write(ProposeMessage());
    EXPECT_TRUE(Next(stream).has_accept());
    return Leave(stream);
  });
  EXPECT_EQ(code, 0) << Log();
}

TEST_F(SessionTest, MessagesOutOfTurnAreAFailure) {
  for (auto fill : std::vector<std::function<void(v1::DaemonMessage&)>>{
           [](v1::DaemonMessage& m) { m.mutable_start(); },
           [](v1::DaemonMessage& m) { m.mutable_attach(); },
           [](v1::DaemonMessage& m) { m.mutable_open_output(); },
           [](v1::DaemonMessage& m) { m.mutable_commit_output(); },
           [](v1::DaemonMessage& m) {
             m.mutable_collective_ids()->add_ids(std::string(128, 'x'));
           },
           [](v1::DaemonMessage&) {}}) {
    int code = RunWorker([&](Stream& stream) {
      Next(stream);
      v1::DaemonMessage message;
      fill(message);
      stream.Write(message);
      v1::WorkerMessage failed = Next(stream);
      EXPECT_THAT(failed.failed().why(), HasSubstr("out of turn"))
          << message.ShortDebugString() << " and then "
          << failed.ShortDebugString();
      return grpc::Status::OK;
    });
    EXPECT_EQ(code, 1);
    // A sanitizer's report is 1, too.
    EXPECT_THAT(Log(), HasSubstr("out of turn"));
  }
}

TEST_F(SessionTest, AnAttachReplyThatDoesNotFitIsAFailure) {
  MakeState();
  using Change = std::function<void(v1::AttachReply&, std::vector<UniqueFd>&)>;
  const std::pair<Change, const char*> cases[] = {
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         r.clear_segments();
         fds.clear();
         r.set_error("nonce was used");
       },
       "nonce was used"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         r.mutable_segments()->RemoveLast();
         fds.pop_back();
       },
       "did not come"},
      {[](v1::AttachReply&, std::vector<UniqueFd>& fds) { fds.pop_back(); },
       "descriptors"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(0)->set_bytes(r.segments(0).bytes() + 4096);
       },
       "the plan says"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(1)->set_kind(r.segments(0).kind());
       },
       "twice"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(0)->set_kind(2);  // the state is not for workers
       },
       "not expected"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         // Words of the wrong segment.
         std::swap(fds[0], fds[1]);
       },
       ""},
  };
  for (const auto& [change, part] : cases) {
    int code = RunWorker([&, &change = change, &part = part](Stream& stream) {
      Join(stream);
      stream.Write(AttachMessage());
      UniqueFd connection = AcceptAttach();
      SendSegments(connection.get(), *state_, change);
      v1::WorkerMessage failed = Next(stream);
      EXPECT_TRUE(failed.has_failed()) << part;
      EXPECT_THAT(failed.failed().why(), HasSubstr(part));
      return grpc::Status::OK;
    });
    EXPECT_EQ(code, 1) << part;
  }
}

TEST_F(SessionTest, SegmentsOfAnotherPlanAreAFailure) {
  policy::Plan other = plan_;
  ++other.head_chunk_tokens;  // the same sizes, another hash
  ASSERT_OK_AND_ASSIGN(state_, hostd::HostState::Create("7", layout_, other));
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("plan_hash"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

TEST_F(SessionTest, ADatasetThatChangedSinceSubmitIsAFailure) {
  MakeState();
  testing::TokenDatasetOptions other;
  other.tokens = 1088;
  testing::WriteTokenDataset(folder_.Sub("data"), other);
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    EXPECT_THAT(Next(stream).failed().why(),
                AllOf(HasSubstr("sequences = 34"), HasSubstr("was 32"),
                      HasSubstr("submit again")));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

TEST_F(SessionTest, WhatTheDaemonSaysOfTheFilesIsTheReason) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    ReceiveFiles(connection.get(), v1::FilesMessage::SOURCE);
    SendFilesReply(connection.get(), "model.norm.weight holds a NaN");
    EXPECT_THAT(Next(stream).failed().why(),
                AllOf(HasSubstr("model.norm.weight holds a NaN"),
                      HasSubstr(folder_.Sub("model"))));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

}  // namespace
}  // namespace slidedp::session
