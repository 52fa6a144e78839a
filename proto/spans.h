// Spans of a trace on the wire.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/trace/trace.h"
#include "proto/control.pb.h"

namespace slidedp {

// Spans of one message at most: some 20 bytes each, far below what gRPC takes.
inline constexpr int kMaxSpansPerMessage = 16384;

// All of one step and process, in messages of at most kMaxSpansPerMessage; one
// empty message if there are none.
std::vector<v1::Spans> ToWire(const std::vector<trace::Span>& spans);

// Refuses columns of unequal length, unknown lanes and what else no sender of
// this release makes. Names are kept in `names`, which outlives the spans.
absl::StatusOr<std::vector<trace::Span>> FromWire(const v1::Spans& wire,
                                                  std::set<std::string>& names);

}  // namespace slidedp
