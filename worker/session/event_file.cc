#include "worker/session/event_file.h"

#include <bit>

#include "common/base/crc32c.h"

namespace slidedp::session {
namespace {

// Numbers of fields, and wire types of protobuf.
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5;
constexpr uint32_t kValue = 1;                  // of Summary, repeated
constexpr uint32_t kTag = 1, kSimpleValue = 2;  // of Summary.Value
constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

template <typename T>
void AddFixed(T value, std::string& out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

void AddVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>(value | 0x80));
  }
  out.push_back(static_cast<char>(value));
}

void AddKey(uint32_t field, uint32_t type, std::string& out) {
  AddVarint(field << 3 | type, out);
}

void AddBytes(uint32_t field, absl::string_view bytes, std::string& out) {
  AddKey(field, kBytes, out);
  AddVarint(bytes.size(), out);
  out.append(bytes.data(), bytes.size());
}

std::string Event(double wall_time_s) {
  std::string event;
  AddKey(kWallTime, kFixed64, event);
  AddFixed(std::bit_cast<uint64_t>(wall_time_s), event);
  return event;
}

// TFRecord's, so that the checksum of data that holds checksums is no constant.
uint32_t Masked(absl::string_view data) {
  const uint32_t crc = Crc32c(0, data.data(), data.size());
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

float Milliseconds(int64_t ns) { return static_cast<float>(ns) * 1e-6f; }
float Gib(uint64_t bytes) { return static_cast<float>(bytes) / (1u << 30); }

}  // namespace

std::string VersionEvent(double wall_time_s) {
  std::string event = Event(wall_time_s);
  AddBytes(kFileVersion, "brain.Event:2", event);
  return event;
}

std::string ScalarEvent(double wall_time_s, uint64_t step,
                        const std::vector<Scalar>& scalars) {
  std::string event = Event(wall_time_s);
  AddKey(kStep, kVarint, event);
  AddVarint(step, event);
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;
    AddBytes(kTag, scalar.tag, value);
    AddKey(kSimpleValue, kFixed32, value);
    AddFixed(std::bit_cast<uint32_t>(scalar.value), value);
    AddBytes(kValue, value, summary);
  }
  AddBytes(kSummary, summary, event);
  return event;
}

std::string Framed(absl::string_view event) {
  std::string out;
  AddFixed(static_cast<uint64_t>(event.size()), out);
  AddFixed(Masked(out), out);
  out.append(event.data(), event.size());
  AddFixed(Masked(event), out);
  return out;
}

uint64_t StepOf(const v1::Record& record) {
  return record.has_eval() ? record.eval().step() : record.step().step();
}

std::vector<Scalar> ScalarsOf(const v1::Record& record) {
  if (record.has_eval()) {
    return {{"eval/loss", static_cast<float>(record.eval().loss())}};
  }
  const v1::StepRecord& step = record.step();
  std::vector<Scalar> scalars = {
      {"train/loss", static_cast<float>(step.loss())},
      {"train/grad_norm", static_cast<float>(step.grad_norm())},
      {"train/clip_coefficient", static_cast<float>(step.clip_coefficient())},
      {"train/learning_rate", static_cast<float>(step.lr())},
      {"train/skipped", step.skipped() ? 1.0f : 0.0f},
      {"speed/tokens_per_second", static_cast<float>(step.tokens_per_second())},
      {"speed/deliver_ms", Milliseconds(step.deliver_ns())},
      {"speed/compute_ms", Milliseconds(step.compute_ns())},
      {"speed/stall_ms", Milliseconds(step.stall_ns())},
      {"speed/reduce_ms", Milliseconds(step.reduce_ns())},
      {"speed/drain_ms", Milliseconds(step.drain_ns())},
      {"speed/update_ms", Milliseconds(step.update_ns())},
      {"memory/host_gib", Gib(step.host_pss_bytes())},
      {"memory/device_gib", Gib(step.device_bytes())},
  };
  if (step.has_mfu()) {
    scalars.push_back({"speed/mfu", static_cast<float>(step.mfu())});
  }
  return scalars;
}

}  // namespace slidedp::session
