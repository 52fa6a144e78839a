#include "common/model/source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include "common/base/bf16.h"
#include "common/model/half.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/half.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

using nlohmann::json;
using slidedp::testing::IsOk;
using ::slidedp::testing::kInvalid;
using slidedp::testing::ReadWhole;
using slidedp::testing::StatusIs;
using slidedp::testing::TempFolder;
using slidedp::testing::TinyConfig;
using slidedp::testing::TinyModelOptions;
using slidedp::testing::WriteTinyModel;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kIndex[] = "model.safetensors.index.json";

void EditIndex(const TempFolder& folder,
               const std::function<void(json&)>& change) {
  json index = json::parse(ReadWhole(folder.Sub(kIndex)));
  change(index);
  folder.Write(kIndex, index.dump());
}

std::vector<float> ReadAll(const TensorSource& source,
                           const std::string& name) {
  TensorSource::Ref ref = source.Find(name);
  std::vector<float> values(ref.entry->count());
  EXPECT_OK(ReadAsFloat(ref, 0, values.size(), values.data()));
  return values;
}

class TinySourceTest : public ::testing::TestWithParam<TinyModelOptions> {};

TEST_P(TinySourceTest, OpensAndFitsItsConfig) {
  TempFolder folder;
  WriteTinyModel(folder.path(), GetParam());
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  EXPECT_EQ(source.files().size(), static_cast<size_t>(GetParam().shards));
  StateLayout layout = MakeStateLayout(TinyConfig(GetParam()));
  EXPECT_OK(ValidateSource(layout, source));
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      TensorSource::Ref ref = source.Find(tensor.name);
      ASSERT_NE(ref.entry, nullptr) << tensor.name;
      EXPECT_EQ(ref.entry->dtype, GetParam().dtype);
    }
  }
  EXPECT_EQ(source.Find("model.layers.9.mlp.up_proj.weight").entry, nullptr);
}

TEST_P(TinySourceTest, ValuesAreThoseOfTheFloatModelRounded) {
  TempFolder folder, reference_folder;
  WriteTinyModel(folder.path(), GetParam());
  TinyModelOptions whole = GetParam();
  whole.dtype = DType::kF32;
  whole.shards = 1;
  WriteTinyModel(reference_folder.path(), whole);
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  ASSERT_OK_AND_ASSIGN(TensorSource reference,
                       OpenModelFolder(reference_folder.path()));
  for (const SourceFile& file : reference.files()) {
    for (const TensorEntry& entry : file.header.tensors) {
      std::vector<float> values = ReadAll(source, entry.name);
      std::vector<float> exact = ReadAll(reference, entry.name);
      ASSERT_EQ(values.size(), exact.size());
      for (size_t i = 0; i < values.size(); ++i) {
        float relative = GetParam().dtype == DType::kF32    ? 0
                         : GetParam().dtype == DType::kBf16 ? 0x1p-8f
                                                            : 0x1p-11f;
        // 2^-25: half the distance of subnormal F16 numbers.
        ASSERT_NEAR(values[i], exact[i],
                    relative * std::fabs(exact[i]) +
                        (relative == 0x1p-11f ? 0x1p-25f : 0))
            << entry.name << "[" << i << "]";
      }
    }
  }
}

std::vector<TinyModelOptions> Variants() {
  std::vector<TinyModelOptions> all;
  for (Family family :
       {Family::kLlama, Family::kMistral, Family::kQwen2, Family::kQwen3}) {
    TinyModelOptions options;
    options.family = family;
    all.push_back(options);
    options.tied = true;
    options.shards = 3;
    all.push_back(options);
  }
  TinyModelOptions options;
  options.dtype = DType::kF16;
  options.shards = 2;
  all.push_back(options);
  options.dtype = DType::kF32;
  options.unaligned = true;
  all.push_back(options);
  options = {};
  options.unaligned = true;
  options.tied = options.extra_head = true;
  all.push_back(options);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Variants, TinySourceTest,
                         ::testing::ValuesIn(Variants()));

