#include "worker/data/sequence_table.h"

#include <algorithm>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/random.h"

namespace slidedp::data {
namespace {

constexpr int64_t kLength = 100;

std::vector<int64_t> Offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) {
    offsets.push_back(offsets.back() + length);
  }
  return offsets;
}

std::vector<int64_t> RandomLengths(int64_t documents, uint64_t longest,
                                   uint64_t seed) {
  testing::Random random(seed);
  std::vector<int64_t> lengths(documents);
  for (int64_t& length : lengths) {
    length = 1 + static_cast<int64_t>(random.Below(longest));
  }
  return lengths;
}

SequenceOptions Packed(uint64_t seed,
                       LongDocuments long_documents = LongDocuments::kSplit) {
  return {true, long_documents, seed};
}

// Every piece, by its begin, after checking that sequences hold them and that
// each lies in one document.
std::set<std::pair<uint64_t, uint32_t>> Pieces(
    const SequenceTable& table, const std::vector<int64_t>& offsets) {
  std::set<std::pair<uint64_t, uint32_t>> pieces;
  for (uint64_t s = 0; s < table.size(); ++s) {
    EXPECT_FALSE(table[s].empty());
    EXPECT_LE(table.TokenCount(s), static_cast<uint64_t>(kLength));
    for (const Piece& piece : table[s]) {
      const auto begin = static_cast<int64_t>(piece.begin);
      const auto end = std::upper_bound(offsets.begin(), offsets.end(), begin);
      EXPECT_LE(begin + piece.length, *end);
      EXPECT_TRUE(pieces.insert({piece.begin, piece.length}).second);
    }
  }
  return pieces;
}

TEST(SequenceTableTest, PackingHasEveryTokenOnce) {
  for (const uint64_t seed : {1, 2, 3}) {
    const auto offsets = Offsets(RandomLengths(500, 250, seed));
    const SequenceTable table(offsets, false, kLength, Packed(seed));
    uint64_t next = 0;
    for (const auto& [begin, length] : Pieces(table, offsets)) {
      EXPECT_EQ(begin, next);  // no gap, no overlap
      next = begin + length;
    }
    EXPECT_EQ(next, offsets.back());
  }
}

TEST(SequenceTableTest, TruncationHasTheBeginningOfEveryDocumentOnce) {
  const auto offsets = Offsets(RandomLengths(500, 250, 4));
  for (const bool packing : {true, false}) {
    SequenceOptions options = Packed(5, LongDocuments::kTruncate);
    options.packing = packing;
    const SequenceTable table(offsets, false, kLength, options);
    const auto pieces = Pieces(table, offsets);
    ASSERT_EQ(pieces.size(), 500u);
    size_t document = 0;
    for (const auto& [begin, length] : pieces) {
      EXPECT_EQ(begin, offsets[document]);
      EXPECT_EQ(length, std::min<int64_t>(kLength, offsets[document + 1] -
                                                       offsets[document]));
      ++document;
    }
  }
}

TEST(SequenceTableTest, NotPackedHasOnePieceASequenceInOrder) {
  const auto offsets = Offsets({30, 250, 100, 1});
  const SequenceTable table(offsets, false, kLength, {});
  ASSERT_EQ(table.size(), 6u);
  const std::vector<std::pair<uint64_t, uint32_t>> want = {
      {0, 30}, {30, 100}, {130, 100}, {230, 50}, {280, 100}, {380, 1}};
  for (uint64_t s = 0; s < table.size(); ++s) {
    ASSERT_EQ(table[s].size(), 1u);
    EXPECT_EQ(table[s][0].begin, want[s].first);
    EXPECT_EQ(table[s][0].length, want[s].second);
  }
  const SequenceTable stream(offsets, true, kLength, {});
  ASSERT_EQ(stream.size(), 3u);  // the tail of 81 is dropped
  EXPECT_EQ(stream[2][0].begin, 200u);
  EXPECT_EQ(stream[2][0].length, 100u);
}

TEST(SequenceTableTest, AStreamPacksLikeDocuments) {
  const auto offsets = Offsets(RandomLengths(200, 90, 6));
  const SequenceTable a(offsets, true, kLength, Packed(1));
  const SequenceTable b(offsets, false, kLength, Packed(1));
  EXPECT_EQ(a.size(), b.size());
  EXPECT_EQ(Pieces(a, offsets), Pieces(b, offsets));
}

TEST(SequenceTableTest, EachPieceGoesWhereLeastRoomIsLeft) {
  // 60 + 40, 50 + 30 + 20: the 40 fits the second worse than the first.
  const auto offsets = Offsets({20, 60, 30, 50, 40});
  const SequenceTable table(offsets, false, kLength, Packed(1));
  ASSERT_EQ(table.size(), 2u);
  EXPECT_EQ(table.TokenCount(0), 100u);
  EXPECT_EQ(table.TokenCount(1), 100u);
  EXPECT_EQ(table[0].size(), 2u);
  EXPECT_EQ(table[1].size(), 3u);
}

TEST(SequenceTableTest, ShortDocumentsLeaveLittlePadding) {
  const auto lengths = RandomLengths(5000, 60, 7);
  const auto offsets = Offsets(lengths);
  const SequenceTable table(offsets, false, kLength, Packed(1));
  const double share = static_cast<double>(offsets.back()) /
                       static_cast<double>(table.size() * kLength);
  EXPECT_GT(share, 0.99);
}

TEST(SequenceTableTest, TheSeedDecidesTheCompanyAndNothingElse) {
  const auto offsets = Offsets(RandomLengths(300, 20, 8));
  const auto company = [&](uint64_t seed) {
    const SequenceTable table(offsets, false, kLength, Packed(seed));
    std::set<std::vector<uint64_t>> sequences;
    for (uint64_t s = 0; s < table.size(); ++s) {
      std::vector<uint64_t> begins;
      for (const Piece& piece : table[s]) begins.push_back(piece.begin);
      std::sort(begins.begin(), begins.end());
      sequences.insert(begins);
    }
    return sequences;
  };
  EXPECT_EQ(company(1), company(1));
  EXPECT_NE(company(1), company(2));
  EXPECT_EQ(company(1).size(), company(2).size());
}

}  // namespace
}  // namespace slidedp::data
