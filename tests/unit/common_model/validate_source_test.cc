// What is told when a model's files do not fit its config.
#include <string>
#include <vector>

#include "common/model/source.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

using ::slidedp::testing::kInvalid;
using slidedp::testing::StatusIs;
using slidedp::testing::TempFolder;
using slidedp::testing::TinyConfig;
using slidedp::testing::TinyModelOptions;
using slidedp::testing::WriteTinyModel;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ValidateTest, TellsAllThatIsMissingOrWrong) {
  TempFolder folder;
  TinyModelOptions options;
  options.layers = 5;
  options.family = Family::kMistral;
  WriteTinyModel(folder.path(), options);
  ASSERT_OK_AND_ASSIGN(TensorSource source, OpenModelFolder(folder.path()));
  EXPECT_OK(ValidateSource(MakeStateLayout(TinyConfig(options)), source));

  options.family = Family::kQwen2;
  options.layers = 6;
  options.intermediate = 130;
  options.vocab = 300;
  absl::Status status =
      ValidateSource(MakeStateLayout(TinyConfig(options)), source);
  EXPECT_THAT(
      status,
      StatusIs(
          kInvalid,
          AllOf(HasSubstr("model.safetensors: "),
                HasSubstr("model.embed_tokens.weight: shape [256, 64], "
                          "expected [300, 64]"),
                HasSubstr("model.layers.{0-5}.self_attn.q_proj.bias: missing"),
                HasSubstr("model.layers.5.self_attn.q_proj.weight: missing"),
                HasSubstr("model.layers.{0-4}.mlp.up_proj.weight: shape [128, "
                          "64], expected [130, 64]"),
                HasSubstr("model.layers.{0-4}.mlp.down_proj.weight: shape "
                          "[64, 128], expected [64, 130]"),
                HasSubstr("lm_head.weight: shape"), Not(HasSubstr("\n")),
                Not(HasSubstr("model.norm.weight")))));
}

// A file that holds `entries` and zeros.
TensorSource ZeroSource(const TempFolder& folder,
                        std::vector<TensorEntry> entries) {
  std::string bytes = EncodeSafetensorsHeader(entries, {});
  bytes.resize(entries.back().end, '\0');
  folder.Write("model.safetensors", bytes);
  auto source = OpenModelFolder(folder.path());
  EXPECT_OK(source);
  return *std::move(source);
}

std::vector<TensorEntry> EntriesOf(const StateLayout& layout) {
  std::vector<TensorEntry> entries;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      entries.push_back({tensor.name, DType::kBf16, tensor.shape, 0, 0});
    }
  }
  return entries;
}

TEST(ValidateTest, OnlyFloatTypesAreTrained) {
  TempFolder folder;
  StateLayout layout = MakeStateLayout(TinyConfig({}));
  std::vector<TensorEntry> entries = EntriesOf(layout);
  entries[3].dtype = DType::kF8E4M3;
  entries.push_back({"some.extra.inv_freq", DType::kI64, {4}, 0, 0});
  TensorSource source = ZeroSource(folder, entries);
  EXPECT_THAT(ValidateSource(layout, source),
              StatusIs(kInvalid, AllOf(HasSubstr(entries[3].name),
                                       HasSubstr("F8_E4M3, expected BF16"),
                                       Not(HasSubstr("inv_freq")))));
  float value;
  EXPECT_THAT(ReadAsFloat(source.Find("some.extra.inv_freq"), 0, 1, &value),
              StatusIs(kInvalid, HasSubstr("I64")));
}

TEST(ValidateTest, ATiedHeadMustLookLikeTheEmbedding) {
  TinyModelOptions options;
  options.tied = true;
  StateLayout layout = MakeStateLayout(TinyConfig(options));
  std::vector<TensorEntry> entries = EntriesOf(layout);
  {
    TempFolder folder;
    TensorSource source = ZeroSource(folder, entries);
    EXPECT_OK(ValidateSource(layout, source));
  }
  entries.push_back({kHeadName, DType::kBf16, {256, 64}, 0, 0});
  {
    TempFolder folder;
    TensorSource source = ZeroSource(folder, entries);
    EXPECT_OK(ValidateSource(layout, source));
  }
  entries.back().shape = {64, 256};
  TempFolder folder;
  TensorSource source = ZeroSource(folder, entries);
  EXPECT_THAT(ValidateSource(layout, source),
              StatusIs(kInvalid, HasSubstr("lm_head.weight: shape [64, 256]")));
}

}  // namespace
}  // namespace slidedp::model
