#include "worker/session/session.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/base/status.h"
#include "common/model/blank_source.h"
#include "common/shm/words.h"
#include "proto/protocol.h"
#include "worker/data/job_data.h"
#include "worker/ops/accelerator_ops.h"
#include "worker/session/process_stats.h"

namespace slidedp::session {
namespace {

absl::Status Unexpected(const char* message) {
  return absl::InternalError(
      absl::StrCat("the daemon sent ", message,
                   " out of turn; slidedpd and slidedp-worker must be of one "
                   "release"));
}

}  // namespace

Session::Session(const Config& config, Sweeper* sweeper)
    : config_(config), sweeper_(sweeper) {}

Session::~Session() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  if (device_watcher_.joinable()) device_watcher_.join();
}

void Session::Run() {
  if (absl::Status status = OpenDevice(); !status.ok()) {
    // Nobody to tell but the log, whose last line the daemon reads.
    End(kFailed, std::string(status.message()));
  }
  stream_ = std::make_unique<ControlStream>(
      config_.socket,
      ControlStream::Events{
          [this](const v1::DaemonMessage& m) { OnDaemonMessage(m); },
          [this](const absl::Status& status) { OnStreamEnd(status); }});
  Send(HelloMessage());
  watcher_ = std::thread([this] { Watch(); });
  for (;;) {
    v1::DaemonMessage message = NextMessage();
    absl::Status status;
    switch (message.what_case()) {
      case v1::DaemonMessage::kPropose:
        status = OnPropose(message.propose());
        break;
      case v1::DaemonMessage::kAttach:
        status = OnAttach(message.attach());
        break;
      case v1::DaemonMessage::kStart:
        status = OnStart(message.start().first_step());
        break;
      case v1::DaemonMessage::kOpenOutput:
        status = OnOpenOutput();
        break;
      case v1::DaemonMessage::kCommitOutput:
        status = OnCommitOutput();
        break;
      case v1::DaemonMessage::kLeave:
        stream_->Close(kFarewellNs);
        spdlog::info("job {}: leaves", config_.job);
        scalar_log_.reset();  // writes what it has; nobody adds any more
        // The end of a GPU's streams and communicators may wait for ranks that
        // are gone already.
        if (on_gpu()) _exit(kLeft);
        return;
      default:
        status = Unexpected("an unknown message");
    }
    if (!status.ok()) Fail(status);
  }
}

v1::WorkerMessage Session::HelloMessage() const {
  v1::WorkerMessage message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_job(config_.job);
  hello.set_rank(config_.rank);
  hello.set_protocol(kProtocolVersion);
  hello.set_pid(static_cast<uint32_t>(getpid()));
  hello.set_device(on_gpu() ? v1::DEVICE_KIND_CUDA : v1::DEVICE_KIND_CPU);
  hello.set_device_description(device_->description());
  hello.set_device_memory_bytes(gpu_.memory_bytes);
  // CPU ranks meet in the exchange segment; a GPU that is seen alone trusts
  // NCCL to find a way.
  hello.set_peer_access(gpu_.reaches_others);
  hello.set_numa_node(gpu_.numa_node);
  hello.set_logical_cpus(AllowedCpus());
  return message;
}

absl::Status Session::OnPropose(const v1::Propose& propose) {
  if (attachment_.has_value()) return Unexpected("Propose");
  absl::StatusOr<Proposal> proposal =
      ReadProposal(propose, config_.rank, device_->kind());
  v1::WorkerMessage answer;
  if (proposal.ok()) {
    proposal_ = *std::move(proposal);
    answer.mutable_accept();
  } else {
    std::string why(proposal.status().message());
    spdlog::warn("job {}: refuses the plan: {}", config_.job, why);
    answer.mutable_refuse()->set_why(why);
  }
  Send(answer);
  return absl::OkStatus();
}

