#include "policy/wire.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::policy {
namespace {

v1::Routes ToWire(const Routes& routes) {
  v1::Routes wire;
  wire.set_params(routes.params == ParamRoute::kFull ? v1::PARAM_ROUTE_FULL
                                                     : v1::PARAM_ROUTE_SHARDED);
  switch (routes.grads) {
    case GradRoute::kGpuRoot:
      wire.set_grads(v1::GRAD_ROUTE_GPU_ROOT);
      break;
    case GradRoute::kGpuSharded:
      wire.set_grads(v1::GRAD_ROUTE_GPU_SHARDED);
      break;
    case GradRoute::kCpu:
      wire.set_grads(v1::GRAD_ROUTE_CPU);
      break;
  }
  wire.set_reduce(routes.reduce == ReduceDType::kF32 ? v1::REDUCE_DTYPE_FP32
                                                     : v1::REDUCE_DTYPE_BF16);
  return wire;
}

absl::Status Bad(absl::string_view field, uint64_t value) {
  return InvalidInput("plan", field, absl::StrCat(value), "out of range",
                      "daemon and worker must be of one release");
}

absl::StatusOr<std::optional<ParamRoute>> FromWire(v1::ParamRoute route) {
  switch (route) {
    case v1::PARAM_ROUTE_UNSPECIFIED:
      return std::nullopt;
    case v1::PARAM_ROUTE_FULL:
      return ParamRoute::kFull;
    case v1::PARAM_ROUTE_SHARDED:
      return ParamRoute::kSharded;
    default:
      return Bad("routes.params", route);
  }
}

absl::StatusOr<std::optional<GradRoute>> FromWire(v1::GradRoute route) {
  switch (route) {
    case v1::GRAD_ROUTE_UNSPECIFIED:
      return std::nullopt;
    case v1::GRAD_ROUTE_GPU_ROOT:
      return GradRoute::kGpuRoot;
    case v1::GRAD_ROUTE_GPU_SHARDED:
      return GradRoute::kGpuSharded;
    case v1::GRAD_ROUTE_CPU:
      return GradRoute::kCpu;
    default:
      return Bad("routes.grads", route);
  }
}

absl::StatusOr<std::optional<ReduceDType>> FromWire(v1::ReduceDtype dtype) {
  switch (dtype) {
    case v1::REDUCE_DTYPE_UNSPECIFIED:
      return std::nullopt;
    case v1::REDUCE_DTYPE_FP32:
      return ReduceDType::kF32;
    case v1::REDUCE_DTYPE_BF16:
      return ReduceDType::kBf16;
    default:
      return Bad("routes.reduce", dtype);
  }
}

absl::StatusOr<std::optional<UpdateMode>> FromWire(v1::UpdateMode mode) {
  switch (mode) {
    case v1::UPDATE_MODE_UNSPECIFIED:
      return std::nullopt;
    case v1::UPDATE_MODE_EAGER:
      return UpdateMode::kEager;
    case v1::UPDATE_MODE_DEFERRED:
      return UpdateMode::kDeferred;
    case v1::UPDATE_MODE_SPECULATIVE:
      return UpdateMode::kSpeculative;
    default:
      return Bad("update_mode", mode);
  }
}

absl::StatusOr<bool> IsFloat32(v1::ComputeDtype dtype) {
  switch (dtype) {
    case v1::COMPUTE_DTYPE_BF16:
      return false;
    case v1::COMPUTE_DTYPE_FP32:
      return true;
    default:
      return Bad("compute_dtype", dtype);
  }
}

absl::StatusOr<RouteChoice> ChoiceFromWire(const v1::Routes& wire) {
  RouteChoice choice;
  SDP_ASSIGN_OR_RETURN(choice.params, FromWire(wire.params()));
  SDP_ASSIGN_OR_RETURN(choice.grads, FromWire(wire.grads()));
  SDP_ASSIGN_OR_RETURN(choice.reduce, FromWire(wire.reduce()));
  return choice;
}

absl::StatusOr<Routes> FromWire(const v1::Routes& wire) {
  SDP_ASSIGN_OR_RETURN(const RouteChoice choice, ChoiceFromWire(wire));
  if (!choice.params || !choice.grads || !choice.reduce) {
    return Bad("routes", 0);
  }
  return Routes{*choice.params, *choice.grads, *choice.reduce};
}

absl::StatusOr<std::vector<uint8_t>> MasksFromWire(absl::string_view field,
                                                   const std::string& wire) {
  std::vector<uint8_t> masks(wire.begin(), wire.end());
  for (const uint8_t mask : masks) {
    if (mask >> kSegments != 0) return Bad(field, mask);
  }
  return masks;
}

absl::StatusOr<std::vector<uint16_t>> FromWire(
    absl::string_view field,
    const google::protobuf::RepeatedField<uint32_t>& wire) {
  std::vector<uint16_t> shares;
  for (const uint32_t permille : wire) {
    if (permille > kOffloadAll) return Bad(field, permille);
    shares.push_back(static_cast<uint16_t>(permille));
  }
  return shares;
}

}  // namespace

