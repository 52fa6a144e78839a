#include "hostd/journal/journal.h"

#include <fcntl.h>
#include <sqlite3.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/journal/statement.h"

namespace slidedp::hostd {
namespace {

// "SlDP": tells our file from any other SQLite file.
constexpr int kApplicationId = 0x536c4450;

// AUTOINCREMENT: an id is never used twice, even after its row was deleted.
constexpr char kSchema[] = R"sql(
CREATE TABLE job (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  client_id TEXT NOT NULL,
  uid INTEGER NOT NULL,
  gid INTEGER NOT NULL,
  groups TEXT NOT NULL,
  user TEXT NOT NULL,
  spec BLOB NOT NULL,
  state INTEGER NOT NULL,
  reason TEXT NOT NULL,
  cancel_requested INTEGER NOT NULL,
  submitted_us INTEGER NOT NULL,
  started_us INTEGER NOT NULL,
  ended_us INTEGER NOT NULL,
  step INTEGER NOT NULL,
  host_bytes INTEGER NOT NULL,
  progress BLOB NOT NULL DEFAULT x'',
  UNIQUE (uid, client_id)
);
CREATE TABLE event (
  job INTEGER NOT NULL REFERENCES job(id) ON DELETE CASCADE,
  time_us INTEGER NOT NULL,
  state INTEGER NOT NULL,
  text TEXT NOT NULL
);
CREATE INDEX event_job ON event(job);
CREATE TABLE worker (
  job INTEGER NOT NULL REFERENCES job(id) ON DELETE CASCADE,
  rank INTEGER NOT NULL,
  pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL,
  boot_id TEXT NOT NULL
);
CREATE INDEX worker_job ON worker(job);
CREATE TABLE drain (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  draining INTEGER NOT NULL,
  reason TEXT NOT NULL,
  user TEXT NOT NULL,
  since_us INTEGER NOT NULL
);
)sql";

// What makes version n + 1 of version n, from n = 1 on.
constexpr const char* kUpgrades[] = {
    "ALTER TABLE job ADD COLUMN progress BLOB NOT NULL DEFAULT x''",
};

absl::StatusOr<int64_t> Pragma(sqlite3* db, const char* sql) {
  Statement statement(db, sql);
  SDP_ASSIGN_OR_RETURN(bool row, statement.Step());
  if (!row) return absl::DataLossError(absl::StrCat(sql, " gives nothing"));
  return statement.Int(0);
}

absl::StatusOr<std::vector<uint32_t>> ParseGroups(const std::string& text) {
  std::vector<uint32_t> groups;
  if (text.empty()) return groups;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    uint32_t group;
    if (!absl::SimpleAtoi(part, &group)) {
      return absl::DataLossError("job journal: a job's groups are not numbers");
    }
    groups.push_back(group);
  }
  return groups;
}

absl::Status InsertEvent(sqlite3* db, uint64_t job, const v1::JobEvent& event) {
  return Statement(db, "INSERT INTO event VALUES (?,?,?,?)")
      .Bind(static_cast<int64_t>(job))
      .Bind(event.time_us())
      .Bind(int64_t{event.state()})
      .Bind(event.text())
      .Run();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(
    const std::string& path) {
  {
    // SQLite would make it with mode 0644; its other files take this one's.
    absl::StatusOr<UniqueFd> file =
        OpenFile(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (!file.ok()) return Annotate(file.status(), "job journal");
  }
  sqlite3* db = nullptr;
  int error = sqlite3_open_v2(
      path.c_str(), &db,
      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX,
      nullptr);
  if (db == nullptr) return absl::ResourceExhaustedError("job journal: memory");
  std::unique_ptr<Journal> journal(new Journal(db));
  absl::Status status = error == SQLITE_OK ? journal->Prepare(path)
                                           : SqliteStatus(db, "cannot open");
  if (!status.ok()) {
    return Annotate(status, absl::StrCat("job journal ", path));
  }
  return journal;
}

Journal::~Journal() { sqlite3_close_v2(db_); }

absl::Status Journal::Execute(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) != SQLITE_OK) {
    return SqliteStatus(db_, "job journal");
  }
  return absl::OkStatus();
}

