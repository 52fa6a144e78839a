// The core's queue, and what changes a job.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/job_state.h"
#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {
namespace {

constexpr absl::string_view kMemoryReason = "waiting for memory";

// ", 12 of 36 layers recompute no matrix product, 3 offload activations".
std::string Kept(const policy::Plan& plan) {
  if (plan.keep.empty()) return "";
  const auto whole =
      std::count_if(plan.keep.begin(), plan.keep.end(), [](uint8_t mask) {
        return (mask & policy::kKeepAll) == policy::kKeepAll;
      });
  const auto offloaded =
      std::count_if(plan.offload_permille.begin(), plan.offload_permille.end(),
                    [](uint16_t permille) { return permille > 0; });
  return absl::StrCat(
      ", ", whole, " of ", plan.keep.size(),
      " layers recompute no matrix product",
      offloaded == 0 ? std::string()
                     : absl::StrCat(", ", offloaded, " offload activations"));
}

// ", 3 of 10 parameters are frozen, 2 units have no gradient".
std::string Frozen(const model::StateLayout& layout) {
  if (layout.frozen_parameters == 0) return "";
  const auto units =
      std::count_if(layout.units.begin(), layout.units.end(),
                    [](const model::Unit& unit) { return unit.frozen(); });
  return absl::StrCat(", ", layout.frozen_parameters, " of ", layout.parameters,
                      " parameters are frozen, ", units,
                      " units have no gradient");
}

}  // namespace

// ---- The queue: first in, first out ----

size_t Core::RunCount() const {
  size_t count = 0;
  for (const auto& [id, job] : jobs_) count += job->run != nullptr;
  return count;
}

Promised Core::PromisedBytes() const {
  Promised promised;
  for (const auto& [id, job] : jobs_) {
    if (job->run == nullptr) continue;
    promised.all_bytes += job->demand.total_bytes();
    if (!job->run->segments_taken()) {
      promised.pending_bytes += job->demand.segment_bytes();
    }
    if (!job->run->devices_taken()) {
      promised.pending_bytes += job->demand.device_bytes();
    }
  }
  return promised;
}

std::optional<std::string> Core::WhyWait(const Job& job) {
  if (drain_.draining) return absl::StrCat("draining: ", drain_.reason);
  if (RunCount() >= config_.max_running_jobs) {
    for (const auto& [id, other] : jobs_) {
      if (other->run != nullptr) return absl::StrCat("waiting for job ", id);
    }
  }
  if (TakesGpus(job)) {
    if (gpus_.knowledge() != Gpus::Knowledge::kKnown) {
      return "counting this host's GPUs";
    }
    if (auto why = gpus_.WhyNotNow(job.row.spec.ranks())) return why;
  }
  absl::StatusOr<HostMemory> memory = memory_();
  if (!memory.ok()) {
    return absl::StrCat("waiting for memory: ", memory.status().message());
  }
  return WhyNotNow(job.demand, *memory,
                   {config_.max_host_bytes, config_.headroom_bytes},
                   PromisedBytes());
}

bool Core::TakesGpus(const Job& job) {
  return job.checked->plan.device == policy::DeviceKind::kCuda &&
         job.row.spec.launch() == v1::LAUNCH_KIND_DAEMON;
}

void Core::CountGpus() {
  gpus_.SetAsked();
  if (!gpu_thread_.has_value()) gpu_thread_.emplace();
  gpu_thread_->Post([this] {
    absl::StatusOr<GpuFacts> facts = count_gpus_();
    if (facts.ok()) {
      spdlog::info("{} GPUs{}{}", facts->gpus.size(),
                   facts->problem.empty() ? "" : ": ", facts->problem);
    } else {
      spdlog::error("{}", std::string(facts.status().message()));
    }
    loop_.Post([this, facts = std::move(facts)] {
      gpus_.Set(facts);
      Schedule();
    });
  });
}

void Core::Schedule() {
  if (stopping_) return;
  const Job* ahead = nullptr;
  for (const auto& [id, job] : jobs_) {
    if (job->row.state != v1::PENDING) continue;
    if (ahead != nullptr) {
      SetReason(*job, drain_.draining
                          ? absl::StrCat("draining: ", drain_.reason)
                          : absl::StrCat("waiting for job ", ahead->row.id));
      ahead = job.get();
      continue;
    }
    if (job->run != nullptr) {
      // Its last attempt still holds memory; its release comes here again.
      ahead = job.get();
      continue;
    }
    if (TakesGpus(*job)) {
      if (gpus_.knowledge() == Gpus::Knowledge::kNone) CountGpus();
      if (gpus_.knowledge() == Gpus::Knowledge::kKnown) {
        absl::Status fits = gpus_.FitsEver(job->row.spec.ranks());
        if (!fits.ok()) {
          Transition(*job, v1::FAILED, std::string(fits.message()), "");
          job->checked.reset();
          continue;
        }
      }
    }
    if (std::optional<std::string> why = WhyWait(*job)) {
      SetReason(*job, *why);
      ahead = job.get();
      continue;
    }
    StartRun(*job);
    // A start that could not be written down leaves it at the head.
    if (job->row.state == v1::PENDING) ahead = job.get();
  }
}

