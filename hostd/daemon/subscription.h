// Clients that watch a job or follow its logs. Each pulls: it is asked for its
// next message when its last one is through, or when its job has changed, so
// that a slow client costs no memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "hostd/daemon/job.h"
#include "hostd/daemon/log_lines.h"
#include "hostd/daemon/trace_collector.h"
#include "hostd/daemon/worker_session.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

// Loop thread only.
class Subscription {
 public:
  explicit Subscription(uint64_t job) : job_(job) {}
  virtual ~Subscription() = default;
  uint64_t job() const { return job_; }

  void Ready() { writing_ = false; }
  // Writes the next message if there is one and none is under way; finishes at
  // the job's end. `job` is null if it has been forgotten.
  void Pump(const Job* job);
  void Finish(const absl::Status& status);

 protected:
  // False: nothing now.
  virtual bool WriteNext(const Job& job) = 0;
  virtual void FinishStream(const absl::Status& status) = 0;

 private:
  uint64_t job_;
  bool writing_ = false;
  bool finished_ = false;
};

// State, then records, then the end's state. Of a job that has ended already:
// records, then its state.
class WatchSubscription : public Subscription {
 public:
  WatchSubscription(const v1::WatchRequest& request,
                    ReplyStream<v1::WatchReply>* stream);

 private:
  bool WriteNext(const Job& job) override;
  void FinishStream(const absl::Status& status) override;

  ReplyStream<v1::WatchReply>* stream_;
  StepRecords::Cursor cursor_;
  std::vector<v1::Record> batch_;
  size_t next_in_batch_ = 0;
  uint64_t seen_version_ = 0;
};

class LogSubscription : public Subscription {
 public:
  // `ranks`: of the job; request.rank() is one of them or -1.
  LogSubscription(const v1::LogsRequest& request, uint32_t ranks,
                  const std::string& folder,
                  ReplyStream<v1::LogsReply>* stream);
  bool follow() const { return follow_; }

 private:
  struct RankLog {
    uint32_t rank;
    LogLines lines;
    std::vector<std::string> batch;
    size_t next_in_batch = 0;
  };
  bool WriteNext(const Job& job) override;
  void FinishStream(const absl::Status& status) override;

  ReplyStream<v1::LogsReply>* stream_;
  bool follow_;
  std::vector<RankLog> logs_;
};

// Hands a trace to a client. Aborted if the job ends before the trace.
class TraceSubscription final : public Subscription {
 public:
  TraceSubscription(uint64_t job, std::shared_ptr<TraceCollector> collector,
                    ReplyStream<v1::TraceReply>* stream)
      : Subscription(job), collector_(std::move(collector)), stream_(stream) {}

 private:
  bool WriteNext(const Job& job) override;
  void FinishStream(const absl::Status& status) override {
    stream_->Finish(status);
  }

  const std::shared_ptr<TraceCollector> collector_;
  ReplyStream<v1::TraceReply>* const stream_;
};

// By the address of their stream.
class Subscriptions {
 public:
  void Add(void* stream, std::unique_ptr<Subscription> subscription);
  Subscription* Find(void* stream);
  void Remove(void* stream) { by_stream_.erase(stream); }
  // Pumps those of a job, or (0) all.
  void Pump(uint64_t job, const std::function<const Job*(uint64_t)>& find);
  void FinishAll(const absl::Status& status);
  // Those of jobs for which `keep` is false.
  void FinishUnless(const std::function<bool(uint64_t job)>& keep,
                    const absl::Status& status);
  bool empty() const { return by_stream_.empty(); }

 private:
  std::map<void*, std::unique_ptr<Subscription>> by_stream_;
};

}  // namespace slidedp::hostd
