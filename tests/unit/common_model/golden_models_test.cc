// The golden folders were written by transformers: they must be read as such.
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/source.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::model {
namespace {

struct Golden {
  const char* name;
  Family family;
  bool tied;
  int64_t window;
  double llama3_factor;
};

class GoldenModelTest : public ::testing::TestWithParam<Golden> {
 protected:
  std::string folder() const {
    return absl::StrCat("tests/goldens/", GetParam().name);
  }
};

TEST_P(GoldenModelTest, ParsesAndValidates) {
  std::string path = absl::StrCat(folder(), "/model/config.json");
  ASSERT_OK_AND_ASSIGN(ModelConfig config,
                       ParseModelConfig(testing::ReadWhole(path), path));
  EXPECT_EQ(config.family, GetParam().family);
  EXPECT_EQ(config.tied, GetParam().tied);
  EXPECT_EQ(config.window,
            std::vector<int64_t>(config.layers, GetParam().window));
  EXPECT_EQ(config.rope.llama3_factor, GetParam().llama3_factor);
  ASSERT_OK_AND_ASSIGN(TensorSource source,
                       OpenModelFolder(absl::StrCat(folder(), "/model")));
  StateLayout layout = MakeStateLayout(config);
  ASSERT_OK(ValidateSource(layout, source));

  // The layout trains exactly the tensors of the file.
  size_t tensors = 0;
  for (const Unit& unit : layout.units) tensors += unit.tensors.size();
  EXPECT_EQ(source.files()[0].header.tensors.size(), tensors);
}

// The reference's gradients name every trained parameter, and its record of
// the optimizer says which names do not decay.
TEST_P(GoldenModelTest, TrainsWhatTheReferenceTrained) {
  std::string path = absl::StrCat(folder(), "/model/config.json");
  ASSERT_OK_AND_ASSIGN(ModelConfig config,
                       ParseModelConfig(testing::ReadWhole(path), path));
  StateLayout layout = MakeStateLayout(config);
  std::string golden = absl::StrCat(folder(), "/golden.safetensors");
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, OpenFile(golden, 0));
  ASSERT_OK_AND_ASSIGN(SafetensorsHeader header,
                       ReadSafetensorsHeader(fd.get(), golden));
  nlohmann::json meta = nlohmann::json::parse(
      testing::ReadWhole(absl::StrCat(folder(), "/meta.json")));
  std::regex no_decay(meta["no_decay_pattern"].get<std::string>());
  uint64_t parameters = 0, gradients = 0;
  for (const TensorEntry& entry : header.tensors) {
    if (entry.name.rfind("grad.", 0) != 0) continue;
    ++gradients;
    parameters += entry.count();
  }
  EXPECT_EQ(parameters, layout.parameters);
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      const TensorEntry* gradient =
          header.Find(absl::StrCat("grad.", tensor.name));
      ASSERT_NE(gradient, nullptr) << tensor.name;
      EXPECT_EQ(gradient->shape, tensor.shape) << tensor.name;
      EXPECT_EQ(tensor.decay, !std::regex_search(tensor.name, no_decay))
          << tensor.name;
      --gradients;
    }
  }
  EXPECT_EQ(gradients, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    All, GoldenModelTest,
    ::testing::Values(Golden{"llama_tied", Family::kLlama, true, 0, 0},
                      Golden{"llama3_scaled_rope", Family::kLlama, false, 0, 8},
                      Golden{"mistral", Family::kMistral, false, 0, 0},
                      Golden{"mistral_sliding", Family::kMistral, false, 16, 0},
                      Golden{"qwen2_tied", Family::kQwen2, true, 0, 0},
                      Golden{"qwen2_untied", Family::kQwen2, false, 0, 0},
                      Golden{"qwen3_tied", Family::kQwen3, true, 0, 0},
                      Golden{"qwen3_untied", Family::kQwen3, false, 0, 0}),
    [](const ::testing::TestParamInfo<Golden>& info) {
      return info.param.name;
    });

}  // namespace
}  // namespace slidedp::model
