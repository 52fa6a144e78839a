#include "hostd/daemon/subscription.h"

#include "absl/strings/str_cat.h"
#include "hostd/daemon/job_state.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kRecordsAtOnce = 256;

// Whether nothing of the job will change any more: it has ended and its
// processes' last words are in the logs.
bool IsOver(const Job& job) { return HasEnded(job.row.state); }

}  // namespace

void Subscription::Pump(const Job* job) {
  if (writing_ || finished_) return;
  if (job == nullptr) {
    Finish(absl::NotFoundError(absl::StrCat("job ", job_, " is forgotten")));
  } else if (WriteNext(*job)) {
    writing_ = true;
  } else if (IsOver(*job)) {
    Finish(absl::OkStatus());
  }
}

void Subscription::Finish(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  FinishStream(status);
}

WatchSubscription::WatchSubscription(const v1::WatchRequest& request,
                                     ReplyStream<v1::WatchReply>* stream)
    : Subscription(request.id()), stream_(stream) {
  cursor_ = StepRecords::Cursor::AfterStep(request.from_step());
}

bool WatchSubscription::WriteNext(const Job& job) {
  v1::WatchReply reply;
  if (seen_version_ != 0 || IsOver(job)) {
    if (next_in_batch_ == batch_.size()) {
      batch_ = job.records.Next(cursor_, kRecordsAtOnce);
      next_in_batch_ = 0;
    }
    if (next_in_batch_ < batch_.size()) {
      v1::Record& record = batch_[next_in_batch_++];
      if (record.has_eval()) {
        *reply.mutable_eval() = std::move(*record.mutable_eval());
      } else {
        *reply.mutable_step() = std::move(*record.mutable_step());
      }
      stream_->Write(reply);
      return true;
    }
  }
  if (seen_version_ == job.version) return false;
  seen_version_ = job.version;
  *reply.mutable_info() = InfoOf(job);
  stream_->Write(reply);
  return true;
}

void WatchSubscription::FinishStream(const absl::Status& status) {
  stream_->Finish(status);
}

LogSubscription::LogSubscription(const v1::LogsRequest& request, uint32_t ranks,
                                 const std::string& folder,
                                 ReplyStream<v1::LogsReply>* stream)
    : Subscription(request.id()), stream_(stream), follow_(request.follow()) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (request.rank() >= 0 && rank != static_cast<uint32_t>(request.rank())) {
      continue;
    }
    logs_.push_back(
        {rank, LogLines(absl::StrCat(folder, "/rank-", rank, ".log")), {}, 0});
    logs_.back().lines.SeekTail(request.tail());
  }
}

bool LogSubscription::WriteNext(const Job& job) {
  const bool at_end = !follow_ || IsOver(job);
  for (RankLog& log : logs_) {
    if (log.next_in_batch == log.batch.size()) {
      log.batch = log.lines.Next(at_end);
      log.next_in_batch = 0;
    }
    if (log.next_in_batch == log.batch.size()) continue;
    v1::LogsReply reply;
    reply.set_rank(static_cast<int32_t>(log.rank));
    reply.set_line(std::move(log.batch[log.next_in_batch++]));
    stream_->Write(reply);
    return true;
  }
  if (!follow_) Finish(absl::OkStatus());
  return false;
}

void LogSubscription::FinishStream(const absl::Status& status) {
  stream_->Finish(status);
}

bool TraceSubscription::WriteNext(const Job& job) {
  v1::TraceReply reply;
  if (collector_->failure().ok() && collector_->Next(reply)) {
    stream_->Write(reply);
    return true;
  }
  if (collector_->complete()) {
    Finish(collector_->failure());
  } else if (HasEnded(job.row.state)) {
    Finish(absl::AbortedError(
        absl::StrCat("job ", job.row.id, " ended before the traced steps")));
  }
  return false;
}

void Subscriptions::Add(void* stream,
                        std::unique_ptr<Subscription> subscription) {
  by_stream_[stream] = std::move(subscription);
}

Subscription* Subscriptions::Find(void* stream) {
  auto it = by_stream_.find(stream);
  return it == by_stream_.end() ? nullptr : it->second.get();
}

void Subscriptions::Pump(uint64_t job,
                         const std::function<const Job*(uint64_t)>& find) {
  // A stream may end, but not come or go, while it is pumped.
  for (const auto& [stream, subscription] : by_stream_) {
    if (job != 0 && subscription->job() != job) continue;
    subscription->Pump(find(subscription->job()));
  }
}

void Subscriptions::FinishUnless(const std::function<bool(uint64_t job)>& keep,
                                 const absl::Status& status) {
  for (const auto& [stream, subscription] : by_stream_) {
    if (!keep(subscription->job())) subscription->Finish(status);
  }
}

void Subscriptions::FinishAll(const absl::Status& status) {
  for (const auto& [stream, subscription] : by_stream_) {
    subscription->Finish(status);
  }
}

}  // namespace slidedp::hostd
