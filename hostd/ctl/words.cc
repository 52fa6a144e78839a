// Enums as job files and JSON have them.
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

const char* Word(v1::ParamRoute route) {
  switch (route) {
    case v1::PARAM_ROUTE_FULL:
      return "full";
    case v1::PARAM_ROUTE_SHARDED:
      return "sharded";
    default:
      return "auto";
  }
}

const char* Word(v1::GradRoute route) {
  switch (route) {
    case v1::GRAD_ROUTE_GPU_ROOT:
      return "gpu_root";
    case v1::GRAD_ROUTE_GPU_SHARDED:
      return "gpu_sharded";
    case v1::GRAD_ROUTE_CPU:
      return "cpu";
    default:
      return "auto";
  }
}

const char* Word(v1::ReduceDtype dtype) {
  switch (dtype) {
    case v1::REDUCE_DTYPE_FP32:
      return "fp32";
    case v1::REDUCE_DTYPE_BF16:
      return "bf16";
    default:
      return "auto";
  }
}

const char* Word(v1::DeviceKind device) {
  switch (device) {
    case v1::DEVICE_KIND_CPU:
      return "cpu";
    case v1::DEVICE_KIND_CUDA:
      return "cuda";
    default:
      return "auto";
  }
}

const char* Word(v1::ScheduleKind kind) {
  switch (kind) {
    case v1::SCHEDULE_KIND_CONSTANT:
      return "constant";
    case v1::SCHEDULE_KIND_COSINE:
      return "cosine";
    case v1::SCHEDULE_KIND_WSD:
      return "wsd";
    default:
      return "linear";
  }
}

const char* Word(v1::DecayKind kind) {
  switch (kind) {
    case v1::DECAY_KIND_LINEAR:
      return "linear";
    case v1::DECAY_KIND_ONE_MINUS_SQRT:
      return "1-sqrt";
    default:
      return "cosine";
  }
}

const char* Word(v1::LaunchKind kind) {
  return kind == v1::LAUNCH_KIND_MANUAL ? "manual" : "daemon";
}

const char* Word(v1::UpdateMode mode) {
  switch (mode) {
    case v1::UPDATE_MODE_EAGER:
      return "eager";
    case v1::UPDATE_MODE_SPECULATIVE:
      return "speculative";
    case v1::UPDATE_MODE_DEFERRED:
      return "deferred";
    default:
      return "auto";
  }
}

const char* Word(v1::JobState state) {
  switch (state) {
    case v1::PENDING:
      return "PENDING";
    case v1::CONFIGURING:
      return "CONFIGURING";
    case v1::RUNNING:
      return "RUNNING";
    case v1::COMPLETING:
      return "COMPLETING";
    case v1::COMPLETED:
      return "COMPLETED";
    case v1::FAILED:
      return "FAILED";
    case v1::CANCELLED:
      return "CANCELLED";
    default:
      return "UNKNOWN";
  }
}

bool HasEnded(v1::JobState state) {
  return state == v1::COMPLETED || state == v1::FAILED ||
         state == v1::CANCELLED;
}

}  // namespace slidedp::ctl
