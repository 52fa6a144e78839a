#include "common/base/crc32c.h"

#include <random>
#include <string>

#include "gtest/gtest.h"

namespace slidedp {
namespace {

uint32_t Of(const std::string& text) {
  return Crc32c(0, text.data(), text.size());
}

std::string RandomBytes(std::mt19937_64& random, size_t bytes) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// RFC 3720, B.4, and the check value of the algorithm's catalogue.
TEST(Crc32cTest, HasThePublishedValues) {
  EXPECT_EQ(Of(""), 0u);
  EXPECT_EQ(Of("123456789"), 0xe3069283u);
  EXPECT_EQ(Of(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Of(std::string(32, '\xff')), 0x62a8ab43u);
  std::string ascending;
  for (char c = 0; c < 32; ++c) ascending += c;
  EXPECT_EQ(Of(ascending), 0x46dd794eu);
}

TEST(Crc32cTest, InstructionAndTablesAgreeAtEveryLengthAndAlignment) {
  std::mt19937_64 random(1);
  const std::string text = RandomBytes(random, 300);
  for (size_t begin = 0; begin < 16; ++begin) {
    for (size_t bytes = 0; begin + bytes <= text.size(); ++bytes) {
      const uint32_t before = static_cast<uint32_t>(random());
      ASSERT_EQ(Crc32c(before, text.data() + begin, bytes),
                Crc32cPortable(before, text.data() + begin, bytes));
    }
  }
}

TEST(Crc32cTest, PartsGiveTheWholeHoweverItIsCut) {
  std::mt19937_64 random(2);
  const std::string text = RandomBytes(random, 5000);
  for (size_t cut = 0; cut <= text.size(); cut += 1 + random() % 60) {
    const std::string first = text.substr(0, cut), second = text.substr(cut);
    EXPECT_EQ(Crc32c(Of(first), second.data(), second.size()), Of(text));
    EXPECT_EQ(Crc32cConcat(Of(first), Of(second), second.size()), Of(text));
  }
}

// As of a file far larger than memory: zeros one after another.
TEST(Crc32cTest, ConcatTakesAnyLength) {
  const std::string zeros(1 << 20, '\0');
  uint32_t crc = Of("head");
  const uint32_t start = crc;
  uint32_t mebibyte = Of(zeros);
  for (int i = 0; i < 64; ++i) {
    crc = Crc32c(crc, zeros.data(), zeros.size());
  }
  uint32_t doubled = mebibyte;  // of 64 MiB
  for (uint64_t bytes = 1 << 20; bytes < uint64_t{64} << 20; bytes *= 2) {
    doubled = Crc32cConcat(doubled, doubled, bytes);
  }
  EXPECT_EQ(Crc32cConcat(start, doubled, uint64_t{64} << 20), crc);
  // Associative, beyond 2^32 bytes too.
  const uint64_t huge = (uint64_t{1} << 40) + 12345;
  EXPECT_EQ(Crc32cConcat(Crc32cConcat(start, doubled, huge), mebibyte, 7),
            Crc32cConcat(start, Crc32cConcat(doubled, mebibyte, 7), huge + 7));
}

}  // namespace
}  // namespace slidedp