void Core::SetReason(Job& job, const std::string& reason) {
  if (job.row.reason == reason) return;
  // How much is free changes all the time; that it is too little is the news.
  const bool news = !absl::StartsWith(job.row.reason, kMemoryReason) ||
                    !absl::StartsWith(reason, kMemoryReason);
  job.row.reason = reason;
  if (news) Changed(job);
}

void Core::StartRun(Job& job) {
  JobRow row = job.row;
  row.state = v1::CONFIGURING;
  row.progress.set_attempts(row.progress.attempts() + 1);
  row.progress.set_put_back(false);
  row.reason = "starting";
  row.started_us = UnixMicros();
  v1::JobEvent event;
  event.set_time_us(row.started_us);
  event.set_state(row.state);
  event.set_text("starting");
  if (absl::Status status = journal_.Update(row, {event}); !status.ok()) {
    SetReason(job, std::string(status.message()));
    spdlog::error("job {}: {}", row.id, std::string(status.message()));
    return;
  }
  job.row = std::move(row);
  Changed(job);

  std::error_code error;
  std::filesystem::create_directories(config_.log_folder(job.row.id), error);
  if (error) {
    Transition(job, v1::FAILED,
               absl::StrCat("folder ", config_.log_folder(job.row.id), ": ",
                            error.message()),
               "");
    return;
  }
  RunJob run;
  run.id = job.row.id;
  run.spec = job.row.spec;
  run.checked = *job.checked;
  run.uid = job.row.uid;
  run.gid = job.row.gid;
  run.groups = job.row.groups;
  run.user = job.row.user;
  run.attempt = job.row.progress.attempts() - 1;
  // A job that went back goes on with what it has saved.
  run.resume = run.attempt > 0 && !run.spec.checkpoint().folder().empty()
                   ? "auto"
                   : run.spec.resume();
  run.output_may_be_there = job.row.progress.committing();
  if (TakesGpus(job)) run.gpus = gpus_.Take(job.row.id, run.spec.ranks());
  absl::StatusOr<User> user = UserOf(job.row.uid);
  run.home = user.ok() ? user->home : "/";
  job.run = std::make_unique<JobRun>(loop_, *launcher_, config_, std::move(run),
                                     EventsOf(job));
  spdlog::info("job {}: starting", job.row.id);
  job.run->Start();
}

// ---- Changes of a job ----

RunEvents Core::EventsOf(Job& job) {
  // The job outlives its run.
  Job* const it = &job;
  RunEvents events;
  events.progress = [this, it](v1::JobState state, const std::string& reason,
                               const std::string& event) {
    if (state != it->row.state) {
      Transition(*it, state, reason, event);
      return;
    }
    if (!event.empty()) AddEvent(*it, event);
    SetReason(*it, reason);
  };
  events.plan = [this, it](const policy::Plan& plan) -> absl::Status {
    Demand demand = MakeDemand(it->checked->config, it->checked->layout, plan);
    const MemoryLimits limits{config_.max_host_bytes, config_.headroom_bytes};
    SDP_ASSIGN_OR_RETURN(HostMemory memory, memory_());
    SDP_RETURN_IF_ERROR(FitsEver(demand, memory, limits));
    // Judged beside the other runs: what was promised to this one is void.
    Promised others = PromisedBytes();
    others.all_bytes -= it->demand.total_bytes();
    others.pending_bytes -= it->demand.total_bytes();
    if (demand.total_bytes() > it->demand.total_bytes()) {
      if (std::optional<std::string> why =
              WhyNotNow(demand, memory, limits, others)) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "the routes that its ranks can use need more memory: ", *why));
      }
    }
    it->plan = plan;
    it->demand = std::move(demand);
    it->row.host_bytes = it->demand.segment_bytes();
    AddEvent(*it, absl::StrCat(
                      "plan: parameters ", policy::Name(plan.decoder.params),
                      ", gradients ", policy::Name(plan.decoder.grads),
                      ", reduction ", policy::Name(plan.decoder.reduce), ", ",
                      policy::Name(plan.update_mode), " updates", Kept(plan),
                      Frozen(it->checked->layout)));
    return absl::OkStatus();
  };
  events.launched = [this, it](uint32_t rank, const Launched& process) {
    // Not a promise to anybody: if it can't be stored, a daemon that is killed
    // relies on PR_SET_PDEATHSIG alone.
    absl::Status status = journal_.InsertWorker(
        {it->row.id, rank, process.pid, process.start_ticks, boot_id_});
    if (!status.ok())
      spdlog::error("job {}: {}", it->row.id, std::string(status.message()));
  };
  events.record = [this, it](v1::Record& record) { OnRecord(*it, record); };
  events.moved = [this, it](uint64_t done_bytes, uint64_t all_bytes) {
    it->loaded_bytes = done_bytes;
    it->load_bytes = all_bytes;
    Changed(*it);
  };
  events.memory = [it](uint64_t pss_bytes, uint64_t device_bytes) {
    it->host_pss_bytes = pss_bytes;
    it->host_pss_peak_bytes = std::max(it->host_pss_peak_bytes, pss_bytes);
    it->device_peak_bytes = std::max(it->device_peak_bytes, device_bytes);
  };
  events.ended = [this, it](v1::JobState state, const std::string& reason,
                            bool lost) { OnEnded(*it, state, reason, lost); };
  AddCheckpointEvents(job, events);
  events.released = [this, id = job.row.id] {
    loop_.Post([this, id] {
      auto found = jobs_.find(id);
      gpus_.Release(id);
      if (found != jobs_.end()) {
        found->second->run.reset();
        if (HasEnded(found->second->row.state)) found->second->checked.reset();
      }
      ForgetOldJobs();
      Schedule();
      FinishStopIfIdle();
    });
  };
  return events;
}

