#include "hostd/daemon/step_records.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "nlohmann/json.hpp"

namespace slidedp::hostd {
namespace {

using nlohmann::json;

constexpr absl::string_view kStepPrefix = "{\"step\":";
constexpr absl::string_view kEvalPrefix = "{\"eval_step\":";
constexpr size_t kPieceBytes = 256 * kKiB;
constexpr size_t kMaxLineBytes = 16 * kKiB;
// The last records tell the present speed.
constexpr size_t kSpeedWindow = 32;

std::string Number(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.17g", value) : "null";
}

double ReadNumber(const json& object, const char* key) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return it->get<double>();
}

// In the order of v1::Record: after s steps comes 2 s, its evaluation follows.
uint64_t PlaceOf(const v1::Record& record) {
  return record.has_eval() ? 2 * record.eval().step() + 1
                           : 2 * record.step().step();
}

// Of a line, without parsing the rest of it.
bool PlaceOf(absl::string_view line, uint64_t& place) {
  const bool eval = absl::ConsumePrefix(&line, kEvalPrefix);
  if (!eval && !absl::ConsumePrefix(&line, kStepPrefix)) return false;
  uint64_t step;
  if (!absl::SimpleAtoi(line.substr(0, line.find(',')), &step)) return false;
  place = 2 * step + eval;
  return true;
}

v1::EvalRecord ReadEval(const json& o) {
  v1::EvalRecord r;
  r.set_step(o.at("eval_step").get<uint64_t>());
  r.set_loss(ReadNumber(o, "loss"));
  r.set_valid_tokens(o.at("valid_tokens").get<uint64_t>());
  r.set_sequences(o.at("sequences").get<uint64_t>());
  r.set_seconds(ReadNumber(o, "seconds"));
  r.set_best(o.at("best").get<bool>());
  return r;
}

}  // namespace

std::string ToJsonLine(const v1::StepRecord& r) {
  return absl::StrCat(
      kStepPrefix, r.step(), ",\"loss\":", Number(r.loss()),
      ",\"grad_norm\":", Number(r.grad_norm()),
      ",\"clip_coefficient\":", Number(r.clip_coefficient()),
      ",\"lr\":", Number(r.lr()), ",\"valid_tokens\":", r.valid_tokens(),
      ",\"tokens\":", r.tokens(), ",\"seconds\":", Number(r.seconds()),
      ",\"skipped\":", r.skipped() ? "true" : "false", ",\"skip_reason\":",
      json(r.skip_reason())
          .dump(-1, ' ', false, json::error_handler_t::replace),
      ",\"deliver_ns\":", r.deliver_ns(), ",\"compute_ns\":", r.compute_ns(),
      ",\"reduce_ns\":", r.reduce_ns(), ",\"drain_ns\":", r.drain_ns(),
      ",\"stall_ns\":", r.stall_ns(), ",\"update_ns\":", r.update_ns(),
      ",\"offload_ns\":", r.offload_ns(),
      ",\"offload_wait_ns\":", r.offload_wait_ns(), ",\"end_ns\":", r.end_ns(),
      ",\"tokens_per_second\":", Number(r.tokens_per_second()),
      ",\"mfu\":", r.has_mfu() ? Number(r.mfu()) : "null",
      ",\"loss_spike\":", r.loss_spike() ? "true" : "false",
      ",\"host_pss_bytes\":", r.host_pss_bytes(),
      ",\"device_bytes\":", r.device_bytes(), "}");
}

std::string ToJsonLine(const v1::EvalRecord& r) {
  return absl::StrCat(kEvalPrefix, r.step(), ",\"loss\":", Number(r.loss()),
                      ",\"valid_tokens\":", r.valid_tokens(),
                      ",\"sequences\":", r.sequences(),
                      ",\"seconds\":", Number(r.seconds()),
                      ",\"best\":", r.best() ? "true" : "false", "}");
}

