#include "common/model/config_fields.h"

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/strict_json.h"

namespace slidedp::model {

using nlohmann::json;

const json* ConfigFields::Find(absl::string_view name) const {
  auto it = object_.find(std::string(name));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

absl::Status ConfigFields::Bad(absl::string_view name,
                               absl::string_view problem,
                               absl::string_view remedy) const {
  auto it = object_.find(std::string(name));
  return InvalidInput(file_, absl::StrCat(prefix_, name),
                      it == object_.end() ? "" : Describe(*it), problem,
                      remedy);
}

absl::Status ConfigFields::Missing(absl::string_view name) const {
  return InvalidInput(file_, absl::StrCat(prefix_, name), "", "missing",
                      "use the config.json that the model was published with");
}

absl::Status ConfigFields::WrongType(absl::string_view name,
                                     absl::string_view expected) const {
  return Bad(
      name,
      absl::StrCat("must be ", expected, ", not ", JsonTypeName(*Find(name))),
      "");
}

absl::StatusOr<std::optional<int64_t>> ConfigFields::OptionalInteger(
    absl::string_view name, int64_t min, int64_t max) const {
  const json* value = Find(name);
  if (value == nullptr) return std::optional<int64_t>();
  if (!value->is_number_integer()) return WrongType(name, "an integer");
  bool fits = !value->is_number_unsigned() ||
              value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  if (!fits || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    return Bad(name, absl::StrCat("must be from ", min, " to ", max), "");
  }
  return std::optional<int64_t>(value->get<int64_t>());
}

absl::StatusOr<int64_t> ConfigFields::Integer(absl::string_view name,
                                              int64_t min, int64_t max) const {
  SDP_ASSIGN_OR_RETURN(std::optional<int64_t> value,
                       OptionalInteger(name, min, max));
  if (!value.has_value()) return Missing(name);
  return *value;
}

absl::StatusOr<std::optional<double>> ConfigFields::OptionalReal(
    absl::string_view name, double min, double max) const {
  const json* value = Find(name);
  if (value == nullptr) return std::optional<double>();
  if (!value->is_number()) return WrongType(name, "a number");
  double real = value->get<double>();
  if (!(real >= min && real <= max)) {
    return Bad(name, absl::StrCat("must be from ", min, " to ", max), "");
  }
  return std::optional<double>(real);
}

absl::StatusOr<double> ConfigFields::Real(absl::string_view name, double min,
                                          double max) const {
  SDP_ASSIGN_OR_RETURN(std::optional<double> value,
                       OptionalReal(name, min, max));
  if (!value.has_value()) return Missing(name);
  return *value;
}

absl::StatusOr<bool> ConfigFields::Boolean(absl::string_view name,
                                           bool if_absent) const {
  const json* value = Find(name);
  if (value == nullptr) return if_absent;
  if (!value->is_boolean()) return WrongType(name, "true or false");
  return value->get<bool>();
}

absl::StatusOr<std::optional<std::string>> ConfigFields::OptionalString(
    absl::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) return std::optional<std::string>();
  if (!value->is_string()) return WrongType(name, "a string");
  return std::optional<std::string>(value->get<std::string>());
}

}  // namespace slidedp::model
