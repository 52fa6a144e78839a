// One step of the trainer on a model folder and a dataset, without an update:
// writes the unreduced float32 gradients as safetensors (`grad.NAME`, and
// `logits` [sequences, length, vocab] if asked for). What compares them with a
// reference is scripts/golden.py and tests/references.
#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/accelerator.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "common/model/safetensors.h"
#include "tests/local_job/local_job.h"
#include "worker/data/sampler.h"

namespace slidedp {
namespace {

struct Options {
  std::string model, data, output;
  int64_t sequence_length = 0, batch_size = 1, micro_batch_size = 1;
  std::string device = "cpu", compute_dtype = "fp32";
  std::optional<int> kept_layers;
  uint16_t offload_permille = 0;
  bool deterministic = false, label_every_position = false, logits = false;
};

testing::LocalJobOptions JobOptions(const Options& options) {
  testing::LocalJobOptions job;
  job.model = options.model;
  job.data = options.data;
  job.problem.sequence_length = options.sequence_length;
  job.problem.batch_size = options.batch_size;
  job.problem.micro_batch_size = options.micro_batch_size;
  job.problem.device = options.device == "cuda" ? policy::DeviceKind::kCuda
                                                : policy::DeviceKind::kCpu;
  job.problem.float32 = options.compute_dtype == "fp32";
  job.problem.deterministic = options.deterministic;
  job.problem.kept_layers = options.kept_layers;
  job.problem.offload_permille = {options.offload_permille};
  job.label_every_position = options.label_every_position;
  job.apply_updates = false;
  return job;
}

struct Seen {
  std::vector<std::vector<float>> gradients;  // by unit
  std::vector<float> logits;                  // by sequence of the dataset
};

absl::StatusOr<int64_t> VocabularyOf(const std::string& folder) {
  const std::string file = absl::StrCat(folder, "/config.json");
  SDP_ASSIGN_OR_RETURN(const std::string json, ReadFile(file, kMiB));
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config,
                       model::ParseModelConfig(json, file));
  return config.vocab;
}

absl::Status Write(const Options& options, const model::StateLayout& layout,
                   const Seen& seen) {
  SDP_ASSIGN_OR_RETURN(const UniqueFd fd,
                       OpenFile(options.output, O_WRONLY | O_CREAT | O_TRUNC));
  std::vector<model::TensorEntry> entries;
  std::vector<const float*> values;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    for (const model::Tensor& tensor : layout.units[u].tensors) {
      entries.push_back({absl::StrCat("grad.", tensor.name), model::DType::kF32,
                         tensor.shape, 0, 0});
      values.push_back(seen.gradients.at(u).data() + tensor.offset);
    }
  }
  if (options.logits) {
    const auto vocab = static_cast<int64_t>(seen.logits.size()) /
                       (options.batch_size * options.sequence_length);
    entries.push_back({"logits",
                       model::DType::kF32,
                       {options.batch_size, options.sequence_length, vocab},
                       0,
                       0});
    values.push_back(seen.logits.data());
  }
  const std::string header =
      model::EncodeSafetensorsHeader(entries, {{"format", "pt"}});
  SDP_RETURN_IF_ERROR(
      PwriteFully(fd.get(), header.data(), header.size(), 0, options.output));
  for (size_t i = 0; i < entries.size(); ++i) {
    SDP_RETURN_IF_ERROR(PwriteFully(fd.get(), values[i],
                                    entries[i].end - entries[i].begin,
                                    entries[i].begin, options.output));
  }
  return absl::OkStatus();
}

absl::Status Probe(const Options& options) {
  testing::LocalJobOptions job = JobOptions(options);
  Seen seen;
  job.hooks.on_gradient = [&](int unit, const float* data, uint64_t count) {
    if (seen.gradients.size() <= static_cast<size_t>(unit)) {
      seen.gradients.resize(unit + 1);
    }
    seen.gradients[unit].assign(data, data + count);
  };
  if (options.logits) {
    SDP_ASSIGN_OR_RETURN(const int64_t vocab, VocabularyOf(options.model));
    const int64_t length = options.sequence_length;
    seen.logits.resize(options.batch_size * length * vocab);
    job.hooks.on_logits = [&, vocab, length,
                           sampler =
                               data::Sampler(options.batch_size, job.seed)](
                              int64_t micro_batch, int64_t first, int64_t rows,
                              const float* data) {
      first += micro_batch * options.micro_batch_size * length;
      for (int64_t row = first; row < first + rows; ++row) {
        // Places beyond the batch fill up the last micro-batch.
        if (row / length >= options.batch_size) return;
        const auto sequence = static_cast<int64_t>(sampler.At(row / length));
        std::copy_n(
            data + (row - first) * vocab, vocab,
            seen.logits.begin() + (sequence * length + row % length) * vocab);
      }
    };
  }
  SDP_ASSIGN_OR_RETURN(const testing::LocalJobResult result,
                       testing::RunLocalJob(job));
  return Write(options, result.layout, seen);
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) {
  slidedp::device::PrepareAcceleratorProcess();
  slidedp::Options options;
  CLI::App app("Gradients and logits of one step", "slidedp-golden-probe");
  app.add_option("--model", options.model, "Hugging Face folder")->required();
  app.add_option("--data", options.data,
                 "dataset of exactly --batch-size sequences")
      ->required();
  app.add_option("--output", options.output, "safetensors file to write")
      ->required();
  app.add_option("--sequence-length", options.sequence_length)->required();
  app.add_option("--batch-size", options.batch_size)->required();
  app.add_option("--micro-batch-size", options.micro_batch_size);
  app.add_option("--device", options.device)
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--compute-dtype", options.compute_dtype)
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--kept-layers", options.kept_layers,
                 "layers that recompute nothing");
  app.add_option("--offload-permille", options.offload_permille,
                 "of what layers keep, in host memory")
      ->check(CLI::Range(0, 1000));
  app.add_flag("--deterministic", options.deterministic);
  app.add_flag("--label-every-position", options.label_every_position,
               "sequences of the data have one token more: a label only");
  app.add_flag("--logits", options.logits, "write logits too");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slidedp::Probe(options);
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", options.model.c_str(),
                 std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