absl::StatusOr<v1::Record> FromJsonLine(absl::string_view line) {
  try {
    json o = json::parse(line.begin(), line.end());
    v1::Record record;
    if (o.contains("eval_step")) {
      *record.mutable_eval() = ReadEval(o);
      return record;
    }
    v1::StepRecord& r = *record.mutable_step();
    r.set_step(o.at("step").get<uint64_t>());
    r.set_loss(ReadNumber(o, "loss"));
    r.set_grad_norm(ReadNumber(o, "grad_norm"));
    r.set_clip_coefficient(ReadNumber(o, "clip_coefficient"));
    r.set_lr(ReadNumber(o, "lr"));
    r.set_valid_tokens(o.at("valid_tokens").get<uint64_t>());
    r.set_tokens(o.at("tokens").get<uint64_t>());
    r.set_seconds(ReadNumber(o, "seconds"));
    r.set_skipped(o.at("skipped").get<bool>());
    r.set_skip_reason(o.at("skip_reason").get<std::string>());
    r.set_deliver_ns(o.at("deliver_ns").get<int64_t>());
    r.set_compute_ns(o.at("compute_ns").get<int64_t>());
    r.set_reduce_ns(o.at("reduce_ns").get<int64_t>());
    r.set_drain_ns(o.at("drain_ns").get<int64_t>());
    r.set_stall_ns(o.at("stall_ns").get<int64_t>());
    r.set_update_ns(o.at("update_ns").get<int64_t>());
    r.set_offload_ns(o.at("offload_ns").get<int64_t>());
    r.set_offload_wait_ns(o.at("offload_wait_ns").get<int64_t>());
    r.set_end_ns(o.at("end_ns").get<int64_t>());
    r.set_tokens_per_second(ReadNumber(o, "tokens_per_second"));
    if (const double mfu = ReadNumber(o, "mfu"); std::isfinite(mfu)) {
      r.set_mfu(mfu);
    }
    r.set_loss_spike(o.value("loss_spike", false));
    r.set_host_pss_bytes(o.value("host_pss_bytes", uint64_t{0}));
    r.set_device_bytes(o.value("device_bytes", uint64_t{0}));
    return record;
  } catch (const json::exception& e) {
    return absl::DataLossError(absl::StrCat("step record: ", e.what()));
  }
}

absl::Status StepRecords::Append(const v1::Record& record) {
  kept_.push_back(record);
  if (kept_.size() > kInMemory) kept_.pop_front();
  if (record.has_step()) {
    last_ = record.step();
    received_ns_.push_back(MonotonicNs());
    if (received_ns_.size() > kSpeedWindow + 1) received_ns_.pop_front();
  }
  if (broken_) return absl::OkStatus();
  auto store = [&]() -> absl::Status {
    if (!fd_.valid()) {
      SDP_ASSIGN_OR_RETURN(
          fd_,
          OpenFile(file(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, 0600));
    }
    std::string line = (record.has_eval() ? ToJsonLine(record.eval())
                                          : ToJsonLine(record.step())) +
                       "\n";
    ssize_t written = write(fd_.get(), line.data(), line.size());
    if (written != static_cast<ssize_t>(line.size())) {
      return ErrnoStatus(written < 0 ? errno : ENOSPC, file());
    }
    return absl::OkStatus();
  };
  absl::Status status = store();
  broken_ = !status.ok();
  return status;
}

absl::Status StepRecords::Sync(const std::string& folder, DiskCalls& calls) {
  const std::string file = FileIn(folder);
  absl::StatusOr<UniqueFd> fd = OpenFile(file, O_RDONLY | O_NOFOLLOW);
  if (absl::IsNotFound(fd.status())) return absl::OkStatus();  // no record yet
  SDP_RETURN_IF_ERROR(fd.status());
  SDP_RETURN_IF_ERROR(calls.Sync(fd->get(), file));
  return calls.SyncFolder(folder);
}

absl::Status StepRecords::Truncate(uint64_t after_step) {
  const uint64_t last_place = 2 * after_step;
  while (!kept_.empty() && PlaceOf(kept_.back()) > last_place) {
    kept_.pop_back();
  }
  received_ns_.clear();
  last_.reset();
  broken_ = false;
  absl::StatusOr<UniqueFd> fd = OpenFile(file(), O_RDWR | O_NOFOLLOW);
  if (absl::IsNotFound(fd.status())) return absl::OkStatus();
  if (!fd.ok()) return fd.status();
  SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                       RegularFileBytes(fd->get(), file()));
  // Up to the first record that goes, or half a line at the end.
  uint64_t keep = 0;
  std::string piece(kPieceBytes, '\0');
  for (bool more = true; more && keep < bytes;) {
    const size_t got = std::min<uint64_t>(bytes - keep, piece.size());
    SDP_RETURN_IF_ERROR(PreadFully(fd->get(), piece.data(), got, keep, file()));
    absl::string_view rest(piece.data(), got);
    more = false;
    for (size_t end; (end = rest.find('\n')) != absl::string_view::npos;) {
      uint64_t place;
      more = !PlaceOf(rest.substr(0, end), place) || place <= last_place;
      if (!more) break;
      keep += end + 1;
      rest.remove_prefix(end + 1);
    }
  }
  if (keep == bytes) return absl::OkStatus();
  if (ftruncate(fd->get(), static_cast<off_t>(keep)) != 0) {
    return ErrnoStatus(errno, absl::StrCat(file(), ": cut"));
  }
  return absl::OkStatus();
}

