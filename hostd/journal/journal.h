// The job table on disk: SQLite, write-ahead log, synchronous FULL. A call that
// returns ok is durable; the daemon acknowledges nothing before.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/job.pb.h"

struct sqlite3;

namespace slidedp::hostd {

struct JobRow {
  uint64_t id = 0;
  std::string client_id;
  // Who submitted; what the workers run as.
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;
  std::string user;
  v1::JobSpec spec;
  v1::JobState state = v1::PENDING;
  std::string reason;
  bool cancel_requested = false;
  int64_t submitted_us = 0;
  int64_t started_us = 0;  // 0: not yet
  int64_t ended_us = 0;
  uint64_t step = 0;
  uint64_t host_bytes = 0;
  v1::JobProgress progress;
};

// A process that the daemon started, told from a later one with the same pid
// by its start time and the boot.
struct WorkerRow {
  uint64_t job = 0;
  uint32_t rank = 0;
  int32_t pid = 0;
  uint64_t start_ticks = 0;
  std::string boot_id;
};

struct DrainRow {
  bool draining = false;
  std::string reason;
  std::string user;
  int64_t since_us = 0;
};

// One thread at a time. Holds an exclusive lock on the file while open.
class Journal {
 public:
  static constexpr int kSchemaVersion = 2;

  // Creates the file (0600) where there is none; brings an older one up to
  // date. A newer schema, a file of another program, a damaged file or one that
  // another daemon holds is an error that says so.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const std::string& path);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // `row.id` is ignored; returns the new id, higher than every id before.
  // AlreadyExists if this uid has used the client_id.
  absl::StatusOr<uint64_t> Insert(const JobRow& row, const v1::JobEvent& event);
  // Everything that changes in a job's life, and new events, at once.
  absl::Status Update(const JobRow& row,
                      const std::vector<v1::JobEvent>& events);
  // With its events and workers.
  absl::Status Delete(uint64_t job);
  absl::StatusOr<std::vector<JobRow>> Jobs();  // by ascending id
  absl::StatusOr<std::vector<v1::JobEvent>> Events(uint64_t job);

  absl::Status InsertWorker(const WorkerRow& row);
  absl::Status DeleteWorkers(uint64_t job);
  absl::StatusOr<std::vector<WorkerRow>> Workers();

  absl::Status SetDrain(const DrainRow& row);
  absl::StatusOr<DrainRow> Drain();

 private:
  explicit Journal(sqlite3* db) : db_(db) {}
  absl::Status Prepare(const std::string& path);
  absl::Status Execute(const char* sql);

  sqlite3* db_;
};

}  // namespace slidedp::hostd