TEST(SourceTest, EveryHalfIsReadExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    auto half = static_cast<uint16_t>(bits);
    float value = HalfToFloat(half);
    int exponent = (half >> 10) & 31;
    double fraction = half & 1023;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), fraction != 0);
      EXPECT_EQ(std::isinf(value), fraction == 0);
    } else {
      double magnitude = exponent == 0
                             ? std::ldexp(fraction, -24)
                             : std::ldexp(1024 + fraction, exponent - 25);
      ASSERT_EQ(value, (half & 0x8000) != 0 ? -magnitude : magnitude);
      ASSERT_EQ(testing::FloatToHalf(value), half);
    }
    EXPECT_EQ(std::signbit(value), (half & 0x8000) != 0);
  }
}

TEST(SourceTest, ReadsAnyRange) {
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    TempFolder folder;
    TinyModelOptions options;
    options.dtype = dtype;
    options.unaligned = true;
    options.vocab = 3000;  // more elements than one piece of the reader
    WriteTinyModel(folder.path(), options);
    ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
    TensorSource::Ref ref = source.Find("model.embed_tokens.weight");
    std::vector<float> all = ReadAll(source, "model.embed_tokens.weight");
    uint64_t n = all.size();
    ASSERT_EQ(n, 3000u * 64);
    for (auto [first, count] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 1}, {n - 1, 1}, {n, 0}, {7, 131072}, {65535, 65538}}) {
      std::vector<float> part(count + 1, -7.0f);
      ASSERT_OK(ReadAsFloat(ref, first, count, part.data()));
      EXPECT_EQ(std::memcmp(part.data(), all.data() + first, count * 4), 0);
      EXPECT_EQ(part[count], -7.0f) << "wrote beyond the range";
    }
    float one;
    const auto out_of_range = absl::StatusCode::kOutOfRange;
    EXPECT_THAT(ReadAsFloat(ref, n, 1, &one), StatusIs(out_of_range));
    EXPECT_THAT(ReadAsFloat(ref, 1, UINT64_MAX, &one), StatusIs(out_of_range));
    EXPECT_THAT(ReadAsFloat(ref, UINT64_MAX, 1, &one), StatusIs(out_of_range));
  }
}

TEST(SourceTest, AFileCutAfterOpeningIsAnError) {
  TempFolder folder;
  WriteTinyModel(folder.path(), {});
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  ASSERT_EQ(truncate(folder.Sub("model.safetensors").c_str(), 5000), 0);
  TensorSource::Ref ref = source.Find("lm_head.weight");
  std::vector<float> values(ref.entry->count());
  EXPECT_THAT(ReadAsFloat(ref, 0, values.size(), values.data()), Not(IsOk()));
}

TEST(SourceTest, OpensThroughTheLinksOfADownloadCache) {
  TempFolder folder;
  WriteTinyModel(folder.Sub("blobs"), {});
  std::filesystem::create_directory(folder.Sub("snapshot"));
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(
        absl::StrCat("../blobs/", name),
        folder.Sub(absl::StrCat("snapshot/", name)));
  }
  EXPECT_OK(OpenModelFolder(folder.Sub("snapshot")));
}

