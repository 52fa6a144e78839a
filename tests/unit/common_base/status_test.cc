#include "common/base/status.h"

#include <cerrno>
#include <cmath>

#include "common/base/bf16.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "tests/testing/status_matchers.h"

namespace slidedp {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::Not;
using testing::StatusIs;

absl::StatusOr<int> Half(int x) {
  if (x % 2 != 0) return absl::InvalidArgumentError("odd");
  return x / 2;
}

absl::StatusOr<int> Quarter(int x) {
  SDP_ASSIGN_OR_RETURN(int half, Half(x));
  SDP_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

TEST(StatusTest, MacrosReturnTheFirstError) {
  EXPECT_THAT(Quarter(12), IsOk());
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_THAT(Quarter(6), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(StatusTest, AnnotateKeepsTheCodeAndOk) {
  EXPECT_THAT(Annotate(absl::OkStatus(), "unit 3"), IsOk());
  EXPECT_EQ(Annotate(absl::DataLossError("short"), "unit 3"),
            absl::DataLossError("unit 3: short"));
}

TEST(StatusTest, ErrnoCodesSayWhatToDoNext) {
  const std::pair<int, absl::StatusCode> kCases[] = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {ENOMEM, absl::StatusCode::kResourceExhausted},
      {EMFILE, absl::StatusCode::kResourceExhausted},
      {EACCES, absl::StatusCode::kPermissionDenied},
      {EPERM, absl::StatusCode::kPermissionDenied},
      {ENOENT, absl::StatusCode::kNotFound},
      {EEXIST, absl::StatusCode::kAlreadyExists},
      {EPIPE, absl::StatusCode::kUnavailable},
      {EIO, absl::StatusCode::kDataLoss},
  };
  for (const auto& [error_number, code] : kCases) {
    EXPECT_THAT(ErrnoStatus(error_number, "open"),
                StatusIs(code, HasSubstr("open: ")))
        << error_number;
  }
  EXPECT_THAT(ErrnoStatus(0, "open"), Not(IsOk()));
}

TEST(StatusTest, InvalidInputLeavesOutEmptyParts) {
  EXPECT_EQ(InvalidInput("config.json", "hidden_size", "-3", "must be positive",
                         "set it to the model's width")
                .message(),
            "config.json: hidden_size = -3: must be positive; set it to the "
            "model's width");
  EXPECT_EQ(InvalidInput("a", "", "", "is empty", "").message(), "a: is empty");
  EXPECT_EQ(InvalidInput("", "f", "", "missing", "add it").message(),
            "f: missing; add it");
  EXPECT_EQ(InvalidInput("a", "", "v", "bad", "").message(), "a: v: bad");
}

TEST(StatusTest, InvalidInputIsOneBoundedPrintableLine) {
  const std::string hostile = "a\n\x1b[31m" + std::string(1 << 20, 'x');
  const absl::Status status = InvalidInput("f", "k", hostile, "bad", "fix");
  EXPECT_THAT(std::string(status.message()), HasSubstr("a\\x0a\\x1b[31mxxx"));
  EXPECT_LT(status.message().size(), 400u);
}

TEST(CheckTest, FailureNamesConditionAndMessage) {
  EXPECT_DEATH(SDP_CHECK(1 + 1 == 3, "arithmetic"),
               "status_test.cc:.*1 \\+ 1 == 3.*arithmetic");
}

TEST(LogTest, UnknownLevelIsAnErrorThatNamesIt) {
  EXPECT_THAT(InitLogging("rank 0", "loud", false),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("loud")));
}

TEST(LogTest, LinesCarryTheRole) {
  const auto before = spdlog::default_logger();
  ::testing::internal::CaptureStderr();
  ASSERT_THAT(InitLogging("rank 1 of 100%", "info", false), IsOk());
  spdlog::debug("unseen");
  spdlog::info("step {} begins", 7);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr(" I rank 1 of 100%: step 7 begins\n"));
  EXPECT_THAT(text, Not(HasSubstr("unseen")));
  spdlog::set_default_logger(before);
}

TEST(LogTest, JournalLinesStartWithThePriority) {
  const auto before = spdlog::default_logger();
  ::testing::internal::CaptureStderr();
  ASSERT_THAT(InitLogging("slidedpd", "debug", true), IsOk());
  spdlog::debug("a");
  spdlog::warn("b");
  spdlog::error("c");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "<7>slidedpd: a\n<4>slidedpd: b\n<3>slidedpd: c\n");
  spdlog::set_default_logger(before);
}

TEST(UnitsTest, BytesAndSecondsReadWell) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes(kMiB - 1), "1.00 MiB");
  EXPECT_EQ(FormatBytes(3 * kGiB / 2), "1.50 GiB");
  EXPECT_EQ(FormatBytes(UINT64_MAX), "16.00 EiB");
  EXPECT_EQ(FormatSeconds(0), "0.0s");
  EXPECT_EQ(FormatSeconds(12.34), "12.3s");
  EXPECT_EQ(FormatSeconds(59.97), "1m00s");
  EXPECT_EQ(FormatSeconds(245), "4m05s");
  EXPECT_EQ(FormatSeconds(3599.9), "1h00m");
  EXPECT_EQ(FormatSeconds(11520), "3h12m");
  EXPECT_EQ(FormatSeconds(-245), "-4m05s");
  EXPECT_EQ(FormatSeconds(NAN), "unknown");
}

TEST(UnitsTest, AlignUpIsTheNextMultiple) {
  EXPECT_EQ(AlignUp(0, 64), 0u);
  EXPECT_EQ(AlignUp(1, 64), 64u);
  EXPECT_EQ(AlignUp(64, 64), 64u);
  EXPECT_EQ(AlignUp(65, 3), 66u);
}

// The nearest of the two neighbours, computed in double.
TEST(Bf16Test, EvenRoundingPicksTheNearestNeighbour) {
  for (uint64_t i = 0; i < (uint64_t{1} << 32); i += 9973) {
    const uint32_t bits = static_cast<uint32_t>(i);
    const float x = std::bit_cast<float>(bits);
    const bf16 rounded = FloatToBf16Even(x);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(rounded))) << bits;
      continue;
    }
    const bf16 below = static_cast<bf16>(bits >> 16);  // toward zero
    const bf16 above = static_cast<bf16>(below + 1);
    if (std::isinf(x) || std::isinf(Bf16ToFloat(above))) continue;
    const double to_below = std::fabs(double{x} - Bf16ToFloat(below));
    const double to_above = std::fabs(double{x} - Bf16ToFloat(above));
    const bf16 want = to_below < to_above   ? below
                      : to_above < to_below ? above
                      : below % 2 == 0      ? below
                                            : above;
    ASSERT_EQ(rounded, want) << bits;
  }
}

}  // namespace
}  // namespace slidedp
