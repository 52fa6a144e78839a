#include "common/shm/words.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace slidedp::shm {
namespace {

// Both segments: the header line, then what the accessors below place.
//   versions   abort | heartbeat | grad_free[world_size] | param_version[units]
//   reports    per rank: heartbeat | grad_ready | StepReport[4] |
//              norms[buckets] | used_rows[2]
// Everything starts on a cache line. Changing any of it needs a new
// kWordsLayoutVersion.
static_assert(sizeof(WordsHeader) == kCacheLineBytes);
static_assert(offsetof(WordsHeader, magic) == 0);
static_assert(offsetof(WordsHeader, layout_version) == 8);
static_assert(offsetof(WordsHeader, world_size) == 16);
static_assert(offsetof(WordsHeader, units) == 24);
static_assert(offsetof(WordsHeader, state_layout_hash) == 32);
static_assert(offsetof(WordsHeader, plan_hash) == 40);
static_assert(offsetof(WordsHeader, rows) == 48);
static_assert(offsetof(WordsHeader, buckets) == 56);
static_assert(std::is_standard_layout_v<WordsHeader>);
static_assert(std::is_standard_layout_v<StepReport>);
static_assert(sizeof(StepReport) == 7 * kCacheLineBytes);
static_assert(offsetof(StepReport, begun) == 0);
static_assert(offsetof(StepReport, loss_ready) == 64);
static_assert(offsetof(StepReport, times_ready) == 128);
static_assert(offsetof(StepReport, embedded) == 192);
static_assert(offsetof(StepReport, valid_tokens) == 256);
static_assert(offsetof(StepReport, begin_ns) == 264);
static_assert(offsetof(StepReport, end_ns) == 272);
static_assert(offsetof(StepReport, deliver_ns) == 280);
static_assert(offsetof(StepReport, stall_ns) == 312);
static_assert(offsetof(StepReport, loss_sum) == 320);
static_assert(offsetof(StepReport, offload_ns) == 384);

// No model or host comes near; keeps the sizes below from overflowing.
constexpr uint64_t kMaxWorldSize = uint64_t{1} << 20;
constexpr uint64_t kMaxParts = uint64_t{1} << 32;
constexpr uint64_t kMaxRows = uint64_t{1} << 32;

constexpr uint64_t kAbortWord = 1;
constexpr uint64_t kHeartbeatWord = 2;
constexpr uint64_t kFirstGradFreeWord = 3;

constexpr uint64_t kRankWords = 2;  // heartbeat, grad_ready
constexpr uint64_t kUsedRowsSlots = 2;
constexpr uint64_t kStepsOffset = kRankWords * sizeof(Word);
constexpr uint64_t kNormsOffset =
    kStepsOffset + kStepReportSlots * sizeof(StepReport);

uint64_t RowsOffset(uint64_t buckets) {
  return kNormsOffset + AlignUp(buckets * sizeof(double), kCacheLineBytes);
}

uint64_t RowsBytes(uint64_t rows) {
  return AlignUp(RowWords(rows) * sizeof(uint64_t), kCacheLineBytes);
}

uint64_t RankBytes(uint64_t buckets, uint64_t rows) {
  return RowsOffset(buckets) + kUsedRowsSlots * RowsBytes(rows);
}

// `parts`: units of the one segment, buckets of the other; a model that is
// wholly frozen has none of these.
bool SizesAreSane(uint64_t world_size, uint64_t parts, uint64_t rows) {
  return world_size >= 1 && world_size <= kMaxWorldSize && parts <= kMaxParts &&
         rows <= kMaxRows;
}

constexpr char kSizes[] =
    "words need 1 to 2^20 ranks, at most 2^32 units, buckets and rows";

bool HeaderIsSane(const WordsHeader& header) {
  return header.units >= 1 &&
         SizesAreSane(header.world_size, header.units, header.rows) &&
         SizesAreSane(header.world_size, header.buckets, header.rows);
}

std::atomic<uint64_t>& WordAt(char* data, uint64_t index) {
  return reinterpret_cast<Word*>(data + index * sizeof(Word))->value;
}

char* RankAt(char* data, uint64_t rank, uint64_t buckets, uint64_t rows) {
  return data + sizeof(WordsHeader) + rank * RankBytes(buckets, rows);
}

void WriteHeader(void* data, const WordsHeader& values, uint64_t magic) {
  SDP_CHECK(reinterpret_cast<uintptr_t>(data) % kCacheLineBytes == 0,
            "words must start on a cache line");
  SDP_CHECK(HeaderIsSane(values), kSizes);
  WordsHeader header = values;
  header.magic = magic;
  header.layout_version = kWordsLayoutVersion;
  std::memcpy(data, &header, sizeof(header));
}

absl::Status Differs(absl::string_view segment, absl::string_view field,
                     uint64_t found, uint64_t wanted,
                     absl::string_view remedy) {
  return absl::FailedPreconditionError(absl::StrCat(
      segment, " segment: ", field, " is 0x", absl::Hex(found), " (", found,
      "), expected 0x", absl::Hex(wanted), " (", wanted, "); ", remedy));
}

absl::Status CheckHeader(absl::string_view segment, const void* data,
                         uint64_t bytes, uint64_t needed_bytes, uint64_t magic,
                         const WordsHeader& expected) {
  constexpr absl::string_view kSameVersion =
      "slidedpd and slidedp-worker must be of one version";
  constexpr absl::string_view kSameJob =
      "the worker's model or plan is not the one of this job";
  if (reinterpret_cast<uintptr_t>(data) % kCacheLineBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(segment, " segment: not on a cache line"));
  }
  if (bytes < sizeof(WordsHeader)) {
    return Differs(segment, "size in bytes", bytes, needed_bytes, kSameVersion);
  }
  WordsHeader found;
  std::memcpy(&found, data, sizeof(found));
  if (found.magic != magic) {
    return Differs(segment, "magic", found.magic, magic, kSameVersion);
  }
  if (found.layout_version != kWordsLayoutVersion) {
    return Differs(segment, "layout_version", found.layout_version,
                   kWordsLayoutVersion, kSameVersion);
  }
  if (found.world_size != expected.world_size) {
    return Differs(segment, "world_size", found.world_size, expected.world_size,
                   kSameJob);
  }
  if (found.units != expected.units) {
    return Differs(segment, "units", found.units, expected.units, kSameJob);
  }
  if (found.rows != expected.rows) {
    return Differs(segment, "rows", found.rows, expected.rows, kSameJob);
  }
  if (found.buckets != expected.buckets) {
    return Differs(segment, "buckets", found.buckets, expected.buckets,
                   kSameJob);
  }
  if (found.state_layout_hash != expected.state_layout_hash) {
    return Differs(segment, "state_layout_hash", found.state_layout_hash,
                   expected.state_layout_hash, kSameJob);
  }
  if (found.plan_hash != expected.plan_hash) {
    return Differs(segment, "plan_hash", found.plan_hash, expected.plan_hash,
                   kSameJob);
  }
  if (bytes != needed_bytes) {
    return Differs(segment, "size in bytes", bytes, needed_bytes, kSameVersion);
  }
  return absl::OkStatus();
}

