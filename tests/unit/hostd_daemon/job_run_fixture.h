// A job of which the test is every rank.
#pragma once

#include <fcntl.h>

#include <memory>
#include <string>
#include <vector>

#include "policy/wire.h"
#include "tests/unit/hostd_daemon/core_fixture.h"

namespace slidedp::hostd {

inline v1::WorkerMessage Accept() {
  v1::WorkerMessage message;
  message.mutable_accept();
  return message;
}

inline v1::WorkerMessage Refuse(const std::string& why) {
  v1::WorkerMessage message;
  message.mutable_refuse()->set_why(why);
  return message;
}

inline v1::WorkerMessage Ready(uint64_t sequences) {
  v1::WorkerMessage message;
  message.mutable_ready()->set_dataset_sequences(sequences);
  return message;
}

class JobRunTest : public CoreTest {
 protected:
  JobRunTest() {
    testing::WriteTinyModel(folder_.Sub("model"), {});
    spec_ = testing::SampleSpec();
    spec_.set_model(folder_.Sub("model"));
    spec_.set_output(folder_.Sub("output"));
  }

  // The ranks to come have GPUs of that size.
  void UseGpus(uint64_t gpu_bytes) {
    gpu_bytes_ = gpu_bytes;
    spec_.set_device(v1::DEVICE_KIND_CUDA);
  }

  // Submits and lets `ranks` join; Propose has been sent.
  uint64_t Join(uint32_t ranks, bool peer_access = true) {
    spec_.set_ranks(ranks);
    StartCore();
    const uint64_t job = MustSubmit(spec_);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      sessions_.push_back(NewSession());
      sessions_[rank]->SayHello(job, rank, peer_access, gpu_bytes_);
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
  uint64_t gpu_bytes_ = 0;
  std::vector<std::unique_ptr<FakeSession>> sessions_;
  std::vector<v1::AttachRequest> attach_requests_;
  std::vector<std::unique_ptr<FakeAttachment>> attached_;
};

}  // namespace slidedp::hostd