v1::Plan ToWire(const Plan& plan) {
  v1::Plan wire;
  wire.set_version(1);
  wire.set_ranks(plan.ranks);
  *wire.mutable_embedding() = ToWire(plan.embedding);
  *wire.mutable_decoder() = ToWire(plan.decoder);
  *wire.mutable_head() = ToWire(plan.head);
  switch (plan.update_mode) {
    case UpdateMode::kEager:
      wire.set_update_mode(v1::UPDATE_MODE_EAGER);
      break;
    case UpdateMode::kDeferred:
      wire.set_update_mode(v1::UPDATE_MODE_DEFERRED);
      break;
    case UpdateMode::kSpeculative:
      wire.set_update_mode(v1::UPDATE_MODE_SPECULATIVE);
      break;
  }
  wire.set_sequence_length(plan.sequence_length);
  wire.set_micro_batch_size(plan.micro_batch_size);
  wire.set_micro_batches(plan.micro_batches);
  wire.set_h2d_chunk_bytes(plan.h2d_chunk_bytes);
  wire.set_d2h_chunk_bytes(plan.d2h_chunk_bytes);
  wire.set_window_slots(plan.window_slots);
  wire.set_grad_slots(plan.grad_slots);
  wire.set_own_chunks(plan.own_chunks);
  wire.set_ring_chunks(plan.ring_chunks);
  wire.set_head_chunk_tokens(plan.head_chunk_tokens);
  wire.set_compute_threads(plan.compute_threads);
  wire.set_update_threads(plan.update_threads);
  wire.set_device(plan.device == DeviceKind::kCpu ? v1::DEVICE_KIND_CPU
                                                  : v1::DEVICE_KIND_CUDA);
  wire.set_keep(plan.keep.data(), plan.keep.size());
  wire.set_compute_dtype(plan.float32 ? v1::COMPUTE_DTYPE_FP32
                                      : v1::COMPUTE_DTYPE_BF16);
  wire.set_deterministic(plan.deterministic);
  wire.set_gpu_memory_limit_bytes(plan.gpu_memory_limit_bytes);
  wire.set_documents_per_sequence(plan.documents_per_sequence);
  wire.mutable_offload_permille()->Add(plan.offload_permille.begin(),
                                       plan.offload_permille.end());
  wire.set_stage_slots(plan.stage_slots);
  return wire;
}

