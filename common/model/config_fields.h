// Typed access to the fields of one JSON object of a config.json. Every error
// names the file, the field, its value and what is expected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace slidedp::model {

// Borrows everything. null counts as absent, as in transformers.
class ConfigFields {
 public:
  // `prefix` is "" or "rope_parameters.", for messages.
  ConfigFields(const nlohmann::json& object, absl::string_view file,
               absl::string_view prefix)
      : object_(object), file_(file), prefix_(prefix) {}

  absl::string_view file() const { return file_; }

  // Null if absent.
  const nlohmann::json* Find(absl::string_view name) const;

  // In [min, max].
  absl::StatusOr<std::optional<int64_t>> OptionalInteger(absl::string_view name,
                                                         int64_t min,
                                                         int64_t max) const;
  absl::StatusOr<int64_t> Integer(absl::string_view name, int64_t min,
                                  int64_t max) const;
  // In [min, max]; integers too.
  absl::StatusOr<std::optional<double>> OptionalReal(absl::string_view name,
                                                     double min,
                                                     double max) const;
  absl::StatusOr<double> Real(absl::string_view name, double min,
                              double max) const;
  absl::StatusOr<bool> Boolean(absl::string_view name, bool if_absent) const;
  absl::StatusOr<std::optional<std::string>> OptionalString(
      absl::string_view name) const;

  // An error about a field that is there.
  absl::Status Bad(absl::string_view name, absl::string_view problem,
                   absl::string_view remedy) const;
  absl::Status Missing(absl::string_view name) const;

 private:
  absl::Status WrongType(absl::string_view name,
                         absl::string_view expected) const;

  const nlohmann::json& object_;
  absl::string_view file_, prefix_;
};

}  // namespace slidedp::model
