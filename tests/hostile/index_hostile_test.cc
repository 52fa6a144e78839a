// Any bytes as the index of a sharded model: a clear refusal, or a source whose
// files all lie in the model's folder.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/model/source.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/hostile/mutations.h"
#include "tests/testing/random.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

using testing::Random;

constexpr char kIndex[] = "model.safetensors.index.json";

TEST(IndexHostileTest, DamagedIndexes) {
  testing::TempFolder folder;
  testing::TinyModelOptions options;
  options.hidden = 8;
  options.head_dim = 2;
  options.intermediate = 4;
  options.vocab = 5;
  options.layers = 1;
  options.shards = 2;
  testing::WriteTinyModel(folder.path(), options);
  std::string whole = testing::ReadWhole(folder.Sub(kIndex));
  nlohmann::json parsed = nlohmann::json::parse(whole);
  StateLayout layout = MakeStateLayout(testing::TinyConfig(options));

  Random random(3);
  int refused = 0, accepted = 0;
  for (int i = 0; i < 600; ++i) {
    SCOPED_TRACE(absl::StrCat("mutation ", i));
    folder.Write(kIndex, i % 2 == 0 ? testing::MutateBytes(whole, random)
                                    : testing::MutateJson(parsed, random));
    auto source = OpenModelFolder(folder.path());
    if (!source.ok()) {
      ++refused;
      // A well-formed name of an absent shard is an ordinary missing file.
      if (absl::IsNotFound(source.status())) {
        EXPECT_TRUE(
            absl::StrContains(source.status().message(), folder.path()));
      } else {
        EXPECT_TRUE(testing::IsClearRefusal(source.status(), folder.path()));
      }
      continue;
    }
    ++accepted;
    for (const SourceFile& file : source->files()) {
      ASSERT_TRUE(file.name == "model-00001-of-00002.safetensors" ||
                  file.name == "model-00002-of-00002.safetensors");
    }
    absl::Status fits = ValidateSource(layout, *source);
    EXPECT_EQ(fits.ok(), source->files().size() == 2) << fits;
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(accepted, 10);
}

}  // namespace
}  // namespace slidedp::model
