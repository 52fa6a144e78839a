// slidedp-infer: the loss of a model on a dataset, and greedy generation, on
// this machine's CPU. One JSON object on stdout.
#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/config.h"
#include "nlohmann/json.hpp"
#include "worker/data/dataset.h"
#include "worker/infer/model.h"

namespace slidedp::infer {
namespace {

struct Options {
  std::string model;
  std::string data;
  std::string prompt_ids;
  std::vector<int32_t> stop_ids;
  int64_t sequence_length = 1024;
  int64_t max_new_tokens = 32;
  int threads = 0;
};

absl::Status Loss(const Options& options) {
  SDP_ASSIGN_OR_RETURN(
      auto model,
      Model::Load(options.model, options.sequence_length, options.threads));
  SDP_ASSIGN_OR_RETURN(
      const data::Dataset dataset,
      data::Dataset::Open(options.data, options.sequence_length,
                          model->config().vocab));
  double sum = 0;
  std::vector<int32_t> ids(options.sequence_length);
  std::vector<int32_t> labels(options.sequence_length);
  for (uint64_t i = 0; i < dataset.sequences(); ++i) {
    dataset.Fill(i, ids.data(), labels.data());
    SDP_ASSIGN_OR_RETURN(const double loss, model->LossSum(ids, labels));
    sum += loss;
  }
  const nlohmann::json out = {
      {"loss", sum / static_cast<double>(dataset.valid_tokens())},
      {"tokens", dataset.valid_tokens()},
      {"sequences", dataset.sequences()}};
  std::puts(out.dump().c_str());
  return absl::OkStatus();
}

// "1,2,3", or a file that holds that.
absl::StatusOr<std::vector<int32_t>> ParseIds(const std::string& text) {
  std::string list = text;
  if (text.find_first_not_of("0123456789, ") != std::string::npos) {
    SDP_ASSIGN_OR_RETURN(list, ReadFile(text, kMiB));
  }
  std::vector<int32_t> ids;
  for (absl::string_view part :
       absl::StrSplit(list, absl::ByAnyChar(", \n\r\t"), absl::SkipEmpty())) {
    int32_t id;
    if (!absl::SimpleAtoi(part, &id)) {
      return InvalidInput(text, "prompt-ids", part, "is not a token id",
                          "give numbers separated by commas");
    }
    ids.push_back(id);
  }
  if (ids.empty()) {
    return InvalidInput("", "prompt-ids", text, "holds no token id",
                        "give at least one");
  }
  return ids;
}

absl::Status Generate(const Options& options) {
  SDP_ASSIGN_OR_RETURN(std::vector<int32_t> ids, ParseIds(options.prompt_ids));
  const size_t prompt = ids.size();
  SDP_ASSIGN_OR_RETURN(auto model, Model::Load(options.model,
                                               static_cast<int64_t>(prompt) +
                                                   options.max_new_tokens,
                                               options.threads));
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    SDP_ASSIGN_OR_RETURN(const int32_t next, model->NextToken(ids));
    ids.push_back(next);
    if (std::find(options.stop_ids.begin(), options.stop_ids.end(), next) !=
        options.stop_ids.end()) {
      break;
    }
  }
  const nlohmann::json out = {
      {"ids", std::vector<int32_t>(ids.begin() + prompt, ids.end())}};
  std::puts(out.dump().c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace slidedp::infer

int main(int argc, char** argv) {
  slidedp::infer::Options options;
  CLI::App app("Evaluation and generation with a Hugging Face model folder");
  app.require_subcommand(1);
  auto common = [&options](CLI::App* command) {
    command->add_option("--model", options.model, "model folder")->required();
    command
        ->add_option("--threads", options.threads, "CPU threads (0: all cores)")
        ->check(CLI::Range(0, 1024));
  };
  CLI::App* loss = app.add_subcommand("loss",
                                      "mean loss over the labels of a "
                                      "dataset of slidedp-prepare");
  common(loss);
  loss->add_option("--data", options.data, "dataset file")->required();
  loss->add_option("--sequence-length", options.sequence_length, "tokens")
      ->check(CLI::Range(1, 1 << 24));
  CLI::App* generate = app.add_subcommand("generate", "greedy generation");
  common(generate);
  generate
      ->add_option("--prompt-ids", options.prompt_ids,
                   "token ids separated by commas, or a file of them")
      ->required();
  generate->add_option("--max-new-tokens", options.max_new_tokens, "tokens")
      ->check(CLI::Range(1, 1 << 20));
  generate->add_option("--stop-ids", options.stop_ids, "end after one of these")
      ->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  if (options.threads == 0) {
    options.threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  const absl::Status status = loss->parsed()
                                  ? slidedp::infer::Loss(options)
                                  : slidedp::infer::Generate(options);
  if (!status.ok()) {
    std::fprintf(stderr, "slidedp-infer: %s\n",
                 std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
