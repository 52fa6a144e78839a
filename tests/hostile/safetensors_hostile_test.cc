// Any bytes as a safetensors file: a clear refusal, or a header that is sound.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/model/safetensors.h"
#include "common/model/source.h"
#include "gtest/gtest.h"
#include "tests/hostile/mutations.h"
#include "tests/testing/random.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

using testing::IsClearRefusal;
using testing::MutateBytes;
using testing::Random;

constexpr char kTensorFile[] = "hostile.safetensors";

UniqueFd FileOf(const std::string& bytes) {
  UniqueFd fd(memfd_create(kTensorFile, MFD_CLOEXEC));
  EXPECT_OK(PwriteFully(fd.get(), bytes.data(), bytes.size(), 0, kTensorFile));
  return fd;
}

// What callers rely on, checked without the parser's own means.
void ExpectSound(const SafetensorsHeader& header, uint64_t file_bytes) {
  ASSERT_EQ(header.file_bytes, file_bytes);
  ASSERT_GE(header.data_begin, 10u);
  std::set<std::string> names;
  uint64_t end = header.data_begin;
  for (const TensorEntry& entry : header.tensors) {
    ASSERT_TRUE(names.insert(entry.name).second);
    ASSERT_EQ(entry.begin, end);
    ASSERT_LE(entry.begin, entry.end);
    unsigned __int128 bytes = DTypeBytes(entry.dtype);
    for (int64_t extent : entry.shape) {
      ASSERT_GE(extent, 0);
      bytes *= static_cast<uint64_t>(extent);
    }
    ASSERT_TRUE(bytes == entry.end - entry.begin) << entry.name;
    ASSERT_EQ(entry.count() * DTypeBytes(entry.dtype), entry.end - entry.begin);
    end = entry.end;
  }
  ASSERT_EQ(end, file_bytes);
}

// Accepted files must also be readable to the last element.
void ExpectReadable(const std::string& bytes) {
  std::vector<std::pair<std::string, UniqueFd>> files;
  files.emplace_back(kTensorFile, FileOf(bytes));
  ASSERT_OK_AND_ASSIGN(TensorSource source,
                       TensorSource::FromFiles(std::move(files)));
  for (const TensorEntry& entry : source.files()[0].header.tensors) {
    TensorSource::Ref ref = source.Find(entry.name);
    ASSERT_EQ(ref.entry, &entry);
    std::vector<float> values(entry.count());
    absl::Status status = ReadAsFloat(ref, 0, values.size(), values.data());
    bool trainable = entry.dtype == DType::kBf16 ||
                     entry.dtype == DType::kF16 || entry.dtype == DType::kF32;
    ASSERT_EQ(status.ok(), trainable) << status;
  }
}

void CheckHeader(const std::string& bytes, testing::Tally& tally) {
  UniqueFd fd = FileOf(bytes);
  auto header = ReadSafetensorsHeader(fd.get(), kTensorFile);
  if (header.ok()) {
    ++tally.accepted;
    ExpectSound(*header, bytes.size());
    ExpectReadable(bytes);
  } else {
    ++tally.refused;
    EXPECT_TRUE(IsClearRefusal(header.status(), kTensorFile));
  }
}

std::string SmallFile() {
  std::vector<TensorEntry> tensors = {
      {"b.weight", DType::kF32, {3, 2}, 0, 0},
      {"a.weight", DType::kBf16, {5}, 0, 0},
      {"empty", DType::kU8, {0, 7}, 0, 0},
      {"scalar", DType::kF16, {}, 0, 0},
  };
  std::string bytes =
      EncodeSafetensorsHeader(tensors, {{"format", "pt"}, {"k", "v"}});
  bytes.resize(tensors.back().end, 'd');
  return bytes;
}

std::string TinyFile() {
  testing::TempFolder folder;
  testing::TinyModelOptions options;
  options.hidden = 8;
  options.head_dim = 2;
  options.intermediate = 4;
  options.vocab = 5;
  testing::WriteTinyModel(folder.path(), options);
  return testing::ReadWhole(folder.Sub("model.safetensors"));
}

TEST(SafetensorsHostileTest, DamagedFiles) {
  Random random(20240607);
  testing::Tally tally;
  for (const std::string& whole : {SmallFile(), TinyFile()}) {
    for (int i = 0; i < 600; ++i) {
      SCOPED_TRACE(absl::StrCat("mutation ", i));
      CheckHeader(MutateBytes(whole, random), tally);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(tally.refused, 600);
  EXPECT_GT(tally.accepted, 10) << "data bytes may be anything";
}

// The length prefix follows the damaged text, so that damage reaches past it.
TEST(SafetensorsHostileTest, DamagedHeadersOfTheRightLength) {
  Random random(77);
  testing::Tally tally;
  for (const std::string& whole : {SmallFile(), TinyFile()}) {
    uint64_t length;
    std::memcpy(&length, whole.data(), 8);
    for (int i = 0; i < 600; ++i) {
      SCOPED_TRACE(absl::StrCat("mutation ", i));
      std::string text = MutateBytes(whole.substr(8, length), random);
      uint64_t mutated = text.size();
      std::string bytes(8, '\0');
      std::memcpy(bytes.data(), &mutated, 8);
      CheckHeader(bytes + text + whole.substr(8 + length), tally);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(tally.refused, 600);
  EXPECT_GT(tally.accepted, 10) << "names and metadata may be anything";
}

TEST(SafetensorsHostileTest, DamagedLengths) {
  Random random(5);
  testing::Tally tally;
  std::string whole = SmallFile();
  for (int i = 0; i < 300; ++i) {
    uint64_t length = random.Next() >> random.Below(64);
    std::memcpy(whole.data(), &length, 8);
    CheckHeader(whole, tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(tally.accepted, 0);
}

TEST(SafetensorsHostileTest, EveryTruncation) {
  std::string whole = SmallFile();
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    UniqueFd fd = FileOf(whole.substr(0, bytes));
    auto header = ReadSafetensorsHeader(fd.get(), kTensorFile);
    ASSERT_TRUE(IsClearRefusal(header.status(), kTensorFile)) << bytes;
  }
}

TEST(SafetensorsHostileTest, EveryBitOfTheHeader) {
  std::string whole = SmallFile();
  uint64_t length;
  std::memcpy(&length, whole.data(), 8);
  testing::Tally tally;
  for (size_t bit = 0; bit < (8 + length) * 8; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    SCOPED_TRACE(absl::StrCat("bit ", bit));
    CheckHeader(bytes, tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(tally.refused, tally.accepted);
}

}  // namespace
}  // namespace slidedp::model