absl::StatusOr<Plan> FromWire(const v1::Plan& wire) {
  if (wire.version() != 1) return Bad("version", wire.version());
  constexpr uint64_t kMaxCount = uint64_t{1} << 40;
  struct Field {
    absl::string_view name;
    uint64_t value;
    uint64_t max;
  };
  const Field fields[] = {
      {"ranks", wire.ranks(), 64},
      {"sequence_length", wire.sequence_length(), uint64_t{1} << 24},
      {"micro_batch_size", wire.micro_batch_size(), uint64_t{1} << 24},
      {"micro_batches", wire.micro_batches(), uint64_t{1} << 20},
      {"h2d_chunk_bytes", wire.h2d_chunk_bytes(), kMaxCount},
      {"d2h_chunk_bytes", wire.d2h_chunk_bytes(), kMaxCount},
      {"window_slots", wire.window_slots(), 1024},
      {"grad_slots", wire.grad_slots(), 1024},
      {"ring_chunks", wire.ring_chunks(), 65536},
      {"head_chunk_tokens", wire.head_chunk_tokens(), uint64_t{1} << 24},
      {"compute_threads", wire.compute_threads(), 1024},
      {"update_threads", wire.update_threads(), 1024},
      {"stage_slots", wire.stage_slots(), 1024},
  };
  for (const Field& field : fields) {
    if (field.value < 1 || field.value > field.max) {
      return Bad(field.name, field.value);
    }
  }
  if (wire.own_chunks() > 65536) return Bad("own_chunks", wire.own_chunks());
  Plan plan;
  plan.ranks = static_cast<int>(wire.ranks());
  SDP_ASSIGN_OR_RETURN(plan.embedding, FromWire(wire.embedding()));
  SDP_ASSIGN_OR_RETURN(plan.decoder, FromWire(wire.decoder()));
  SDP_ASSIGN_OR_RETURN(plan.head, FromWire(wire.head()));
  SDP_ASSIGN_OR_RETURN(auto update_mode, FromWire(wire.update_mode()));
  if (!update_mode) return Bad("update_mode", wire.update_mode());
  plan.update_mode = *update_mode;
  switch (wire.device()) {
    case v1::DEVICE_KIND_CPU:
      plan.device = DeviceKind::kCpu;
      break;
    case v1::DEVICE_KIND_CUDA:
      plan.device = DeviceKind::kCuda;
      break;
    default:
      return Bad("device", wire.device());
  }
  plan.sequence_length = static_cast<int64_t>(wire.sequence_length());
  plan.micro_batch_size = static_cast<int64_t>(wire.micro_batch_size());
  plan.micro_batches = static_cast<int64_t>(wire.micro_batches());
  if (wire.documents_per_sequence() > wire.sequence_length()) {
    return Bad("documents_per_sequence", wire.documents_per_sequence());
  }
  plan.documents_per_sequence =
      static_cast<int64_t>(wire.documents_per_sequence());
  plan.h2d_chunk_bytes = wire.h2d_chunk_bytes();
  plan.d2h_chunk_bytes = wire.d2h_chunk_bytes();
  plan.window_slots = static_cast<int>(wire.window_slots());
  plan.grad_slots = static_cast<int>(wire.grad_slots());
  plan.own_chunks = wire.own_chunks();
  plan.ring_chunks = wire.ring_chunks();
  plan.head_chunk_tokens = static_cast<int64_t>(wire.head_chunk_tokens());
  plan.compute_threads = static_cast<int>(wire.compute_threads());
  plan.update_threads = static_cast<int>(wire.update_threads());
  SDP_ASSIGN_OR_RETURN(plan.keep, MasksFromWire("keep", wire.keep()));
  SDP_ASSIGN_OR_RETURN(plan.offload_permille,
                       FromWire("offload_permille", wire.offload_permille()));
  plan.stage_slots = static_cast<int>(wire.stage_slots());
  SDP_ASSIGN_OR_RETURN(plan.float32, IsFloat32(wire.compute_dtype()));
  plan.deterministic = wire.deterministic();
  plan.gpu_memory_limit_bytes = wire.gpu_memory_limit_bytes();
  return plan;
}