absl::Status Session::OnAttach(const v1::Attach& attach) {
  if (!proposal_.has_value() || attachment_.has_value()) {
    return Unexpected("Attach");
  }
  SDP_ASSIGN_OR_RETURN(attachment_,
                       Attachment::Connect(attach, config_.job, config_.rank,
                                           proposal_->layout, proposal_->plan));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    versions_ = &attachment_->versions();
    reports_ = &attachment_->reports();
  }
  // The daemon reads the weights meanwhile; both must be done before Ready.
  // What ranks do together comes while none of them waits for that.
  // Without an output there is nothing that random weights need files for.
  const bool has_files = !proposal_->spec.has_random_weights_seed() ||
                         !proposal_->spec.output().empty() ||
                         !proposal_->resume.empty();
  if (config_.rank == 0) {
    SDP_ASSIGN_OR_RETURN(const bool done, OutputIsThere());
    if (done) return absl::OkStatus();
    const std::string& folder = proposal_->spec.checkpoint().folder();
    if (proposal_->resume.empty() && !folder.empty()) {
      SDP_RETURN_IF_ERROR(checkpoint::CheckNoneIn(folder));
    }
    if (has_files) SDP_RETURN_IF_ERROR(PassSource());
  }
  SDP_RETURN_IF_ERROR(OpenData());
  SDP_RETURN_IF_ERROR(OpenEvalDataset());
  SDP_RETURN_IF_ERROR(OpenScalarLog());
  if (const uint64_t limit = proposal_->plan.gpu_memory_limit_bytes;
      on_gpu() && limit != 0) {
    SDP_RETURN_IF_ERROR(device::SetAcceleratorMemoryLimit(*device_, limit));
  }
  SDP_RETURN_IF_ERROR(MakeOps());
  SDP_RETURN_IF_ERROR(JoinCollectives());
  if (on_gpu()) device_watcher_ = std::thread([this] { WatchDevice(); });
  SDP_RETURN_IF_ERROR(BuildTrainer());
  SDP_RETURN_IF_ERROR(CheckDeviceMemory());
  if (source_.has_value()) SDP_RETURN_IF_ERROR(AwaitSource());
  MakeCheckpoints();
  v1::WorkerMessage message;
  message.mutable_ready()->set_dataset_sequences(data_->sequences());
  message.mutable_ready()->set_device_bytes(trainer_->device_bytes());
  Send(message);
  return absl::OkStatus();
}

absl::Status Session::OpenData() {
  const v1::JobSpec& spec = proposal_->spec;
  SDP_ASSIGN_OR_RETURN(data_, data::OpenJobData(spec, proposal_->config.vocab));
  for (int i = 0; i < spec.sources_size(); ++i) {
    const v1::DataSource& source = spec.sources(i);
    SDP_RETURN_IF_ERROR(data::CheckUnchanged(
        data_->datasets()[i],
        {source.sequences(), source.tokens(), source.crc32c()}));
  }
  return absl::OkStatus();
}

absl::Status Session::BuildTrainer() {
  const policy::Plan& plan = proposal_->plan;
  step::TrainerInputs inputs = {};
  inputs.device = device_.get();
  inputs.ops = ops_.get();
  inputs.param_collective = param_collective_.get();
  inputs.grad_collective = grad_collective_.get();
  inputs.config = &proposal_->config;
  inputs.layout = &proposal_->layout;
  inputs.plan = &plan;
  inputs.rank = static_cast<int>(config_.rank);
  inputs.mixture = &*data_;
  inputs.batch = proposal_->batch_shape();
  inputs.eval = EvaluationInputs();
  inputs.params = &attachment_->params();
  inputs.grads = &attachment_->grads();
  inputs.versions = &attachment_->versions();
  inputs.reports = &attachment_->reports();
  inputs.recorder = &tracer_.recorder();
  if (on_gpu()) {
    inputs.warm_up = [this](const std::function<absl::Status()>& rehearsal) {
      return ops::WarmUpAcceleratorOps(*ops_, rehearsal);
    };
    inputs.ops_workspace_bytes = [this] {
      return ops::AcceleratorOpsWorkspaceBytes(*ops_);
    };
  }
  SDP_ASSIGN_OR_RETURN(trainer_, step::Trainer::Create(inputs));
  std::lock_guard<std::mutex> lock(mutex_);
  watched_trainer_ = trainer_.get();
  device_peak_bytes_ = std::max(device_peak_bytes_, trainer_->device_bytes());
  return absl::OkStatus();
}