absl::Status CheckExpected(const WordsHeader& expected) {
  if (HeaderIsSane(expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "words of ", expected.world_size, " ranks, ", expected.units, " units, ",
      expected.buckets, " buckets and ", expected.rows, " rows can't exist"));
}

}  // namespace

uint64_t Versions::Bytes(uint64_t world_size, uint64_t units) {
  SDP_CHECK(SizesAreSane(world_size, units, 0), kSizes);
  return (kFirstGradFreeWord + world_size + units) * sizeof(Word);
}

Versions Versions::Initialise(void* data, const WordsHeader& header) {
  WriteHeader(data, header, kVersionsMagic);
  return Versions(data);
}

absl::Status Versions::Check(const void* data, uint64_t bytes,
                             const WordsHeader& expected) {
  if (absl::Status status = CheckExpected(expected); !status.ok()) {
    return status;
  }
  return CheckHeader("versions", data, bytes,
                     Bytes(expected.world_size, expected.units), kVersionsMagic,
                     expected);
}

std::atomic<uint64_t>& Versions::abort() const {
  return WordAt(data_, kAbortWord);
}

std::atomic<uint64_t>& Versions::heartbeat() const {
  return WordAt(data_, kHeartbeatWord);
}

std::atomic<uint64_t>& Versions::grad_free(uint64_t rank) const {
  return WordAt(data_, kFirstGradFreeWord + rank);
}

std::atomic<uint64_t>& Versions::param_version(uint64_t unit) const {
  const auto* header = reinterpret_cast<const WordsHeader*>(data_);
  return WordAt(data_, kFirstGradFreeWord + header->world_size + unit);
}

uint64_t Reports::Bytes(uint64_t world_size, uint64_t buckets, uint64_t rows) {
  SDP_CHECK(SizesAreSane(world_size, buckets, rows), kSizes);
  return sizeof(WordsHeader) + world_size * RankBytes(buckets, rows);
}

Reports Reports::Initialise(void* data, const WordsHeader& header) {
  WriteHeader(data, header, kReportsMagic);
  return Reports(data, header.buckets, header.rows);
}

absl::Status Reports::Check(const void* data, uint64_t bytes,
                            const WordsHeader& expected) {
  if (absl::Status status = CheckExpected(expected); !status.ok()) {
    return status;
  }
  return CheckHeader(
      "reports", data, bytes,
      Bytes(expected.world_size, expected.buckets, expected.rows),
      kReportsMagic, expected);
}

std::atomic<uint64_t>& Reports::heartbeat(uint64_t rank) const {
  return WordAt(RankAt(data_, rank, buckets_, rows_), 0);
}

std::atomic<uint64_t>& Reports::grad_ready(uint64_t rank) const {
  return WordAt(RankAt(data_, rank, buckets_, rows_), 1);
}

StepReport& Reports::step(uint64_t rank, uint64_t step) const {
  return reinterpret_cast<StepReport*>(RankAt(data_, rank, buckets_, rows_) +
                                       kStepsOffset)[step % kStepReportSlots];
}

double& Reports::square_norm(uint64_t rank, uint64_t bucket) const {
  return reinterpret_cast<double*>(RankAt(data_, rank, buckets_, rows_) +
                                   kNormsOffset)[bucket];
}

uint64_t* Reports::used_rows(uint64_t rank, uint64_t step) const {
  if (rows_ == 0) return nullptr;
  return reinterpret_cast<uint64_t*>(RankAt(data_, rank, buckets_, rows_) +
                                     RowsOffset(buckets_) +
                                     step % kUsedRowsSlots * RowsBytes(rows_));
}

}  // namespace slidedp::shm
