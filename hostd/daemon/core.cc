// The core's calls. Streams and workers are in core_streams.cc, queue and
// changes of jobs in core_queue.cc, start and stop in core_life.cc.
#include "hostd/daemon/core.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/base/status.h"
#include "hostd/daemon/job_state.h"
#include "policy/wire.h"
#include "proto/protocol.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kMaxReasonBytes = 500;

absl::Status CheckClientId(absl::string_view id) {
  constexpr size_t kMaxBytes = 64;
  bool good = !id.empty() && id.size() <= kMaxBytes;
  for (char c : id) good &= absl::ascii_isalnum(c) || c == '-';
  if (good) return absl::OkStatus();
  return InvalidInput("submit", "client_id", id,
                      "not 1 to 64 letters, digits and dashes",
                      "let slidedpctl make it");
}

absl::Status CheckReason(absl::string_view reason) {
  bool good = reason.size() <= kMaxReasonBytes;
  for (char c : reason) good &= !absl::ascii_iscntrl(c);
  if (good) return absl::OkStatus();
  return InvalidInput(
      "drain", "reason", reason, "too long, or with control characters",
      absl::StrCat("use one line of at most ", kMaxReasonBytes, " bytes"));
}

}  // namespace

absl::StatusOr<HostMemory> ReadHostMemory() {
  SDP_ASSIGN_OR_RETURN(MemoryRoom capacity, MemoryCapacity());
  SDP_ASSIGN_OR_RETURN(MemoryRoom room, AvailableMemory());
  return HostMemory{capacity.bytes, capacity.limit, room.bytes, room.limit};
}

v1::JobInfo InfoOf(const Job& job) {
  v1::JobInfo info;
  const JobRow& row = job.row;
  info.set_id(row.id);
  info.set_name(row.spec.name());
  info.set_uid(row.uid);
  info.set_user(row.user);
  info.set_state(row.state);
  info.set_reason(row.reason);
  info.set_step(row.step);
  info.set_steps(row.spec.steps());
  info.set_ranks(row.spec.ranks());
  info.set_submitted_us(row.submitted_us);
  info.set_started_us(row.started_us);
  info.set_ended_us(row.ended_us);
  info.set_host_bytes(row.host_bytes);
  info.set_client_id(row.client_id);
  info.set_host_pss_peak_bytes(job.host_pss_peak_bytes);
  info.set_device_peak_bytes(job.device_peak_bytes);
  *info.mutable_progress() = row.progress;
  if (const uint64_t failures = row.progress.failures_in_a_row();
      failures > 0 && row.reason.empty()) {
    info.set_reason(absl::StrCat(
        failures, failures == 1 ? " checkpoint" : " checkpoints in a row",
        " failed: ", row.progress.last_failure()));
  }
  if (row.step > 0) {
    absl::StatusOr<v1::StepRecord> last = job.records.Last();
    if (last.ok()) info.set_last_loss(last->loss());
    if (last.ok() && last->has_mfu()) info.set_mfu(last->mfu());
  }
  if (job.last_eval) info.set_eval_loss(job.last_eval->loss());
  if (job.best_eval) {
    info.set_best_eval_loss(job.best_eval->loss());
    info.set_best_eval_step(job.best_eval->step());
  }
  if (row.state == v1::CONFIGURING || row.progress.checkpointing()) {
    info.set_loaded_bytes(job.loaded_bytes);
    info.set_load_bytes(job.load_bytes);
  }
  if (row.state == v1::RUNNING) {
    const double rate = job.records.steps_per_second();
    info.set_steps_per_second(rate);
    info.set_tokens_per_second(rate *
                               static_cast<double>(row.spec.batch_size()) *
                               static_cast<double>(row.spec.sequence_length()));
  }
  return info;
}

v1::JobInfo Core::Redacted(const Identity& identity, const Job& job) const {
  v1::JobInfo info = InfoOf(job);
  if (SeesAll(identity, job.row.uid)) return info;
  info.clear_name();
  info.clear_reason();
  info.clear_client_id();
  info.clear_last_loss();
  info.clear_eval_loss();
  info.clear_best_eval_loss();
  info.clear_best_eval_step();
  info.clear_progress();
  return info;
}

const Job* Core::FindJob(uint64_t id) const {
  auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : it->second.get();
}

JobRun* Core::FindRun(uint64_t id) {
  auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : it->second->run.get();
}

absl::StatusOr<Job*> Core::Reach(const Identity& identity, Verb verb,
                                 uint64_t id) {
  auto it = jobs_.find(id);
  if (it == jobs_.end()) {
    return absl::NotFoundError(absl::StrCat("there is no job ", id));
  }
  SDP_RETURN_IF_ERROR(Annotate(Authorize(identity, verb, it->second->row.uid),
                               absl::StrCat("job ", id)));
  return it->second.get();
}