TEST(SourceTest, FoldersThatHoldNoModelSaySo) {
  TempFolder folder;
  EXPECT_THAT(OpenModelFolder(folder.Sub("absent")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("absent")));
  EXPECT_THAT(OpenModelFolder(folder.path()),
              StatusIs(kInvalid, HasSubstr("neither model.safetensors nor")));
  std::string file = folder.Write("pytorch_model.bin", "x");
  EXPECT_THAT(OpenModelFolder(folder.path()),
              StatusIs(kInvalid, HasSubstr("convert the .bin files")));
  EXPECT_THAT(OpenModelFolder(file), StatusIs(kInvalid, HasSubstr("folder")));
  // A FIFO must not hang the reader.
  ASSERT_EQ(mkfifo(folder.Sub("model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(OpenModelFolder(folder.path()),
              StatusIs(kInvalid, HasSubstr("not a regular file")));
}

TEST(IndexTest, TotalSizeMayBeARealNumber) {
  TempFolder folder;
  TinyModelOptions options;
  options.shards = 2;
  WriteTinyModel(folder.path(), options);
  EditIndex(folder, [](json& index) {
    index["metadata"]["total_size"] = 71903645408.0;
  });
  EXPECT_OK(OpenModelFolder(folder.path()));
}

TEST(IndexTest, OpensNamedShardsOnly) {
  TempFolder folder;
  TinyModelOptions options;
  options.shards = 2;
  WriteTinyModel(folder.path(), options);
  folder.Write("consolidated.safetensors", "not a model");
  folder.Write("model-00003-of-00002.safetensors", "not a model");
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  EXPECT_EQ(source.files()[0].name, "model-00001-of-00002.safetensors");
  EXPECT_EQ(source.files()[1].name, "model-00002-of-00002.safetensors");
}

TEST(IndexTest, ShardNamesMustBePlain) {
  for (const char* name : {"../model-00001-of-00002.safetensors",
                           "/etc/x.safetensors", "sub/x.safetensors", "..", "",
                           ".safetensors", "x.bin", "x\\u0000.safetensors"}) {
    TempFolder folder;
    folder.Write(kIndex,
                 absl::StrCat("{\"weight_map\": {\"a\": \"", name, "\"}}"));
    EXPECT_THAT(OpenModelFolder(folder.path()),
                StatusIs(kInvalid, AllOf(HasSubstr(kIndex),
                                         HasSubstr("not a plain shard name"))))
        << name;
  }
}

TEST(IndexTest, DamagedIndexIsAnError) {
  for (const char* text :
       {"", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {}}",
        "{\"weight_map\": {\"a\": 3}}",
        "{\"weight_map\": {\"a\": \"x.safetensors\", \"a\": "
        "\"y.safetensors\"}}"}) {
    TempFolder folder;
    folder.Write(kIndex, text);
    EXPECT_THAT(OpenModelFolder(folder.path()),
                StatusIs(kInvalid, HasSubstr(kIndex)))
        << text;
  }
}

TEST(IndexTest, DisagreementWithTheShardsIsAnError) {
  TinyModelOptions options;
  options.shards = 2;
  const char* norm = "model.norm.weight";
  {
    TempFolder folder;
    WriteTinyModel(folder.path(), options);
    EditIndex(folder, [&](json& index) {
      index["weight_map"]["absent.weight"] = index["weight_map"][norm];
    });
    EXPECT_THAT(OpenModelFolder(folder.path()),
                StatusIs(kInvalid, AllOf(HasSubstr("absent.weight"),
                                         HasSubstr("no shard holds"))));
  }
  {
    TempFolder folder;
    WriteTinyModel(folder.path(), options);
    EditIndex(folder, [&](json& index) {
      std::string here = index["weight_map"][norm];
      index["weight_map"][norm] = here == "model-00001-of-00002.safetensors"
                                      ? "model-00002-of-00002.safetensors"
                                      : "model-00001-of-00002.safetensors";
    });
    EXPECT_THAT(OpenModelFolder(folder.path()),
                StatusIs(kInvalid, AllOf(HasSubstr(norm),
                                         HasSubstr("the tensor is in"))));
  }
  {
    TempFolder folder;
    WriteTinyModel(folder.path(), options);
    unlink(folder.Sub("model-00002-of-00002.safetensors").c_str());
    EXPECT_THAT(
        OpenModelFolder(folder.path()),
        StatusIs(absl::StatusCode::kNotFound, HasSubstr("model-00002")));
  }
  {
    // One tensor in two shards.
    TempFolder folder;
    WriteTinyModel(folder.path(), options);
    std::filesystem::copy_file(
        folder.Sub("model-00001-of-00002.safetensors"),
        folder.Sub("model-00002-of-00002.safetensors"),
        std::filesystem::copy_options::overwrite_existing);
    EXPECT_THAT(OpenModelFolder(folder.path()),
                StatusIs(kInvalid, HasSubstr("also in model-00001")));
  }
}

TEST(SourceTest, StaysValidWhenMoved) {
  TempFolder folder;
  WriteTinyModel(folder.path(), {});
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  TensorSource moved = std::move(source);
  TensorSource::Ref ref = moved.Find("model.norm.weight");
  EXPECT_EQ(ref.file, &moved.files()[0]);
  EXPECT_EQ(ReadAll(moved, "model.norm.weight").size(), 64u);
}

}  // namespace
}  // namespace slidedp::model
