// slidedpctl in a folder with a model and a data set, and no daemon.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {

class CliTest : public ::testing::Test {
 protected:
  CliTest() {
    runner_.environment.current_folder = folder_.path();
    testing::WriteTinyModel(folder_.Sub("model"), model_options_);
    testing::TokenDatasetOptions data;
    data.tokens = 4096;
    testing::WriteTokenDataset(folder_.Sub("data.safetensors"), data);
  }

  std::string WriteJob(const std::string& more = "") {
    return folder_.Write("job.yaml",
                         absl::StrCat("model: model\ndata: data.safetensors\n"
                                      "output: out\nsequence_length: 64\n",
                                      more));
  }

  testing::TempFolder folder_;
  testing::TinyModelOptions model_options_;
  CtlRunner runner_;
};

}  // namespace slidedp::ctl