absl::StatusOr<v1::SubmitReply> Core::Submit(const Identity& identity,
                                             const v1::SubmitRequest& request) {
  SDP_RETURN_IF_ERROR(Authorize(identity, Verb::kSubmit, std::nullopt));
  if (stopping_) return absl::UnavailableError("slidedpd is stopping");
  SDP_RETURN_IF_ERROR(CheckClientId(request.client_id()));
  v1::SubmitReply reply;
  auto known = by_client_id_.find({identity.uid, request.client_id()});
  if (known != by_client_id_.end()) {
    const Job& job = *jobs_.at(known->second);
    if (job.row.spec.SerializeAsString() !=
        request.spec().SerializeAsString()) {
      return absl::AlreadyExistsError(
          absl::StrCat("client_id ", request.client_id(), " belongs to job ",
                       job.row.id, ", whose spec is another one"));
    }
    reply.set_id(job.row.id);
    reply.set_state(job.row.state);
    reply.set_reason(job.row.reason);
    return reply;
  }

  SDP_ASSIGN_OR_RETURN(CheckedSpec checked, CheckSpec(request.spec(), facts_));
  const bool by_daemon = request.spec().launch() == v1::LAUNCH_KIND_DAEMON;
  if (by_daemon && own_uid_ != 0 && identity.uid != own_uid_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this slidedpd runs as uid ", own_uid_, " and can't start workers of ",
        "uid ", identity.uid, "; use launch: manual, or your own slidedpd"));
  }
  Demand demand = MakeDemand(checked.config, checked.layout, checked.plan);
  SDP_ASSIGN_OR_RETURN(HostMemory memory, memory_());
  SDP_RETURN_IF_ERROR(FitsEver(
      demand, memory, {config_.max_host_bytes, config_.headroom_bytes}));
  uint64_t waiting = 0;
  for (const auto& [id, job] : jobs_) {
    waiting += job->row.uid == identity.uid && job->row.state == v1::PENDING;
  }
  if (waiting >= config_.max_pending_jobs_per_user) {
    return absl::ResourceExhaustedError(absl::StrCat(
        identity.user, " has ", waiting, " jobs waiting, the most allowed"));
  }

  JobRow row;
  row.client_id = request.client_id();
  row.uid = identity.uid;
  row.user = identity.user;
  // Without an entry (a user's own daemon in a container) nothing is dropped
  // or taken on.
  if (absl::StatusOr<User> user = UserOf(identity.uid); user.ok()) {
    row.gid = user->gid;
    row.groups = user->groups;
  } else {
    row.gid = getgid();
  }
  row.spec = request.spec();
  row.state = v1::PENDING;
  row.reason = "next in line";
  row.submitted_us = UnixMicros();
  row.host_bytes = demand.segment_bytes();
  v1::JobEvent event;
  event.set_time_us(row.submitted_us);
  event.set_state(row.state);
  event.set_text(absl::StrCat("submitted by ", row.user));
  SDP_ASSIGN_OR_RETURN(row.id, journal_.Insert(row, event));

  const uint64_t id = row.id;
  auto job = std::make_unique<Job>(std::move(row), config_.log_folder(id));
  job->plan = checked.plan;
  job->checked = std::move(checked);
  job->demand = std::move(demand);
  by_client_id_[{identity.uid, request.client_id()}] = id;
  const Job& stored = *(jobs_[id] = std::move(job));
  spdlog::info("job {}: submitted by {} ({} ranks, {} steps)", id,
               stored.row.user, stored.row.spec.ranks(),
               stored.row.spec.steps());
  Schedule();
  reply.set_id(id);
  reply.set_state(stored.row.state);
  reply.set_reason(stored.row.reason);
  return reply;
}

absl::StatusOr<v1::ListReply> Core::List(const Identity& identity,
                                         const v1::ListRequest& request) {
  SDP_RETURN_IF_ERROR(Authorize(identity, Verb::kList, std::nullopt));
  v1::ListReply reply;
  for (const auto& [id, job] : jobs_) {
    if (HasEnded(job->row.state) && !request.ended()) continue;
    *reply.add_jobs() = Redacted(identity, *job);
  }
  reply.set_draining(drain_.draining);
  reply.set_drain_reason(drain_.reason);
  return reply;
}

