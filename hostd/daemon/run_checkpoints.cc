#include "hostd/daemon/run_checkpoints.h"

#include <fcntl.h>

#include <algorithm>
#include <future>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/checkpoint/files.h"
#include "common/model/blank_source.h"
#include "hostd/checkpoint/writer.h"
#include "hostd/daemon/log_lines.h"
#include "proto/identity.h"

namespace slidedp::hostd {
namespace {

// Beside the update workers, whom the disk leaves most of the processors.
constexpr int kMaxWriteThreads = 4;
constexpr size_t kMaxWordsBytes = 1000;

std::string Cut(const std::string& text) {
  return ToValidUtf8(text.substr(0, kMaxWordsBytes));
}

// The descriptors in the order of `files`, as many, of their names and sizes,
// open for writing.
absl::StatusOr<std::vector<int>> Match(
    const std::vector<checkpoint::File>& files, const NamedFiles& passed) {
  std::vector<int> fds;
  for (size_t i = 0; i < files.size(); ++i) {
    if (i >= passed.size() || passed[i].first != files[i].name) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank 0 did not pass ", files[i].name, " of the checkpoint"));
    }
    const int fd = passed[i].second.get();
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY ||
        (flags & (O_PATH | O_APPEND)) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(files[i].name, ": not open for writing at offsets"));
    }
    SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                         RegularFileBytes(fd, files[i].name));
    if (bytes != files[i].bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          files[i].name, ": has ", bytes, " bytes, not ", files[i].bytes));
    }
    fds.push_back(fd);
  }
  if (passed.size() != files.size()) {
    return absl::InvalidArgumentError(
        "rank 0 passed more files than a checkpoint has");
  }
  return fds;
}

checkpoint::Identity SourceDtypes(const model::StateLayout& layout,
                                  const model::TensorSource& source) {
  checkpoint::Identity dtypes;
  for (const model::Unit& unit : layout.units) {
    for (const model::Tensor& tensor : unit.tensors) {
      const model::DType dtype = source.Find(tensor.name).entry->dtype;
      if (dtype == model::DType::kBf16) continue;
      dtypes[tensor.name] = std::string(model::DTypeName(dtype));
    }
  }
  return dtypes;
}

int64_t IntervalNs(const v1::Checkpoint& settings) {
  return static_cast<int64_t>(settings.every_minutes() * 60e9);
}

}  // namespace

RunCheckpoints::RunCheckpoints(const v1::JobSpec& spec, Events events)
    : settings_(spec.checkpoint()),
      sampler_(SamplerIdentity(spec)),
      training_(TrainingIdentity(spec)),
      events_(std::move(events)) {}

bool RunCheckpoints::OnBoundary(const Boundary& boundary) {
  const bool by_steps = settings_.every_steps() > 0 &&
                        boundary.step % settings_.every_steps() == 0;
  if (closed_ || !(by_steps || wanted_)) return false;
  if (busy_.exchange(true)) {
    // At the next one, or after the last step.
    wanted_ = true;
    events_.post([this, boundary] { missed_ = boundary; });
    return false;
  }
  wanted_ = false;
  events_.post([this, boundary] { Begin(boundary); });
  return true;
}

void RunCheckpoints::Start(const Job& job, int64_t now_ns) {
  job_ = job;
  due_ns_ = now_ns + IntervalNs(settings_);
}

void RunCheckpoints::RequestLast() {
  last_ = true;
  if (!busy_) wanted_ = true;
}

bool RunCheckpoints::SaveMissed(uint64_t step) {
  if (closed_ || !wanted_ || !missed_.has_value() || missed_->step != step ||
      busy_.exchange(true)) {
    return false;
  }
  wanted_ = false;
  Begin(*missed_);
  return true;
}

void RunCheckpoints::Tick(int64_t now_ns) {
  if (settings_.every_minutes() <= 0 || now_ns < due_ns_) return;
  due_ns_ = now_ns + IntervalNs(settings_);
  Request();
}

void RunCheckpoints::Begin(const Boundary& boundary) {
  if (closed_) return;
  phase_ = Phase::kWriting;
  step_ = boundary.step;
  failure_.clear();
  begun_ns_ = MonotonicNs();
  written_bytes_ = all_bytes_ = 0;
  events_.begun();
  v1::DaemonMessage message;
  message.mutable_open_checkpoint()->set_step(step_);
  events_.send(message);
  thread_.Post([this, boundary] {
    absl::StatusOr<checkpoint::Manifest> manifest = Write(boundary);
    if (!last_) {
      // Those that a failure left held.
      for (size_t u = 0; u < job_.state->layout().units.size(); ++u) {
        job_.engine->Release(static_cast<int>(u));
      }
    }
    events_.post(
        [this, manifest = std::move(manifest)] { OnWritten(manifest); });
  });
}

