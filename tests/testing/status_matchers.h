// GoogleTest matchers and macros for absl::Status and absl::StatusOr.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace slidedp::testing {

// What bad input is answered with.
inline constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, negation ? "is an error" : "is OK") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// EXPECT_THAT(result, StatusIs(absl::StatusCode::kInvalidArgument));
MATCHER_P(StatusIs, code,
          absl::StrCat("has code ", absl::StatusCodeToString(code))) {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code;
}

// EXPECT_THAT(result, StatusIs(code, HasSubstr("hidden_size")));
MATCHER_P2(StatusIs, code, message,
           absl::StrCat("has code ", absl::StatusCodeToString(code),
                        " and a fitting message")) {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code &&
         ::testing::Matches(message)(std::string(StatusOf(arg).message()));
}

// EXPECT_THAT(result, IsOkAndHolds(Eq(3)));
MATCHER_P(IsOkAndHolds, value, "is OK and holds a fitting value") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return ::testing::ExplainMatchResult(value, *arg, result_listener);
}

}  // namespace slidedp::testing

#define EXPECT_OK(expr) EXPECT_THAT((expr), ::slidedp::testing::IsOk())
#define ASSERT_OK(expr) ASSERT_THAT((expr), ::slidedp::testing::IsOk())

#define SDP_ASSERT_OK_AND_ASSIGN_INNER(tmp, lhs, expr)    \
  auto tmp = (expr);                                      \
  ASSERT_TRUE(tmp.ok()) << #expr << ": " << tmp.status(); \
  lhs = std::move(tmp).value()
// ASSERT_OK_AND_ASSIGN(ModelConfig config, ParseModelConfig(...));
#define ASSERT_OK_AND_ASSIGN(lhs, expr)                                     \
  SDP_ASSERT_OK_AND_ASSIGN_INNER(SDP_CONCAT(sdp_assert_or_, __LINE__), lhs, \
                                 expr)