void Core::Transition(Job& job, v1::JobState state, const std::string& reason,
                      const std::string& event) {
  if (!MayFollow(job.row.state, state)) {
    spdlog::critical("job {}: {} can't become {}", job.row.id,
                     v1::JobState_Name(job.row.state),
                     v1::JobState_Name(state));
    return;
  }
  job.row.state = state;
  job.row.reason = reason;
  if (HasEnded(state)) job.row.ended_us = UnixMicros();
  spdlog::info("job {}: {}{}{}", job.row.id, v1::JobState_Name(state),
               reason.empty() ? "" : ": ", reason);
  std::string text = event.empty() ? reason : event;
  AddEvent(job, text.empty() ? "done" : text);
  Changed(job);
}

void Core::AddEvent(Job& job, const std::string& text) {
  v1::JobEvent event;
  event.set_time_us(UnixMicros());
  event.set_state(job.row.state);
  event.set_text(ToValidUtf8(text));
  job.unwritten_events.push_back(std::move(event));
  (void)Write(job);
}

absl::Status Core::Write(Job& job) {
  absl::Status status = journal_.Update(job.row, job.unwritten_events);
  if (status.ok()) {
    job.unwritten = false;
    job.unwritten_events.clear();
  } else if (!job.unwritten) {
    job.unwritten = true;  // Tick tries again
    spdlog::error("job {}: {}; trying again", job.row.id,
                  std::string(status.message()));
  }
  return status;
}

void Core::Changed(Job& job) {
  ++job.version;
  PumpStreams(job.row.id);
}

void Core::OnRecord(Job& job, v1::Record& record) {
  if (record.has_step()) {
    record.mutable_step()->set_host_pss_bytes(job.host_pss_bytes);
    record.mutable_step()->set_device_bytes(job.device_peak_bytes);
    job.row.step = record.step().step();
  } else {
    job.last_eval = record.eval();
    if (record.eval().best()) job.best_eval = record.eval();
  }
  if (absl::Status status = job.records.Append(record); !status.ok()) {
    spdlog::error("job {}: {}; later records are kept in memory only",
                  job.row.id, std::string(status.message()));
  }
  PumpStreams(job.row.id);
}

void Core::ForgetOldJobs() {
  uint64_t ended = 0;
  for (const auto& [id, job] : jobs_) ended += HasEnded(job->row.state);
  for (auto it = jobs_.begin();
       it != jobs_.end() && ended > config_.keep_ended_jobs;) {
    Job& job = *it->second;
    if (!HasEnded(job.row.state) || job.run != nullptr) {
      ++it;
      continue;
    }
    if (absl::Status status = journal_.Delete(job.row.id); !status.ok()) {
      spdlog::error("job {}: {}", job.row.id, std::string(status.message()));
      return;
    }
    std::error_code ignored;
    std::filesystem::remove_all(config_.log_folder(job.row.id), ignored);
    by_client_id_.erase({job.row.uid, job.row.client_id});
    const uint64_t id = job.row.id;
    it = jobs_.erase(it);
    PumpStreams(id);
    --ended;
  }
}

}  // namespace slidedp::hostd
