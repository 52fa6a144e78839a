// A prepared SQLite statement: binding, stepping and reading by position.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::hostd {

// The database's last error; ResourceExhausted for a full disk, AlreadyExists
// for a broken constraint, DataLoss for a damaged file.
absl::Status SqliteStatus(sqlite3* db, absl::string_view what);

class Statement {
 public:
  Statement(sqlite3* db, const char* sql);
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  // Parameters in their order. The text is copied.
  Statement& Bind(int64_t value);
  Statement& Bind(absl::string_view text);
  Statement& BindBytes(absl::string_view bytes);

  absl::StatusOr<bool> Step();  // whether there is a row
  absl::Status Run();           // a statement without rows

  int64_t Int(int column) const;
  std::string Text(int column) const;  // or bytes

 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
  int parameters_ = 0;
  int error_ = SQLITE_OK;
};

// Rolls back unless committed.
class Transaction {
 public:
  explicit Transaction(sqlite3* db) : db_(db) {}
  ~Transaction();
  absl::Status Begin();
  absl::Status Commit();

 private:
  sqlite3* db_;
  bool open_ = false;
};

}  // namespace slidedp::hostd
