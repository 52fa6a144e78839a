// A job's records of steps and evaluations: all of them in metrics.jsonl of its
// log folder, the last ones also in memory. Each once, in v1::Record's order.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/disk_calls.h"
#include "common/base/fd.h"
#include "proto/job.pb.h"

namespace slidedp::hostd {

// One line without its newline: {"step":... or {"eval_step":... Numbers that
// JSON can't write are null.
std::string ToJsonLine(const v1::StepRecord& record);
std::string ToJsonLine(const v1::EvalRecord& record);
absl::StatusOr<v1::Record> FromJsonLine(absl::string_view line);

class StepRecords {
 public:
  static constexpr size_t kInMemory = 4096;

  explicit StepRecords(std::string folder) : folder_(std::move(folder)) {}

  // Opens the file at the first record. An error leaves the record in memory
  // only, and is returned once.
  absl::Status Append(const v1::Record& record);
  // Drops records of steps beyond this one and of evaluations from it on, in
  // memory and in the file: the job goes on from there and makes them anew.
  absl::Status Truncate(uint64_t after_step);
  // What is in the file by now outlasts a power failure. From any thread.
  static absl::Status Sync(const std::string& folder,
                           DiskCalls& calls = RealDiskCalls());
  // Drops what is in memory but the last step; the file stays.
  void Forget();

  // Where a reader is: beyond the record with this place (v1::Record's order).
  struct Cursor {
    uint64_t after_place = 0;
    uint64_t offset_bytes = 0;  // into the file

    // Wants steps beyond this one, and evaluations from it on.
    static Cursor AfterStep(uint64_t step) { return {2 * step, 0}; }
  };
  // The next records, at most `most`; empty when there are no more now. Lines
  // that can't be read are passed over.
  std::vector<v1::Record> Next(Cursor& cursor, size_t most) const;

  // The last step, from memory or the file.
  absl::StatusOr<v1::StepRecord> Last() const;

  // Over the last steps in memory; 0 with fewer than two.
  double steps_per_second() const;

 private:
  static std::string FileIn(const std::string& folder) {
    return folder + "/metrics.jsonl";
  }
  std::string file() const { return FileIn(folder_); }
  bool NextFromFile(Cursor& cursor, size_t most,
                    std::vector<v1::Record>& records) const;

  std::string folder_;
  UniqueFd fd_;
  bool broken_ = false;
  std::deque<v1::Record> kept_;
  std::deque<int64_t> received_ns_;  // of the last steps
  // The last in memory, once looked for in the file, or kept by Forget.
  mutable std::optional<v1::StepRecord> last_;
};

}  // namespace slidedp::hostd
