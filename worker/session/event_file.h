// TensorBoard's event files, scalars only: tf.Event messages (tensorflow's
// event.proto and summary.proto) in the framing of TFRecord files. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/job.pb.h"

namespace slidedp::session {

struct Scalar {
  absl::string_view tag;
  float value;
};

// The first record of a file.
std::string VersionEvent(double wall_time_s);
std::string ScalarEvent(double wall_time_s, uint64_t step,
                        const std::vector<Scalar>& scalars);
// Length and data, each with its masked CRC-32C.
std::string Framed(absl::string_view event);

// What is shown of a record, and after how many steps.
std::vector<Scalar> ScalarsOf(const v1::Record& record);
uint64_t StepOf(const v1::Record& record);

}  // namespace slidedp::session