absl::StatusOr<checkpoint::Manifest> RunCheckpoints::Write(
    const Boundary& boundary) {
  const HostState& state = *job_.state;
  const model::StateLayout& layout = state.layout();
  std::optional<model::TensorSource> blank;
  if (job_.source == nullptr) {
    SDP_ASSIGN_OR_RETURN(blank, model::BlankSource(layout));
  }
  const model::TensorSource& source = blank ? *blank : *job_.source;
  SDP_ASSIGN_OR_RETURN(const std::vector<checkpoint::File> files,
                       checkpoint::MakeFiles(layout, source));
  SDP_ASSIGN_OR_RETURN(
      const NamedFiles passed,
      ReceiveFiles(job_.files->socket.get(), v1::FilesMessage::CHECKPOINT));
  SDP_ASSIGN_OR_RETURN(const std::vector<int> fds, Match(files, passed));
  WriteOptions options;
  options.threads =
      std::clamp(state.plan().update_threads, 1, kMaxWriteThreads);
  options.unit_order = SaveOrder(layout, state.plan().update_mode);
  options.unit_saved = [this](int unit) {
    if (!last_) job_.engine->Release(unit);
  };
  options.stop = &closed_;
  options.written_bytes = &written_bytes_;
  uint64_t all_bytes = 0;
  for (const checkpoint::File& file : files) all_bytes += file.bytes;
  all_bytes_ = all_bytes;
  SDP_ASSIGN_OR_RETURN(const std::vector<uint32_t> crcs,
                       WriteCheckpoint(files, source, state, fds, options));
  checkpoint::Manifest manifest;
  manifest.step = boundary.step;
  manifest.updates = boundary.updates_applied;
  manifest.clip_history = boundary.clip_history;
  manifest.layout_hash = checkpoint::PlanesHash(layout);
  manifest.sampler = sampler_;
  manifest.training = training_;
  manifest.source_dtypes = SourceDtypes(layout, source);
  for (size_t i = 0; i < files.size(); ++i) {
    manifest.files.push_back({files[i].name, files[i].bytes, crcs[i]});
  }
  return manifest;
}

void RunCheckpoints::OnRecord() {
  if (!written_.has_value()) return;
  OnWritten(*std::exchange(written_, std::nullopt));
}

void RunCheckpoints::OnWritten(absl::StatusOr<checkpoint::Manifest> manifest) {
  if (closed_) return;
  v1::DaemonMessage message;
  if (manifest.ok()) {
    std::optional<checkpoint::Memory> memory = events_.memory(manifest->step);
    if (!memory.has_value()) {
      written_ = *std::move(manifest);
      return;
    }
    manifest->memory = *std::move(memory);
    phase_ = Phase::kCommitting;
    message.mutable_commit_checkpoint()->set_manifest(
        checkpoint::ToJson(*manifest));
    thread_.Post([this, message] {
      events_.sync_records();
      events_.post([this, message] {
        if (!closed_) events_.send(message);
      });
    });
  } else {
    phase_ = Phase::kDropping;
    failure_ = std::string(manifest.status().message());
    message.mutable_drop_checkpoint()->set_why(failure_);
    events_.send(message);
  }
}

bool RunCheckpoints::OnMessage(const v1::WorkerMessage& message) {
  CheckpointEnd end;
  if (message.has_checkpoint_committed()) {
    if (phase_ != Phase::kCommitting) return false;
    end.path = Cut(message.checkpoint_committed().path());
    end.warning = Cut(message.checkpoint_committed().warning());
  } else {
    if (phase_ != Phase::kCommitting && phase_ != Phase::kDropping) {
      return false;
    }
    end.failure =
        Cut(failure_.empty() ? message.checkpoint_failed().why() : failure_);
    if (end.failure.empty()) end.failure = "rank 0 gave no reason";
  }
  End(std::move(end));
  return true;
}

void RunCheckpoints::End(CheckpointEnd end) {
  end.step = step_;
  end.seconds = static_cast<double>(MonotonicNs() - begun_ns_) * 1e-9;
  phase_ = Phase::kIdle;
  busy_ = false;
  events_.ended(end);
  if (last_) events_.last_ended();
}

void RunCheckpoints::Close() { closed_ = true; }

void RunCheckpoints::Join() {
  std::promise<void> done;
  thread_.Post([&done] { done.set_value(); });
  done.get_future().wait();
}

}  // namespace slidedp::hostd
