#include "hostd/store/pieces.h"

#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::hostd {
namespace {

TEST(PiecesTest, CoverEveryElementOnceInBoundedPieces) {
  model::Tensor tensors[3] = {};
  tensors[0].count = 2 * kPieceElements + 1;
  tensors[1].count = 1;
  tensors[2].count = kPieceElements;
  std::vector<PlacedTensor> placed;
  std::vector<std::vector<std::atomic<int>>> seen(3);
  for (int i = 0; i < 3; ++i) {
    placed.push_back({0, &tensors[i], {nullptr, nullptr}});
    seen[i] = std::vector<std::atomic<int>>(tensors[i].count);
  }
  ASSERT_OK(
      ForEachPiece(placed, 100, nullptr,
                   [&](size_t index, uint64_t first, uint64_t count, float* s) {
                     EXPECT_LE(count, kPieceElements);
                     EXPECT_NE(s, nullptr);
                     for (uint64_t i = 0; i < count; ++i)
                       ++seen[index][first + i];
                     return absl::OkStatus();
                   }));
  for (const auto& tensor : seen) {
    for (const std::atomic<int>& count : tensor) ASSERT_EQ(count, 1);
  }
}

TEST(PiecesTest, ErrorOfTheFirstFailingPieceWins) {
  model::Tensor tensor = {};
  tensor.count = 40 * kPieceElements;
  const std::vector<PlacedTensor> placed = {{0, &tensor, {nullptr, nullptr}}};
  for (int threads : {1, 4}) {
    const absl::Status status = ForEachPiece(
        placed, threads, nullptr, [](size_t, uint64_t first, uint64_t, float*) {
          const uint64_t piece = first / kPieceElements;
          if (piece < 7) return absl::OkStatus();
          return absl::DataLossError(absl::StrCat("piece ", piece));
        });
    EXPECT_EQ(status.message(), "piece 7");
  }
}

TEST(PiecesTest, NothingBeginsOnceToldToStop) {
  model::Tensor tensor = {};
  tensor.count = 40 * kPieceElements;
  const std::vector<PlacedTensor> placed = {{0, &tensor, {nullptr, nullptr}}};
  for (int threads : {1, 4}) {
    std::atomic<bool> stop = false;
    std::atomic<int> begun = 0;
    const absl::Status status = ForEachPiece(
        placed, threads, &stop, [&](size_t, uint64_t, uint64_t, float*) {
          if (++begun == 3) stop = true;
          return absl::OkStatus();
        });
    EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kCancelled));
    EXPECT_LT(begun, 3 + threads);
  }
}

}  // namespace
}  // namespace slidedp::hostd