absl::Status Journal::Prepare(const std::string& path) {
  sqlite3_extended_result_codes(db_, 1);
  // Exclusive from the first access on: no second daemon on the same file, and
  // no -shm file.
  SDP_RETURN_IF_ERROR(Execute("PRAGMA locking_mode=EXCLUSIVE"));
  absl::Status wal = Execute("PRAGMA journal_mode=WAL");
  if (absl::IsUnavailable(wal)) {
    return absl::FailedPreconditionError(
        "another process holds it; is a slidedpd with the same state_dir "
        "running?");
  }
  if (absl::IsDataLoss(wal)) {
    return absl::DataLossError(absl::StrCat(
        wal.message(), "; it is damaged or not a job journal: move it away"));
  }
  SDP_RETURN_IF_ERROR(wal);
  SDP_RETURN_IF_ERROR(Execute("PRAGMA synchronous=FULL"));
  SDP_RETURN_IF_ERROR(Execute("PRAGMA foreign_keys=ON"));

  Transaction transaction(db_);
  SDP_RETURN_IF_ERROR(transaction.Begin());
  SDP_ASSIGN_OR_RETURN(int64_t application,
                       Pragma(db_, "PRAGMA application_id"));
  SDP_ASSIGN_OR_RETURN(int64_t version, Pragma(db_, "PRAGMA user_version"));
  SDP_ASSIGN_OR_RETURN(int64_t tables,
                       Pragma(db_, "SELECT count(*) FROM sqlite_master"));
  if (application == 0 && version == 0 && tables == 0) {
    SDP_RETURN_IF_ERROR(Execute(kSchema));
    SDP_RETURN_IF_ERROR(Execute(
        absl::StrCat("PRAGMA application_id=", kApplicationId).c_str()));
    SDP_RETURN_IF_ERROR(
        Execute(absl::StrCat("PRAGMA user_version=", kSchemaVersion).c_str()));
    return transaction.Commit();
  }
  if (application != kApplicationId) {
    return absl::FailedPreconditionError(
        "it is a database of another program; set another state_dir");
  }
  if (version < 1 || version > kSchemaVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "its schema is version ", version, ", this slidedpd knows version ",
        kSchemaVersion, "; run the slidedpd that wrote it, or move it away"));
  }
  Statement check(db_, "PRAGMA quick_check(1)");
  SDP_ASSIGN_OR_RETURN(bool row, check.Step());
  if (!row || check.Text(0) != "ok") {
    return absl::DataLossError(absl::StrCat("it is damaged: ", check.Text(0)));
  }
  for (; version < kSchemaVersion; ++version) {
    SDP_RETURN_IF_ERROR(Execute(kUpgrades[version - 1]));
    SDP_RETURN_IF_ERROR(
        Execute(absl::StrCat("PRAGMA user_version=", version + 1).c_str()));
  }
  return transaction.Commit();
}

absl::StatusOr<uint64_t> Journal::Insert(const JobRow& row,
                                         const v1::JobEvent& event) {
  Transaction transaction(db_);
  SDP_RETURN_IF_ERROR(transaction.Begin());
  SDP_RETURN_IF_ERROR(
      Statement(db_,
                "INSERT INTO job VALUES (NULL,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)")
          .Bind(row.client_id)
          .Bind(int64_t{row.uid})
          .Bind(int64_t{row.gid})
          .Bind(absl::StrJoin(row.groups, ","))
          .Bind(row.user)
          .BindBytes(row.spec.SerializeAsString())
          .Bind(int64_t{row.state})
          .Bind(row.reason)
          .Bind(int64_t{row.cancel_requested})
          .Bind(row.submitted_us)
          .Bind(row.started_us)
          .Bind(row.ended_us)
          .Bind(static_cast<int64_t>(row.step))
          .Bind(static_cast<int64_t>(row.host_bytes))
          .BindBytes(row.progress.SerializeAsString())
          .Run());
  auto id = static_cast<uint64_t>(sqlite3_last_insert_rowid(db_));
  SDP_RETURN_IF_ERROR(InsertEvent(db_, id, event));
  SDP_RETURN_IF_ERROR(transaction.Commit());
  return id;
}

absl::Status Journal::Update(const JobRow& row,
                             const std::vector<v1::JobEvent>& events) {
  Transaction transaction(db_);
  SDP_RETURN_IF_ERROR(transaction.Begin());
  SDP_RETURN_IF_ERROR(
      Statement(db_,
                "UPDATE job SET state=?, reason=?, cancel_requested=?, "
                "started_us=?, ended_us=?, step=?, host_bytes=?, progress=? "
                "WHERE id=?")
          .Bind(int64_t{row.state})
          .Bind(row.reason)
          .Bind(int64_t{row.cancel_requested})
          .Bind(row.started_us)
          .Bind(row.ended_us)
          .Bind(static_cast<int64_t>(row.step))
          .Bind(static_cast<int64_t>(row.host_bytes))
          .BindBytes(row.progress.SerializeAsString())
          .Bind(static_cast<int64_t>(row.id))
          .Run());
  if (sqlite3_changes(db_) != 1) {
    return absl::NotFoundError(
        absl::StrCat("job journal: there is no job ", row.id));
  }
  for (const v1::JobEvent& event : events) {
    SDP_RETURN_IF_ERROR(InsertEvent(db_, row.id, event));
  }
  return transaction.Commit();
}