absl::StatusOr<Problem> ProblemOf(const v1::JobSpec& spec,
                                  const model::ModelConfig& config,
                                  DeviceKind device, bool peer_access,
                                  int logical_cpus) {
  constexpr uint64_t kMax = std::numeric_limits<int32_t>::max();
  struct Field {
    absl::string_view name;
    uint64_t value;
  };
  for (const Field& field :
       {Field{"ranks", spec.ranks()},
        Field{"sequence_length", spec.sequence_length()},
        Field{"batch_size", spec.batch_size()},
        Field{"micro_batch_size", spec.micro_batch_size()},
        Field{"documents_per_sequence", spec.documents_per_sequence()},
        Field{"tuning.window_slots", spec.tuning().window_slots()},
        Field{"tuning.grad_slots", spec.tuning().grad_slots()},
        Field{"tuning.head_chunk_tokens", spec.tuning().head_chunk_tokens()},
        Field{"tuning.compute_threads", spec.tuning().compute_threads()},
        Field{"tuning.update_threads", spec.tuning().update_threads()},
        Field{"tuning.stage_slots", spec.tuning().stage_slots()},
        Field{"tuning.kept_layers", spec.tuning().kept_layers()}}) {
    if (field.value > kMax) {
      return InvalidInput("", field.name, absl::StrCat(field.value),
                          "out of range", "choose a smaller number");
    }
  }
  Problem problem;
  problem.config = config;
  problem.ranks = static_cast<int>(spec.ranks());
  problem.device = device;
  problem.peer_access = peer_access;
  problem.logical_cpus = logical_cpus;
  problem.sequence_length = static_cast<int64_t>(spec.sequence_length());
  problem.batch_size = static_cast<int64_t>(spec.batch_size());
  problem.micro_batch_size = static_cast<int64_t>(spec.micro_batch_size());
  problem.documents_per_sequence =
      static_cast<int64_t>(spec.documents_per_sequence());
  problem.clipping = spec.has_max_grad_norm();
  SDP_ASSIGN_OR_RETURN(problem.params, FromWire(spec.routes().params()));
  SDP_ASSIGN_OR_RETURN(problem.grads, FromWire(spec.routes().grads()));
  SDP_ASSIGN_OR_RETURN(problem.reduce, FromWire(spec.routes().reduce()));
  const v1::Tuning& tuning = spec.tuning();
  problem.h2d_chunk_bytes = tuning.h2d_chunk_bytes();
  problem.d2h_chunk_bytes = tuning.d2h_chunk_bytes();
  problem.own_chunks = tuning.own_chunks();
  problem.ring_chunks = tuning.ring_chunks();
  problem.window_slots = static_cast<int>(tuning.window_slots());
  problem.grad_slots = static_cast<int>(tuning.grad_slots());
  problem.head_chunk_tokens = static_cast<int64_t>(tuning.head_chunk_tokens());
  problem.compute_threads = static_cast<int>(tuning.compute_threads());
  problem.update_threads = static_cast<int>(tuning.update_threads());
  if (tuning.has_kept_layers()) {
    problem.kept_layers = static_cast<int>(tuning.kept_layers());
  }
  if (tuning.keep_mask() >> kSegments != 0) {
    return InvalidInput("", "tuning.keep_mask",
                        absl::StrCat(tuning.keep_mask()), "out of range",
                        "choose a mask of 7 bits, 0 to 127");
  }
  problem.keep_mask = static_cast<uint8_t>(tuning.keep_mask());
  SDP_ASSIGN_OR_RETURN(problem.keep,
                       MasksFromWire("tuning.keep", tuning.keep()));
  SDP_ASSIGN_OR_RETURN(
      problem.offload_permille,
      FromWire("tuning.offload_permille", tuning.offload_permille()));
  problem.stage_slots = static_cast<int>(tuning.stage_slots());
  SDP_ASSIGN_OR_RETURN(problem.embedding,
                       ChoiceFromWire(tuning.embedding_routes()));
  SDP_ASSIGN_OR_RETURN(problem.decoder,
                       ChoiceFromWire(tuning.decoder_routes()));
  SDP_ASSIGN_OR_RETURN(problem.head, ChoiceFromWire(tuning.head_routes()));
  problem.gpu_memory_limit_bytes = tuning.gpu_memory_limit_bytes();
  SDP_ASSIGN_OR_RETURN(problem.update_mode, FromWire(spec.update_mode()));
  SDP_ASSIGN_OR_RETURN(problem.float32, IsFloat32(spec.compute_dtype()));
  problem.deterministic = spec.deterministic();
  return problem;
}

model::TensorRules RulesOf(const v1::JobSpec& spec) {
  model::TensorRules rules;
  rules.freeze.assign(spec.freeze().begin(), spec.freeze().end());
  if (spec.optimizer().has_no_decay()) {
    const auto& patterns = spec.optimizer().no_decay().patterns();
    rules.no_decay.emplace(patterns.begin(), patterns.end());
  }
  return rules;
}

}  // namespace slidedp::policy
