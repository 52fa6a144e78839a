// Who watches jobs, and who works for them.
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/trace_collector.h"

namespace slidedp::hostd {

void Core::Watch(const Identity& identity, const v1::WatchRequest& request,
                 ReplyStream<v1::WatchReply>* stream) {
  absl::StatusOr<Job*> job = Reach(identity, Verb::kGet, request.id());
  if (!job.ok()) return stream->Finish(job.status());
  auto subscription = std::make_unique<WatchSubscription>(request, stream);
  Subscription& added = *subscription;
  subscriptions_.Add(stream, std::move(subscription));
  added.Pump(*job);
}

void Core::Logs(const Identity& identity, const v1::LogsRequest& request,
                ReplyStream<v1::LogsReply>* stream) {
  absl::StatusOr<Job*> job = Reach(identity, Verb::kLogs, request.id());
  if (!job.ok()) return stream->Finish(job.status());
  const uint32_t ranks = (*job)->row.spec.ranks();
  if (request.rank() < -1 || request.rank() >= static_cast<int64_t>(ranks)) {
    return stream->Finish(InvalidInput(
        "logs", "rank", absl::StrCat(request.rank()),
        absl::StrCat("job ", request.id(), " has ranks 0 to ", ranks - 1),
        "use one of them, or -1 for all"));
  }
  auto subscription = std::make_unique<LogSubscription>(
      request, ranks, config_.log_folder(request.id()), stream);
  Subscription& added = *subscription;
  subscriptions_.Add(stream, std::move(subscription));
  added.Pump(*job);
}

void Core::Trace(const Identity& identity, const v1::TraceRequest& request,
                 ReplyStream<v1::TraceReply>* stream) {
  absl::StatusOr<Job*> job = Reach(identity, Verb::kGet, request.id());
  if (!job.ok()) return stream->Finish(job.status());
  if (request.steps() < 1 || request.steps() > kMaxTracedSteps) {
    return stream->Finish(InvalidInput(
        "trace", "steps", absl::StrCat(request.steps()),
        absl::StrCat("must be from 1 to ", kMaxTracedSteps), "choose fewer"));
  }
  JobRun* run = (*job)->run.get();
  absl::StatusOr<std::shared_ptr<TraceCollector>> collector =
      run == nullptr ? absl::FailedPreconditionError(
                           absl::StrCat("job ", request.id(), " is ",
                                        v1::JobState_Name((*job)->row.state),
                                        "; only a running job can be traced"))
                     : run->Trace(request.steps());
  if (!collector.ok()) return stream->Finish(collector.status());
  (*collector)->on_change = [this, id = request.id()] { PumpStreams(id); };
  subscriptions_.Add(stream, std::make_unique<TraceSubscription>(
                                 request.id(), *std::move(collector), stream));
}

void Core::StreamReady(void* stream) {
  Subscription* subscription = subscriptions_.Find(stream);
  if (subscription == nullptr) return;
  subscription->Ready();
  subscription->Pump(FindJob(subscription->job()));
}

void Core::StreamGone(void* stream) {
  subscriptions_.Remove(stream);
  FinishStopIfIdle();
}

void Core::PumpStreams(uint64_t job) {
  subscriptions_.Pump(job, [this](uint64_t id) { return FindJob(id); });
}

// ---- Workers ----

void Core::OnSessionMessage(WorkerSession* session,
                            const v1::WorkerMessage& message) {
  if (session->job != 0) {
    if (JobRun* run = FindRun(session->job)) {
      run->OnMessage(session->rank, message);
    }
    return;
  }
  if (!message.has_hello()) {
    return session->Finish(
        absl::FailedPreconditionError("a session begins with Hello"));
  }
  const v1::Hello& hello = message.hello();
  absl::StatusOr<Job*> job =
      Reach(session->identity(), Verb::kJoin, hello.job());
  if (!job.ok()) return session->Finish(job.status());
  if ((*job)->run == nullptr) {
    return session->Finish(absl::FailedPreconditionError(absl::StrCat(
        "job ", hello.job(), " is ", v1::JobState_Name((*job)->row.state),
        (*job)->row.reason.empty() ? "" : ": ", (*job)->row.reason)));
  }
  if (absl::Status status = (*job)->run->OnHello(session, hello);
      !status.ok()) {
    session->Finish(status);
  }
}

void Core::OnSessionEnd(WorkerSession* session) {
  if (session->job == 0) return;
  if (JobRun* run = FindRun(session->job)) run->OnSessionEnd(session->rank);
}

void Core::OnAttach(std::shared_ptr<AttachConnection> connection,
                    const v1::AttachRequest& request) {
  if (JobRun* run = FindRun(request.job())) {
    run->OnAttach(std::move(connection), request);
    return;
  }
  (void)SendAttachError(connection->socket.get(), "no such job, rank or nonce");
}

}  // namespace slidedp::hostd
