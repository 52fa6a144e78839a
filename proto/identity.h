// What a checkpoint's manifest says of the job that made it.
#pragma once

#include <map>
#include <string>

#include "proto/job.pb.h"

namespace slidedp {

// What decides which tokens a step sees: must be the same to go on. Fields that
// choose data belong here.
std::map<std::string, std::string> SamplerIdentity(const v1::JobSpec& spec);
// What decides what is done with them: a job that goes on may have another.
std::map<std::string, std::string> TrainingIdentity(const v1::JobSpec& spec);

// On which sequences it is evaluated; empty: on none.
std::map<std::string, std::string> HeldOutIdentity(const v1::JobSpec& spec);

}  // namespace slidedp