absl::Status Journal::Delete(uint64_t job) {
  return Statement(db_, "DELETE FROM job WHERE id=?")
      .Bind(static_cast<int64_t>(job))
      .Run();
}

absl::StatusOr<std::vector<JobRow>> Journal::Jobs() {
  Statement select(db_,
                   "SELECT id, client_id, uid, gid, groups, user, spec, state, "
                   "reason, cancel_requested, submitted_us, started_us, "
                   "ended_us, step, host_bytes, progress FROM job "
                   "ORDER BY id");
  std::vector<JobRow> rows;
  while (true) {
    SDP_ASSIGN_OR_RETURN(bool more, select.Step());
    if (!more) return rows;
    JobRow row;
    row.id = static_cast<uint64_t>(select.Int(0));
    row.client_id = select.Text(1);
    row.uid = static_cast<uint32_t>(select.Int(2));
    row.gid = static_cast<uint32_t>(select.Int(3));
    SDP_ASSIGN_OR_RETURN(row.groups, ParseGroups(select.Text(4)));
    row.user = select.Text(5);
    int64_t state = select.Int(7);
    if (!row.spec.ParseFromString(select.Text(6)) || state < 1 ||
        !v1::JobState_IsValid(static_cast<int>(state)) ||
        !row.progress.ParseFromString(select.Text(15))) {
      return absl::DataLossError(
          absl::StrCat("job journal: job ", row.id, " can't be read"));
    }
    row.state = static_cast<v1::JobState>(state);
    row.reason = select.Text(8);
    row.cancel_requested = select.Int(9) != 0;
    row.submitted_us = select.Int(10);
    row.started_us = select.Int(11);
    row.ended_us = select.Int(12);
    row.step = static_cast<uint64_t>(select.Int(13));
    row.host_bytes = static_cast<uint64_t>(select.Int(14));
    rows.push_back(std::move(row));
  }
}

absl::StatusOr<std::vector<v1::JobEvent>> Journal::Events(uint64_t job) {
  Statement select(
      db_, "SELECT time_us, state, text FROM event WHERE job=? ORDER BY rowid");
  select.Bind(static_cast<int64_t>(job));
  std::vector<v1::JobEvent> events;
  while (true) {
    SDP_ASSIGN_OR_RETURN(bool more, select.Step());
    if (!more) return events;
    v1::JobEvent& event = events.emplace_back();
    event.set_time_us(select.Int(0));
    event.set_state(static_cast<v1::JobState>(select.Int(1)));
    event.set_text(select.Text(2));
  }
}

absl::Status Journal::InsertWorker(const WorkerRow& row) {
  return Statement(db_, "INSERT INTO worker VALUES (?,?,?,?,?)")
      .Bind(static_cast<int64_t>(row.job))
      .Bind(int64_t{row.rank})
      .Bind(int64_t{row.pid})
      .Bind(static_cast<int64_t>(row.start_ticks))
      .Bind(row.boot_id)
      .Run();
}

absl::Status Journal::DeleteWorkers(uint64_t job) {
  return Statement(db_, "DELETE FROM worker WHERE job=?")
      .Bind(static_cast<int64_t>(job))
      .Run();
}

absl::StatusOr<std::vector<WorkerRow>> Journal::Workers() {
  Statement select(
      db_,
      "SELECT job, rank, pid, start_ticks, boot_id FROM worker ORDER BY rowid");
  std::vector<WorkerRow> rows;
  while (true) {
    SDP_ASSIGN_OR_RETURN(bool more, select.Step());
    if (!more) return rows;
    rows.push_back({static_cast<uint64_t>(select.Int(0)),
                    static_cast<uint32_t>(select.Int(1)),
                    static_cast<int32_t>(select.Int(2)),
                    static_cast<uint64_t>(select.Int(3)), select.Text(4)});
  }
}

absl::Status Journal::SetDrain(const DrainRow& row) {
  return Statement(db_, "INSERT OR REPLACE INTO drain VALUES (1,?,?,?,?)")
      .Bind(int64_t{row.draining})
      .Bind(row.reason)
      .Bind(row.user)
      .Bind(row.since_us)
      .Run();
}

absl::StatusOr<DrainRow> Journal::Drain() {
  Statement select(db_, "SELECT draining, reason, user, since_us FROM drain");
  DrainRow row;
  SDP_ASSIGN_OR_RETURN(bool found, select.Step());
  if (found) {
    row = {select.Int(0) != 0, select.Text(1), select.Text(2), select.Int(3)};
  }
  return row;
}

}  // namespace slidedp::hostd
