#include "proto/spans.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"

namespace slidedp {
namespace {

constexpr int kMaxNames = 64;
constexpr size_t kMaxNameBytes = 64;
constexpr uint32_t kLanes = static_cast<uint32_t>(trace::Lane::kControl) + 1;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("malformed spans of a trace: ", what));
}

absl::Status Check(const v1::Spans& wire) {
  const int count = wire.name_size();
  if (count > kMaxSpansPerMessage) return Malformed("too many in a message");
  for (int size :
       {wire.lane_size(), wire.unit_size(), wire.chunk_size(), wire.step_size(),
        wire.begin_ns_size(), wire.end_ns_size()}) {
    if (size != count) return Malformed("columns of unequal length");
  }
  if (wire.names_size() > kMaxNames) return Malformed("too many names");
  for (const std::string& name : wire.names()) {
    if (name.empty() || name.size() > kMaxNameBytes) {
      return Malformed("the length of a name");
    }
  }
  for (int i = 0; i < count; ++i) {
    if (wire.name(i) >= static_cast<uint32_t>(wire.names_size())) {
      return Malformed("a name that is not there");
    }
    if (wire.lane(i) >= kLanes) return Malformed("an unknown lane");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<v1::Spans> ToWire(const std::vector<trace::Span>& spans) {
  std::vector<v1::Spans> parts(1);
  std::map<std::string, uint32_t> names;
  for (const trace::Span& span : spans) {
    if (parts.back().name_size() == kMaxSpansPerMessage) {
      parts.emplace_back();
      names.clear();
    }
    v1::Spans& part = parts.back();
    const auto [name, is_new] =
        names.emplace(span.name, static_cast<uint32_t>(names.size()));
    if (is_new) part.add_names(span.name);
    part.add_name(name->second);
    part.add_lane(static_cast<uint32_t>(span.lane));
    part.add_unit(span.unit);
    part.add_chunk(span.chunk);
    part.add_step(span.step);
    part.add_begin_ns(span.begin_ns);
    part.add_end_ns(span.end_ns);
  }
  return parts;
}

absl::StatusOr<std::vector<trace::Span>> FromWire(
    const v1::Spans& wire, std::set<std::string>& names) {
  if (absl::Status status = Check(wire); !status.ok()) return status;
  std::vector<const char*> kept;
  for (const std::string& name : wire.names()) {
    kept.push_back(names.insert(name).first->c_str());
  }
  std::vector<trace::Span> spans(wire.name_size());
  for (int i = 0; i < wire.name_size(); ++i) {
    spans[i] = {.lane = static_cast<trace::Lane>(wire.lane(i)),
                .name = kept[wire.name(i)],
                .unit = wire.unit(i),
                .chunk = wire.chunk(i),
                .step = wire.step(i),
                .begin_ns = wire.begin_ns(i),
                .end_ns = wire.end_ns(i)};
  }
  return spans;
}

}  // namespace slidedp
