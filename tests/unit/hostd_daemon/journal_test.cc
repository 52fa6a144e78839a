#include "hostd/journal/journal.h"

#include <sqlite3.h>
#include <sys/stat.h>

#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/unit/hostd_daemon/sample_spec.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::slidedp::testing::StatusIs;
using ::slidedp::testing::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

JobRow SampleRow(const std::string& client_id, uint32_t uid = 1000) {
  JobRow row;
  row.client_id = client_id;
  row.uid = uid;
  row.gid = 100;
  row.groups = {100, 4294967294u};
  row.user = "ada";
  row.spec = SampleSpec();
  row.reason = "next in line";
  row.submitted_us = 17;
  row.host_bytes = uint64_t{1} << 41;
  return row;
}

v1::JobEvent Event(v1::JobState state, const std::string& text) {
  v1::JobEvent event;
  event.set_time_us(99);
  event.set_state(state);
  event.set_text(text);
  return event;
}

void ExecuteRaw(const std::string& path, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK)
      << sqlite3_errmsg(db);
  sqlite3_close(db);
}

class JournalTest : public ::testing::Test {
 protected:
  std::string path() const { return folder_.Sub("jobs.sqlite"); }
  TempFolder folder_;
};

TEST_F(JournalTest, KeepsEveryFieldOverReopening) {
  JobRow row = SampleRow("a");
  {
    ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
    ASSERT_OK_AND_ASSIGN(row.id, journal->Insert(row, Event(v1::PENDING, "s")));
    row.state = v1::RUNNING;
    row.reason = "";
    row.cancel_requested = true;
    row.started_us = 18;
    row.ended_us = 19;
    row.step = 7;
    ASSERT_OK(journal->Update(
        row, {Event(v1::CONFIGURING, "c"), Event(v1::RUNNING, "r")}));
    ASSERT_OK(journal->InsertWorker({row.id, 1, 4711, 123456789, "boot"}));
    ASSERT_OK(journal->SetDrain({true, "disk swap", "root", 5}));
  }
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  ASSERT_OK_AND_ASSIGN(std::vector<JobRow> rows, journal->Jobs());
  ASSERT_EQ(rows.size(), 1);
  const JobRow& kept = rows[0];
  EXPECT_EQ(kept.id, row.id);
  EXPECT_EQ(kept.client_id, "a");
  EXPECT_EQ(kept.uid, 1000);
  EXPECT_EQ(kept.gid, 100);
  EXPECT_THAT(kept.groups, ElementsAre(100, 4294967294u));
  EXPECT_EQ(kept.user, "ada");
  EXPECT_EQ(kept.spec.SerializeAsString(), row.spec.SerializeAsString());
  EXPECT_EQ(kept.state, v1::RUNNING);
  EXPECT_EQ(kept.reason, "");
  EXPECT_TRUE(kept.cancel_requested);
  EXPECT_EQ(kept.submitted_us, 17);
  EXPECT_EQ(kept.started_us, 18);
  EXPECT_EQ(kept.ended_us, 19);
  EXPECT_EQ(kept.step, 7);
  EXPECT_EQ(kept.host_bytes, uint64_t{1} << 41);
  ASSERT_OK_AND_ASSIGN(std::vector<v1::JobEvent> events,
                       journal->Events(row.id));
  ASSERT_EQ(events.size(), 3);
  EXPECT_EQ(events[0].text(), "s");
  EXPECT_EQ(events[2].text(), "r");
  EXPECT_EQ(events[2].state(), v1::RUNNING);
  EXPECT_EQ(events[2].time_us(), 99);
  ASSERT_OK_AND_ASSIGN(std::vector<WorkerRow> workers, journal->Workers());
  ASSERT_EQ(workers.size(), 1);
  EXPECT_EQ(workers[0].pid, 4711);
  EXPECT_EQ(workers[0].start_ticks, 123456789);
  EXPECT_EQ(workers[0].boot_id, "boot");
  ASSERT_OK_AND_ASSIGN(DrainRow drain, journal->Drain());
  EXPECT_TRUE(drain.draining);
  EXPECT_EQ(drain.reason, "disk swap");
}