void StepRecords::Forget() {
  kept_.clear();
  received_ns_.clear();
  kept_.shrink_to_fit();
  fd_.Reset();
}

std::vector<v1::Record> StepRecords::Next(Cursor& cursor, size_t most) const {
  std::vector<v1::Record> records;
  // Between this place and the next step's there is only an evaluation.
  bool in_memory =
      !kept_.empty() && PlaceOf(kept_.front()) <= cursor.after_place + 1;
  if (!in_memory) {
    while (records.empty() && NextFromFile(cursor, most, records)) {
    }
    if (!records.empty()) return records;
  }
  // What the file lacks, it lacks for good: go on with what is in memory.
  auto next = std::upper_bound(kept_.begin(), kept_.end(), cursor.after_place,
                               [](uint64_t place, const v1::Record& kept) {
                                 return place < PlaceOf(kept);
                               });
  for (; next != kept_.end() && records.size() < most; ++next) {
    records.push_back(*next);
    cursor.after_place = PlaceOf(*next);
  }
  return records;
}

// Whether there may be more in the file.
bool StepRecords::NextFromFile(Cursor& cursor, size_t most,
                               std::vector<v1::Record>& records) const {
  absl::StatusOr<UniqueFd> fd = OpenFile(file(), O_RDONLY | O_NOFOLLOW);
  if (!fd.ok()) return false;
  // Cut meanwhile: what comes after `after_place` is found from the start.
  absl::StatusOr<uint64_t> bytes = RegularFileBytes(fd->get(), file());
  if (bytes.ok() && cursor.offset_bytes > *bytes) cursor.offset_bytes = 0;
  std::string piece(kPieceBytes, '\0');
  ssize_t got = pread(fd->get(), piece.data(), piece.size(),
                      static_cast<off_t>(cursor.offset_bytes));
  if (got <= 0) return false;
  absl::string_view rest(piece.data(), static_cast<size_t>(got));
  size_t taken = 0;
  while (records.size() < most) {
    size_t end = rest.find('\n');
    if (end == absl::string_view::npos) break;
    absl::string_view line = rest.substr(0, end);
    rest.remove_prefix(end + 1);
    taken += end + 1;
    uint64_t place;
    if (!PlaceOf(line, place) || place <= cursor.after_place) continue;
    absl::StatusOr<v1::Record> record = FromJsonLine(line);
    if (!record.ok()) continue;
    cursor.after_place = place;
    records.push_back(*std::move(record));
  }
  cursor.offset_bytes += taken;
  return taken > 0;
}

absl::StatusOr<v1::StepRecord> StepRecords::Last() const {
  if (last_) return *last_;
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(file(), O_RDONLY | O_NOFOLLOW));
  SDP_ASSIGN_OR_RETURN(uint64_t bytes, RegularFileBytes(fd.get(), file()));
  uint64_t begin = bytes > kMaxLineBytes ? bytes - kMaxLineBytes : 0;
  std::string tail(bytes - begin, '\0');
  SDP_RETURN_IF_ERROR(
      PreadFully(fd.get(), tail.data(), tail.size(), begin, file()));
  // The last line that can be read: a killed daemon may leave half of one.
  absl::string_view rest = tail;
  while (!rest.empty()) {
    absl::string_view whole = absl::StripSuffix(rest, "\n");
    size_t newline = whole.rfind('\n');
    absl::string_view line =
        newline == absl::string_view::npos ? whole : whole.substr(newline + 1);
    absl::StatusOr<v1::Record> record = FromJsonLine(line);
    if (record.ok() && record->has_step()) {
      last_ = record->step();
      return *last_;
    }
    if (newline == absl::string_view::npos) break;
    rest = rest.substr(0, newline + 1);
  }
  return absl::NotFoundError("no step is recorded");
}

double StepRecords::steps_per_second() const {
  if (received_ns_.size() < 2) return 0;
  const int64_t elapsed_ns = received_ns_.back() - received_ns_.front();
  if (elapsed_ns <= 0) return 0;
  return static_cast<double>(received_ns_.size() - 1) * 1e9 /
         static_cast<double>(elapsed_ns);
}

}  // namespace slidedp::hostd