absl::StatusOr<v1::GetReply> Core::Get(const Identity& identity,
                                       const v1::GetRequest& request) {
  SDP_ASSIGN_OR_RETURN(Job * job, Reach(identity, Verb::kGet, request.id()));
  v1::GetReply reply;
  *reply.mutable_info() = InfoOf(*job);
  *reply.mutable_spec() = job->row.spec;
  if (job->plan) *reply.mutable_plan() = policy::ToWire(*job->plan);
  SDP_ASSIGN_OR_RETURN(std::vector<v1::JobEvent> events,
                       journal_.Events(job->row.id));
  for (v1::JobEvent& event : events) {
    *reply.add_events() = std::move(event);
  }
  for (const v1::JobEvent& event : job->unwritten_events) {
    *reply.add_events() = event;
  }
  for (const policy::NamedBytes& segment : job->demand.segments) {
    v1::NamedBytes* bytes = reply.add_host_bytes();
    bytes->set_name(segment.name);
    bytes->set_bytes(segment.bytes);
  }
  if (absl::StatusOr<v1::StepRecord> last = job->records.Last(); last.ok()) {
    *reply.mutable_last_step() = *std::move(last);
  }
  reply.set_log_folder(config_.log_folder(job->row.id));
  return reply;
}

absl::StatusOr<v1::CancelReply> Core::Cancel(const Identity& identity,
                                             const v1::CancelRequest& request) {
  SDP_ASSIGN_OR_RETURN(Job * job, Reach(identity, Verb::kCancel, request.id()));
  v1::CancelReply reply;
  const std::string reason = absl::StrCat("cancelled by ", identity.user);
  if (HasEnded(job->row.state)) {
    if (job->row.state != v1::CANCELLED) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job->row.id,
          " has ended already: ", v1::JobState_Name(job->row.state)));
    }
  } else if (job->row.state == v1::PENDING) {
    JobRow row = job->row;
    row.state = v1::CANCELLED;
    row.reason = reason;
    row.cancel_requested = true;
    row.ended_us = UnixMicros();
    v1::JobEvent event;
    event.set_time_us(row.ended_us);
    event.set_state(row.state);
    event.set_text(reason);
    SDP_RETURN_IF_ERROR(journal_.Update(row, {event}));
    job->row = std::move(row);
    job->checked.reset();
    spdlog::info("job {}: {}", job->row.id, reason);
    Changed(*job);
    ForgetOldJobs();
    Schedule();
  } else if (!job->row.cancel_requested) {
    // What is promised first: a daemon that dies from here on finds the wish.
    if (!job->run->CanCancel()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job->row.id, " is done and its output is being put in ",
          "place; it can't be cancelled any more"));
    }
    JobRow row = job->row;
    row.cancel_requested = true;
    v1::JobEvent event;
    event.set_time_us(UnixMicros());
    event.set_state(row.state);
    event.set_text(absl::StrCat("cancel requested by ", identity.user));
    SDP_RETURN_IF_ERROR(journal_.Update(row, {event}));
    job->row.cancel_requested = true;
    job->run->Abort(v1::CANCELLED, shm::AbortReason::kCancelled, reason);
  }
  // The job may have been forgotten with its end.
  if (const Job* left = FindJob(request.id())) {
    *reply.mutable_info() = InfoOf(*left);
  }
  return reply;
}

v1::DrainReply Core::DrainState() const {
  v1::DrainReply reply;
  reply.set_draining(drain_.draining);
  reply.set_reason(drain_.reason);
  return reply;
}

absl::StatusOr<v1::DrainReply> Core::Drain(const Identity& identity,
                                           const v1::DrainRequest& request) {
  SDP_RETURN_IF_ERROR(Authorize(identity, Verb::kDrain, std::nullopt));
  SDP_RETURN_IF_ERROR(CheckReason(request.reason()));
  DrainRow row;
  row.draining = true;
  row.reason = request.reason().empty() ? absl::StrCat("by ", identity.user)
                                        : request.reason();
  row.user = identity.user;
  row.since_us = UnixMicros();
  SDP_RETURN_IF_ERROR(journal_.SetDrain(row));
  drain_ = std::move(row);
  spdlog::info("draining by {}: {}", identity.user, drain_.reason);
  SaveRuns(request.stop(), shm::AbortReason::kShutdown,
           absl::StrCat("draining: ", drain_.reason));
  Schedule();
  return DrainState();
}

absl::StatusOr<v1::DrainReply> Core::Undrain(const Identity& identity) {
  SDP_RETURN_IF_ERROR(Authorize(identity, Verb::kDrain, std::nullopt));
  SDP_RETURN_IF_ERROR(journal_.SetDrain(DrainRow{}));
  drain_ = DrainRow{};
  spdlog::info("undrained by {}", identity.user);
  Schedule();
  return DrainState();
}

v1::VersionReply Core::Version() const {
  v1::VersionReply reply;
  reply.set_version(version_);
  reply.set_protocol(kProtocolVersion);
  reply.set_pid(static_cast<uint32_t>(getpid()));
  reply.set_started_us(started_us_);
  return reply;
}

}  // namespace slidedp::hostd
