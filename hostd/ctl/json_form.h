// The JSON that slidedpctl prints: a contract with scripts. Names are stable,
// numbers in base units, times RFC 3339 in UTC, a number that does not exist is
// null. Every document, and every line of a stream, has "api_version": "1".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "policy/plan.h"
#include "proto/control.pb.h"

namespace slidedp::ctl {

using Json = nlohmann::ordered_json;

// {"api_version": "1"}, to be filled.
Json JsonDocument();
std::string ToText(const Json& json);  // one line

// "2024-05-01T12:00:00.123456Z"; null for 0.
Json JsonTime(int64_t unix_us);
// null unless finite.
Json JsonReal(double value);

Json JsonJob(const v1::JobInfo& info);
Json JsonStep(const v1::StepRecord& step);
Json JsonEval(const v1::EvalRecord& eval);
// In the job file's own shape, with `dataset` facts besides.
Json JsonSpec(const v1::JobSpec& spec);
Json JsonPlan(const v1::Plan& plan);
Json JsonBytes(const std::vector<policy::NamedBytes>& parts);

// The job file's words: "gpu_sharded", "cosine", ...
const char* Word(v1::ParamRoute route);
const char* Word(v1::GradRoute route);
const char* Word(v1::ReduceDtype dtype);
const char* Word(v1::DeviceKind device);
const char* Word(v1::ScheduleKind kind);
const char* Word(v1::DecayKind kind);
const char* Word(v1::LaunchKind kind);
const char* Word(v1::UpdateMode mode);
// "PENDING", ...; "UNKNOWN" for one of a newer daemon.
const char* Word(v1::JobState state);

bool HasEnded(v1::JobState state);

}  // namespace slidedp::ctl
