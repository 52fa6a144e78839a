#include "common/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::model {
namespace {

using ::slidedp::testing::kInvalid;
using slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

absl::StatusOr<SafetensorsHeader> Read(const std::string& bytes) {
  UniqueFd fd(memfd_create("safetensors", MFD_CLOEXEC));
  EXPECT_EQ(write(fd.get(), bytes.data(), bytes.size()),
            static_cast<ssize_t>(bytes.size()));
  return ReadSafetensorsHeader(fd.get(), "w.safetensors");
}

std::string WithLength(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

// A file of this header and `data_bytes` of data.
std::string File(const std::string& json, size_t data_bytes) {
  return WithLength(json.size(), json) + std::string(data_bytes, 'd');
}

std::string Entry(const std::string& name, const std::string& dtype,
                  const std::string& shape, const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                      shape, "],\"data_offsets\":[", offsets, "]}");
}

TEST(SafetensorsTest, EncodeThenReadGivesTheSame) {
  std::vector<TensorEntry> tensors = {
      {"b", DType::kF32, {3, 5}, 0, 0},
      {"a.\"quoted\"\n", DType::kBf16, {7}, 0, 0},
      {"empty", DType::kF32, {0, 4}, 0, 0},
      {"scalar", DType::kI64, {}, 0, 0},
      {"mask", DType::kU8, {3}, 0, 0},
  };
  std::string bytes = EncodeSafetensorsHeader(
      tensors, {{"format", "pt"}, {"note", "t\xc3\xa4st"}});
  EXPECT_EQ(bytes.size() % 8, 0u);
  EXPECT_EQ(tensors[0].begin, bytes.size());
  EXPECT_EQ(tensors.back().end, bytes.size() + 60 + 14 + 8 + 3);
  bytes += std::string(60 + 14 + 8 + 3, 'd');
  ASSERT_OK_AND_ASSIGN(SafetensorsHeader header, Read(bytes));
  EXPECT_EQ(header.file_bytes, bytes.size());
  EXPECT_EQ(header.data_begin, tensors[0].begin);
  EXPECT_EQ(header.metadata.at("note"), "t\xc3\xa4st");
  ASSERT_EQ(header.tensors.size(), 5u);
  for (const TensorEntry& expected : tensors) {
    const TensorEntry* read = header.Find(expected.name);
    ASSERT_NE(read, nullptr) << expected.name;
    EXPECT_EQ(read->dtype, expected.dtype);
    EXPECT_EQ(read->shape, expected.shape);
    EXPECT_EQ(read->begin, expected.begin);
    EXPECT_EQ(read->end, expected.end);
    EXPECT_EQ(read->count() * DTypeBytes(read->dtype), read->end - read->begin);
  }
  EXPECT_EQ(header.Find("scalar")->count(), 1u);
  EXPECT_EQ(header.Find("empty")->count(), 0u);
  EXPECT_EQ(header.Find("absent"), nullptr);
}

TEST(SafetensorsTest, TextOrderIsFree) {
  std::string json = "{" + Entry("late", "U8", "2", "3,5") + "," +
                     Entry("early", "U8", "3", "0,3") + "}";
  ASSERT_OK_AND_ASSIGN(SafetensorsHeader header, Read(File(json, 5)));
  EXPECT_EQ(header.tensors[0].name, "early");
  EXPECT_EQ(header.tensors[1].name, "late");
}

TEST(SafetensorsTest, HeaderMayEndInSpacesAndDataMayBeUnaligned) {
  for (size_t spaces : {0, 1, 7, 100}) {
    std::string json =
        "{" + Entry("x", "F32", "2", "0,8") + "}" + std::string(spaces, ' ');
    ASSERT_OK_AND_ASSIGN(SafetensorsHeader header, Read(File(json, 8)));
    EXPECT_EQ(header.tensors[0].begin, 8 + json.size());
  }
}

TEST(SafetensorsTest, NoTensorsIsValid) {
  ASSERT_OK_AND_ASSIGN(SafetensorsHeader header, Read(File("{}", 0)));
  EXPECT_THAT(header.tensors, IsEmpty());
}

TEST(SafetensorsTest, EveryDtypeRoundTrips) {
  for (DType dtype :
       {DType::kBf16, DType::kF16, DType::kF32, DType::kF64, DType::kI64,
        DType::kI32, DType::kI16, DType::kI8, DType::kU8, DType::kBool,
        DType::kF8E4M3, DType::kF8E5M2}) {
    std::vector<TensorEntry> tensors = {{"x", dtype, {3}, 0, 0}};
    std::string bytes = EncodeSafetensorsHeader(tensors, {});
    bytes += std::string(3 * DTypeBytes(dtype), 'd');
    ASSERT_OK_AND_ASSIGN(SafetensorsHeader header, Read(bytes));
    EXPECT_EQ(header.tensors[0].dtype, dtype) << DTypeName(dtype);
  }
}

struct Refusal {
  const char* what;
  std::string bytes;
  const char* told;
};

std::vector<Refusal> Refusals() {
  std::string ok = Entry("x", "F32", "2", "0,8");
  std::string deep = "{\"x\":";
  for (int i = 0; i < 1000000; ++i) deep += "[";
  return {
      {"Empty", "", "only 0 bytes"},
      {"SevenBytes", "1234567", "only 7 bytes"},
      {"LengthBeyondFile", WithLength(3, "{}"), "header length = 3"},
      {"LengthHuge", WithLength(UINT64_MAX, "{}"), "18446744073709551615"},
      {"LengthWraps", WithLength(UINT64_MAX - 7, "{}"), "header length"},
      {"LengthZero", WithLength(0, ""), "'{'"},
      {"LeadingSpace", File(" {}", 0), "'{'"},
      {"ByteOrderMark", File("\xef\xbb\xbf{}", 0), "'{'"},
      {"Array", File("[]", 0), "'{'"},
      {"NotJson", File("{,}", 0), "not valid JSON"},
      {"TrailingText", File("{}x", 0), "not valid JSON"},
      {"NotUtf8", File("{\"\xff\":1}", 0), "not valid JSON"},
      {"DepthBomb", File(deep, 0), "must be an object"},
      {"EntryNumber", File("{\"x\":3}", 0), "tensor x: an entry must be"},
      {"EntryEmpty", File("{\"x\":{}}", 0), "must all be given"},
      {"NoShape", File("{\"x\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", 0),
       "must all be given"},
      {"UnknownField", File("{\"x\":{\"extra\":3}}", 0), "unknown field extra"},
      {"UnknownDtype", File("{" + Entry("x", "F7", "2", "0,8") + "}", 8),
       "unknown dtype \"F7\""},
      {"DtypeNumber", File("{\"x\":{\"dtype\":4}}", 0), "dtype must be"},
      {"DuplicateField", File("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0),
       "duplicate"},
      {"DuplicateTensor",
       File("{" + ok + "," + Entry("x", "F32", "2", "8,16") + "}", 16),
       "listed twice"},
      {"DuplicateEmptyTensor",
       File("{" + Entry("e", "U8", "0", "0,0") + "," +
                Entry("e", "U8", "0", "0,0") + "}",
            0),
       "listed twice"},
      {"MetadataNumber", File("{\"__metadata__\":{\"a\":1}}", 0),
       "metadata values must be strings"},
      {"MetadataNested", File("{\"__metadata__\":{\"a\":{}}}", 0),
       "metadata values must be strings"},
      {"MetadataArray", File("{\"__metadata__\":[]}", 0), "__metadata__"},
      {"MetadataTwice", File("{\"__metadata__\":{},\"__metadata__\":{}}", 0),
       "twice"},
      {"MetadataKeyTwice",
       File("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0),
       "duplicate key a"},
      {"NegativeShape", File("{" + Entry("x", "F32", "-2", "0,8") + "}", 8),
       "negative number -2"},
      {"RealShape", File("{" + Entry("x", "F32", "2.0", "0,8") + "}", 8),
       "2.0"},
      {"HugeShape",
       File("{" + Entry("x", "F32", "9223372036854775808", "0,8") + "}", 8),
       "9223372036854775808"},
      {"HugerShape",
       File("{" + Entry("x", "F32", "99999999999999999999", "0,8") + "}", 8),
       "99999999999999999999"},
      {"NestedShape", File("{" + Entry("x", "F32", "[2]", "0,8") + "}", 8),
       "shape must be"},
      {"ShapeOverflows",
       File("{" + Entry("x", "U8", "4294967296,4294967296", "0,0") + "}", 0),
       "overflows"},
      {"ShapeOverflowsToTheRightSize",
       File("{" + Entry("x", "F32", "4611686018427387906", "0,8") + "}", 8),
       "overflows"},
      {"ManyDimensions",
       File("{" +
                Entry("x", "U8",
                      "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
                      "1,1,1,1,1,1",
                      "0,1") +
                "}",
            1),
       "dimensions"},
      {"OneOffset", File("{" + Entry("x", "F32", "2", "0") + "}", 8),
       "two numbers"},
      {"ThreeOffsets", File("{" + Entry("x", "F32", "2", "0,8,9") + "}", 8),
       "two numbers"},
      {"OffsetsSwapped", File("{" + Entry("x", "F32", "2", "8,0") + "}", 8),
       "[8, 0]"},
      {"OffsetsBeyondFile", File("{" + Entry("x", "F32", "2", "0,8") + "}", 7),
       "[0, 8]"},
      {"OffsetsHuge",
       File("{" +
                Entry("x", "F32", "2",
                      "18446744073709551608,18446744073709551615") +
                "}",
            8),
       "not a range"},
      {"SizeMismatch", File("{" + Entry("x", "F32", "3", "0,8") + "}", 8),
       "takes 12 bytes"},
      {"Overlap",
       File("{" + ok + "," + Entry("y", "F32", "2", "4,12") + "}", 12),
       "overlap"},
      {"SameRange",
       File("{" + ok + "," + Entry("y", "F32", "2", "0,8") + "}", 8),
       "overlap"},
      {"Hole", File("{" + ok + "," + Entry("y", "U8", "1", "9,10") + "}", 10),
       "leave a hole"},
      {"HoleAtStart", File("{" + Entry("x", "F32", "1", "4,8") + "}", 8),
       "leave a hole"},
      {"DataAfterTheLast", File("{" + ok + "}", 9), "end at data byte 8"},
      {"DataWithoutTensors", File("{}", 1), "end at data byte 0"},
  };
}

class SafetensorsRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(SafetensorsRefusalTest, NamesFileAndProblem) {
  EXPECT_THAT(Read(GetParam().bytes),
              StatusIs(kInvalid, AllOf(StartsWith("w.safetensors: "),
                                       HasSubstr(GetParam().told))));
}

INSTANTIATE_TEST_SUITE_P(All, SafetensorsRefusalTest,
                         ::testing::ValuesIn(Refusals()),
                         [](const ::testing::TestParamInfo<Refusal>& info) {
                           return info.param.what;
                         });

TEST(SafetensorsTest, HugeSparseHeaderIsRefusedUnread) {
  UniqueFd fd(memfd_create("sparse", MFD_CLOEXEC));
  uint64_t length = kMaxSafetensorsHeaderBytes + 1;
  ASSERT_OK(PwriteFully(fd.get(), &length, 8, 0, "sparse"));
  ASSERT_EQ(ftruncate(fd.get(), 1ll << 40), 0);
  EXPECT_THAT(ReadSafetensorsHeader(fd.get(), "s"),
              StatusIs(kInvalid, HasSubstr("limit of 100000000")));
}

TEST(SafetensorsTest, OnlyRegularFilesAreRead) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  EXPECT_THAT(ReadSafetensorsHeader(read_end.get(), "pipe"),
              StatusIs(kInvalid, HasSubstr("pipe: not a regular file")));
}

}  // namespace
}  // namespace slidedp::model
