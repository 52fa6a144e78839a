// TensorBoard's file format, read by a reader of our own. That TensorBoard
// reads it too was tried with version 2.21 (tests/references/read_events.py).
#include "worker/session/event_file.h"

#include <bit>
#include <cstring>
#include <map>

#include "common/base/crc32c.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace slidedp::session {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

template <typename T>
T Take(absl::string_view& bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<T>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  }
  bytes.remove_prefix(sizeof(T));
  return value;
}

uint64_t TakeVarint(absl::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<uint8_t>(bytes[0]);
    bytes.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

// Fields of a message: number -> values, each as its bytes or its number.
struct Fields {
  std::multimap<uint64_t, std::string> bytes;
  std::map<uint64_t, uint64_t> numbers;
};

Fields Parse(absl::string_view message) {
  Fields fields;
  while (!message.empty()) {
    const uint64_t key = TakeVarint(message);
    switch (key & 7) {
      case 0:
        fields.numbers[key >> 3] = TakeVarint(message);
        break;
      case 1:
        fields.numbers[key >> 3] = Take<uint64_t>(message);
        break;
      case 2: {
        const uint64_t size = TakeVarint(message);
        fields.bytes.emplace(key >> 3, std::string(message.substr(0, size)));
        message.remove_prefix(size);
        break;
      }
      case 5:
        fields.numbers[key >> 3] = Take<uint32_t>(message);
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
  }
  return fields;
}

uint32_t Unmasked(uint32_t masked) {
  const uint32_t rotated = masked - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}

TEST(EventFileTest, ChecksumsAreTheCastagnoliPolynomials) {
  EXPECT_EQ(Crc32c(0, "123456789", 9), 0xe3069283u);
}

TEST(EventFileTest, RecordsAreFramedByLengthAndMaskedChecksums) {
  const std::string framed = Framed("some event");
  absl::string_view rest = framed;
  EXPECT_EQ(Take<uint64_t>(rest), 10u);
  EXPECT_EQ(Unmasked(Take<uint32_t>(rest)), Crc32c(0, framed.data(), 8));
  EXPECT_EQ(std::string(rest.substr(0, 10)), "some event");
  rest.remove_prefix(10);
  EXPECT_EQ(Unmasked(Take<uint32_t>(rest)), Crc32c(0, "some event", 10));
  EXPECT_TRUE(rest.empty());
}

TEST(EventFileTest, AFileBeginsWithItsVersion) {
  const Fields event = Parse(VersionEvent(1.5));
  EXPECT_EQ(std::bit_cast<double>(event.numbers.at(1)), 1.5);
  EXPECT_THAT(event.bytes, ElementsAre(Pair(3, "brain.Event:2")));
}

TEST(EventFileTest, ScalarsHaveTagsAndValues) {
  const Fields event =
      Parse(ScalarEvent(2.5, 300, {{"train/loss", 0.25f}, {"x", -1e30f}}));
  EXPECT_EQ(std::bit_cast<double>(event.numbers.at(1)), 2.5);
  EXPECT_EQ(event.numbers.at(2), 300u);
  ASSERT_EQ(event.bytes.size(), 1u);
  std::map<std::string, float> values;
  for (const auto& [number, value] : Parse(event.bytes.begin()->second).bytes) {
    EXPECT_EQ(number, 1u);
    const Fields fields = Parse(value);
    values[fields.bytes.find(1)->second] =
        std::bit_cast<float>(static_cast<uint32_t>(fields.numbers.at(2)));
  }
  EXPECT_THAT(values,
              ElementsAre(Pair("train/loss", 0.25f), Pair("x", -1e30f)));
}

TEST(EventFileTest, WhatIsShownOfStepsAndEvaluations) {
  v1::Record record;
  record.mutable_step()->set_step(7);
  record.mutable_step()->set_loss(2);
  record.mutable_step()->set_compute_ns(3'000'000);
  EXPECT_EQ(StepOf(record), 7u);
  std::map<std::string, float> values;
  for (const Scalar& s : ScalarsOf(record))
    values[std::string(s.tag)] = s.value;
  EXPECT_EQ(values.at("train/loss"), 2);
  EXPECT_FLOAT_EQ(values.at("speed/compute_ms"), 3);
  EXPECT_EQ(values.count("speed/mfu"), 0u);
  record.mutable_eval()->set_step(8);
  record.mutable_eval()->set_loss(1.5);
  EXPECT_EQ(StepOf(record), 8u);
  ASSERT_EQ(ScalarsOf(record).size(), 1u);
  EXPECT_EQ(std::string(ScalarsOf(record)[0].tag), "eval/loss");
}

}  // namespace
}  // namespace slidedp::session