absl::Status Session::OnStart(uint64_t first_step) {
  if (trainer_ == nullptr) return Unexpected("Start");
  const uint64_t steps = proposal_->spec.steps();
  if (first_step > steps) return Unexpected("Start");
  SDP_RETURN_IF_ERROR(trainer_->Run(first_step, steps - first_step));
  SendTrace();
  // Everything that this rank will ever hold is there now.
  v1::WorkerMessage last;
  last.mutable_heartbeat()->set_step(trainer_->steps_enqueued());
  last.mutable_heartbeat()->set_device_peak_bytes(DevicePeakBytes());
  last.mutable_heartbeat()->set_pss_bytes(ProcessPssBytes());
  Send(last);
  v1::WorkerMessage message;
  message.mutable_steps_done();
  Send(message);
  return absl::OkStatus();
}

absl::Status Session::OnOpenOutput() {
  if (!source_.has_value() || output_ != nullptr || sweeper_ == nullptr) {
    return Unexpected("OpenOutput");
  }
  const v1::JobSpec& spec = proposal_->spec;
  const std::string tag = absl::StrCat("job-", config_.job);
  SDP_ASSIGN_OR_RETURN(std::string temporary,
                       model::TemporaryFolder::PathOf(spec.output(), tag));
  SDP_RETURN_IF_ERROR(sweeper_->Watch(temporary));
  absl::StatusOr<std::unique_ptr<model::OutputFolder>> output =
      model::OutputFolder::Create(spec.output(), spec.model(), *source_,
                                  proposal_->layout, tag);
  if (!output.ok()) {
    // It has removed what it made; what is there is another's.
    SDP_RETURN_IF_ERROR(sweeper_->Forget());
    return output.status();
  }
  output_ = *std::move(output);
  std::vector<std::string> names;
  std::vector<int> fds;
  for (size_t i = 0; i < output_->files().size(); ++i) {
    names.push_back(source_->files()[i].name);
    fds.push_back(output_->files()[i].get());
  }
  SDP_RETURN_IF_ERROR(
      attachment_->PassFiles(v1::FilesMessage::OUTPUT, names, fds));
  absl::StatusOr<std::vector<std::string>> warnings = attachment_->AwaitFiles();
  if (!warnings.ok()) {
    return Annotate(warnings.status(), absl::StrCat("write ", spec.output()));
  }
  for (const std::string& warning : *warnings) {
    spdlog::warn("job {}: {}", config_.job, warning);
  }
  v1::WorkerMessage message;
  message.mutable_output_opened();
  Send(message);
  return absl::OkStatus();
}

absl::Status Session::OnCommitOutput() {
  if (output_ == nullptr) return Unexpected("CommitOutput");
  SDP_RETURN_IF_ERROR(output_->Commit());
  v1::WorkerMessage message;
  message.mutable_output_committed()->set_path(proposal_->spec.output());
  Send(message);
  return absl::OkStatus();
}

v1::DaemonMessage Session::NextMessage() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !messages_.empty(); });
  v1::DaemonMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void Session::Send(const v1::WorkerMessage& message) {
  // A broken stream is the control thread's to see: it ends the process.
  if (stream_->Send(message)) return;
  spdlog::debug("job {}: a message was not sent", config_.job);
}

void Session::SendTrace() {
  for (const v1::WorkerMessage& part : tracer_.Take()) Send(part);
}

void Session::OnDaemonMessage(const v1::DaemonMessage& message) {
  if (message.has_abort()) {
    bool expected;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      expected = leaving_;
    }
    // After Failed the abort is the answer to it; Fail ends the process.
    if (!expected) {
      End(kAborted, absl::StrCat("aborted: ", message.abort().why()));
    }
    return;
  }
  // While the main thread trains, which reads no messages.
  if (message.has_trace_steps()) return tracer_.Start(message.trace_steps());
  std::lock_guard<std::mutex> lock(mutex_);
  if (message.has_record()) {
    if (scalar_log_ != nullptr) scalar_log_->Add(message.record());
    return;
  }
  if (Checkpoints::Takes(message) && checkpoints_ != nullptr) {
    return checkpoints_->Post(message);
  }
  if (message.has_leave()) leaving_ = true;
  messages_.push_back(message);
  changed_.notify_all();
}

}  // namespace slidedp::session