TEST_F(JournalTest, FileIsPrivateAndLockedWhileOpen) {
  umask(022);
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  struct stat info;
  ASSERT_EQ(stat(path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
  EXPECT_THAT(Journal::Open(path()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("another process holds it")));
  journal.reset();
  EXPECT_OK(Journal::Open(path()));
}

TEST_F(JournalTest, ClientIdIsUniquePerUser) {
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  ASSERT_OK(journal->Insert(SampleRow("a"), Event(v1::PENDING, "")));
  EXPECT_THAT(journal->Insert(SampleRow("a"), Event(v1::PENDING, "")),
              StatusIs(absl::StatusCode::kAlreadyExists));
  EXPECT_OK(journal->Insert(SampleRow("a", 1001), Event(v1::PENDING, "")));
  EXPECT_OK(journal->Insert(SampleRow("b"), Event(v1::PENDING, "")));
  ASSERT_OK_AND_ASSIGN(std::vector<JobRow> rows, journal->Jobs());
  EXPECT_EQ(rows.size(), 3);
}

TEST_F(JournalTest, AnIdIsNeverUsedAgain) {
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  ASSERT_OK_AND_ASSIGN(
      uint64_t first, journal->Insert(SampleRow("a"), Event(v1::PENDING, "x")));
  ASSERT_OK(journal->InsertWorker({first, 0, 1, 1, ""}));
  ASSERT_OK(journal->Delete(first));
  EXPECT_THAT(*journal->Events(first), ElementsAre());
  EXPECT_EQ(journal->Workers()->size(), 0);
  ASSERT_OK_AND_ASSIGN(uint64_t second,
                       journal->Insert(SampleRow("a"), Event(v1::PENDING, "")));
  EXPECT_GT(second, first);
}

TEST_F(JournalTest, UpdateOfAnUnknownJobChangesNothing) {
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  JobRow row = SampleRow("a");
  row.id = 5;
  EXPECT_THAT(journal->Update(row, {Event(v1::FAILED, "x")}),
              StatusIs(absl::StatusCode::kNotFound));
  EXPECT_EQ(journal->Events(5)->size(), 0);
}

TEST_F(JournalTest, OlderSchemaIsBroughtUpToDate) {
  JobRow row = SampleRow("a");
  {
    ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
    ASSERT_OK_AND_ASSIGN(row.id, journal->Insert(row, Event(v1::PENDING, "s")));
  }
  ExecuteRaw(path(), "ALTER TABLE job DROP COLUMN progress");
  ExecuteRaw(path(), "PRAGMA user_version=1");
  {
    ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
    ASSERT_OK_AND_ASSIGN(std::vector<JobRow> rows, journal->Jobs());
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].progress.attempts(), 0u);
    rows[0].progress.set_attempts(3);
    rows[0].progress.set_checkpoint_path("/c/step-00000010");
    ASSERT_OK(journal->Update(rows[0], {}));
  }
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  ASSERT_OK_AND_ASSIGN(std::vector<JobRow> rows, journal->Jobs());
  EXPECT_EQ(rows[0].progress.attempts(), 3u);
  EXPECT_EQ(rows[0].progress.checkpoint_path(), "/c/step-00000010");
}

TEST_F(JournalTest, NewerSchemaIsRefusedWithBothVersions) {
  ASSERT_OK(Journal::Open(path()));
  ExecuteRaw(path(), "PRAGMA user_version=7");
  EXPECT_THAT(Journal::Open(path()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("schema is version 7")));
}

TEST_F(JournalTest, DatabaseOfAnotherProgramIsRefused) {
  ExecuteRaw(path(), "CREATE TABLE mail (x)");
  EXPECT_THAT(Journal::Open(path()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("another program")));
}

TEST_F(JournalTest, FileThatIsNoDatabaseIsRefused) {
  folder_.Write("jobs.sqlite", std::string(5000, 'x'));
  EXPECT_THAT(Journal::Open(path()),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(path())));
}

TEST_F(JournalTest, MissingFolderIsAnError) {
  EXPECT_THAT(
      Journal::Open(folder_.Sub("no/jobs.sqlite")),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("no/jobs.sqlite")));
}

// A daemon that was killed leaves the write-ahead log: whatever is cut off its
// end, an earlier state of whole transactions is what opens.
TEST_F(JournalTest, TornLogOpensAsWholeTransactions) {
  TempFolder images;
  ASSERT_OK_AND_ASSIGN(auto journal, Journal::Open(path()));
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(journal->Insert(SampleRow(std::string(1, 'a' + i)),
                              Event(v1::PENDING, "submitted")));
  }
  const std::string main = slidedp::testing::ReadWhole(path());
  const std::string wal = slidedp::testing::ReadWhole(path() + "-wal");
  journal.reset();
  size_t last_jobs = 0;
  for (size_t cut = 0; cut <= wal.size(); cut += 1999) {
    TempFolder copy;
    copy.Write("jobs.sqlite", main);
    copy.Write("jobs.sqlite-wal", wal.substr(0, cut));
    ASSERT_OK_AND_ASSIGN(auto torn, Journal::Open(copy.Sub("jobs.sqlite")));
    ASSERT_OK_AND_ASSIGN(std::vector<JobRow> rows, torn->Jobs());
    EXPECT_GE(rows.size(), last_jobs) << "cut at " << cut;
    last_jobs = rows.size();
    for (const JobRow& row : rows) {
      EXPECT_EQ(torn->Events(row.id)->size(), 1) << "cut at " << cut;
    }
  }
  TempFolder copy;
  copy.Write("jobs.sqlite", main);
  copy.Write("jobs.sqlite-wal", wal);
  ASSERT_OK_AND_ASSIGN(auto whole, Journal::Open(copy.Sub("jobs.sqlite")));
  EXPECT_EQ(whole->Jobs()->size(), 3);
}

}  // namespace
}  // namespace slidedp::hostd
