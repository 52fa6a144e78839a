#include "hostd/journal/statement.h"

#include "absl/strings/str_cat.h"

namespace slidedp::hostd {

absl::Status SqliteStatus(sqlite3* db, absl::string_view what) {
  std::string message = absl::StrCat(what, ": ", sqlite3_errmsg(db));
  switch (sqlite3_errcode(db) & 0xff) {
    case SQLITE_FULL:
    case SQLITE_NOMEM:
      return absl::ResourceExhaustedError(message);
    case SQLITE_CONSTRAINT:
      return absl::AlreadyExistsError(message);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(message);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(message);
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
      return absl::PermissionDeniedError(message);
    default:
      return absl::InternalError(message);
  }
}

Statement::Statement(sqlite3* db, const char* sql) : db_(db) {
  error_ = sqlite3_prepare_v2(db, sql, -1, &statement_, nullptr);
}

Statement& Statement::Bind(int64_t value) {
  if (error_ == SQLITE_OK) {
    error_ = sqlite3_bind_int64(statement_, ++parameters_, value);
  }
  return *this;
}

Statement& Statement::Bind(absl::string_view text) {
  if (error_ == SQLITE_OK) {
    error_ = sqlite3_bind_text64(statement_, ++parameters_, text.data(),
                                 text.size(), SQLITE_TRANSIENT, SQLITE_UTF8);
  }
  return *this;
}

Statement& Statement::BindBytes(absl::string_view bytes) {
  if (error_ == SQLITE_OK) {
    error_ = sqlite3_bind_blob64(statement_, ++parameters_, bytes.data(),
                                 bytes.size(), SQLITE_TRANSIENT);
  }
  return *this;
}

absl::StatusOr<bool> Statement::Step() {
  if (error_ != SQLITE_OK) return SqliteStatus(db_, "job journal");
  switch (sqlite3_step(statement_)) {
    case SQLITE_ROW:
      return true;
    case SQLITE_DONE:
      return false;
    default:
      return SqliteStatus(db_, "job journal");
  }
}

absl::Status Statement::Run() {
  absl::StatusOr<bool> row = Step();
  return row.status();
}

int64_t Statement::Int(int column) const {
  return sqlite3_column_int64(statement_, column);
}

std::string Statement::Text(int column) const {
  const void* bytes = sqlite3_column_blob(statement_, column);
  int size = sqlite3_column_bytes(statement_, column);
  if (bytes == nullptr) return "";
  return std::string(static_cast<const char*>(bytes), size);
}

absl::Status Transaction::Begin() {
  absl::Status status = Statement(db_, "BEGIN IMMEDIATE").Run();
  open_ = status.ok();
  return status;
}

absl::Status Transaction::Commit() {
  absl::Status status = Statement(db_, "COMMIT").Run();
  if (status.ok()) open_ = false;
  return status;
}

Transaction::~Transaction() {
  // A failed statement may have rolled back already; then there is nothing to.
  if (open_ && sqlite3_get_autocommit(db_) == 0) {
    sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  }
}

}  // namespace slidedp::hostd
