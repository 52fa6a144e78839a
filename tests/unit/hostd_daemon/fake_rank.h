// Ranks without processes: sessions whose messages a test sends and reads, and
// a rank that trains on zero gradients through the real segments.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/model/source.h"
#include "common/shm/segment.h"
#include "hostd/daemon/core.h"

namespace slidedp::hostd {

// The daemon's side, which the test reads. Send and Finish come from the loop
// thread, everything else is the test's thread.
class FakeSession final : public WorkerSession {
 public:
  FakeSession(EventLoop& loop, Core& core, Identity identity)
      : loop_(loop), core_(core), identity_(std::move(identity)) {}

  // Ends the session and waits until the core has let go of it.
  ~FakeSession() override;

  const Identity& identity() const override { return identity_; }
  void Send(const v1::DaemonMessage& message) override;
  void Finish(const absl::Status& status) override;

  // What a worker does.
  void Say(const v1::WorkerMessage& message);
  // `gpu_bytes`: of its GPU; 0: a CPU rank.
  void SayHello(uint64_t job, uint32_t rank, bool peer_access = true,
                uint64_t gpu_bytes = 0);
  void Break();

  // The next message; none once the daemon has finished the session. Aborts
  // after a minute of silence.
  std::optional<v1::DaemonMessage> Next();
  // Reads until the session is finished.
  absl::Status End();

 private:
  EventLoop& loop_;
  Core& core_;
  const Identity identity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::DaemonMessage> messages_;  // guarded by mutex_
  std::optional<absl::Status> finished_;    // guarded by mutex_
  bool ended_ = false;                      // loop thread
};

// Messages to a client, collected until the stream is finished.
template <typename Reply>
class FakeStream final : public ReplyStream<Reply> {
 public:
  FakeStream(EventLoop& loop, Core& core) : loop_(loop), core_(core) {}
  void Write(const Reply& reply) override {
    {
      std::lock_guard lock(mutex_);
      replies_.push_back(reply);
      changed_.notify_all();
    }
    loop_.Post([this] { core_.StreamReady(Key()); });
  }
  void Finish(const absl::Status& status) override {
    loop_.Post([this, status] {
      core_.StreamGone(Key());
      std::lock_guard lock(mutex_);
      finished_ = status;
      changed_.notify_all();
    });
  }
  // Waits for the stream's end.
  absl::Status End() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return finished_.has_value(); });
    return *finished_;
  }
  std::vector<Reply> replies() {
    std::lock_guard lock(mutex_);
    return replies_;
  }
  // Waits until `enough` of them are there.
  void AwaitReplies(size_t enough) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return replies_.size() >= enough; });
  }
  void* Key() { return static_cast<ReplyStream<Reply>*>(this); }

 private:
  EventLoop& loop_;
  Core& core_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Reply> replies_;            // guarded by mutex_
  std::optional<absl::Status> finished_;  // guarded by mutex_
};

// The worker's end of an attach connection.
class FakeAttachment {
 public:
  // Hands a connection with `request` to the core, as of a peer `uid`.
  FakeAttachment(EventLoop& loop, Core& core, uint32_t uid,
                 const v1::AttachRequest& request);
  // The reply; maps the segments if there are any.
  v1::AttachReply Receive();
  // Passes descriptors of the files, or an error instead.
  void Send(v1::FilesMessage::Kind kind, const std::vector<std::string>& names,
            const std::vector<int>& fds, const std::string& error = "");
  // The same; the daemon's answer.
  v1::FilesReply Pass(v1::FilesMessage::Kind kind,
                      const std::vector<std::string>& names,
                      const std::vector<int>& fds);
  void Close() { socket_.Reset(); }
  const shm::Mapping& segment(shm::SegmentKind kind) const;

 private:
  UniqueFd socket_;
  std::vector<std::pair<shm::SegmentKind, shm::Mapping>> segments_;
};

// Says what a rank says in `steps` steps whose gradients are all zero, from
// step `first` on.
void TrainOnNothing(const FakeAttachment& attachment,
                    const model::StateLayout& layout, const policy::Plan& plan,
                    int rank, uint64_t first, uint64_t steps, double loss_sum);
inline void TrainOnNothing(const FakeAttachment& attachment,
                           const model::StateLayout& layout,
                           const policy::Plan& plan, int rank, uint64_t steps) {
  TrainOnNothing(attachment, layout, plan, rank, 0, steps, 120);
}

}  // namespace slidedp::hostd
