// Step-0 logits and gradients of one golden case, computed by the trainer on
// the CPU device in float32, against the case's golden.safetensors:
//   slidedp-golden-probe CASE_FOLDER MODEL_FOLDER -> one JSON object.
// Errors are max |ours - golden| / max |golden| per tensor.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "common/model/safetensors.h"
#include "common/model/source.h"
#include "nlohmann/json.hpp"
#include "tests/local_job/local_job.h"
#include "worker/data/dataset.h"

namespace slidedp {
namespace {

struct Error {
  double worst = 0;
  std::string tensor;

  void Take(double error, const std::string& name) {
    // NaN counts as the worst.
    if (!(error <= worst)) {
      worst = error;
      tensor = name;
    }
  }
};

double RelativeError(const float* ours, const std::vector<float>& golden) {
  double difference = 0, scale = 0;
  for (size_t i = 0; i < golden.size(); ++i) {
    const double d = std::abs(static_cast<double>(ours[i]) - golden[i]);
    if (!(d <= difference)) difference = d;
    scale = std::max(scale, std::abs(static_cast<double>(golden[i])));
  }
  return scale == 0 ? difference : difference / scale;
}

class Golden {
 public:
  static absl::StatusOr<Golden> Open(const std::string& folder) {
    const std::string path = absl::StrCat(folder, "/golden.safetensors");
    SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
    std::vector<std::pair<std::string, UniqueFd>> files;
    files.emplace_back("golden.safetensors", std::move(fd));
    SDP_ASSIGN_OR_RETURN(auto source,
                         model::TensorSource::FromFiles(std::move(files)));
    return Golden(std::move(source));
  }
  absl::StatusOr<std::vector<float>> Floats(const std::string& name) const {
    const auto ref = source_.Find(name);
    if (ref.entry == nullptr) return absl::NotFoundError(name);
    std::vector<float> values(ref.entry->count());
    SDP_RETURN_IF_ERROR(
        model::ReadAsFloat(ref, 0, values.size(), values.data()));
    return values;
  }
  absl::StatusOr<std::vector<int64_t>> Ints(const std::string& name,
                                            std::vector<int64_t>& shape) const {
    const auto ref = source_.Find(name);
    if (ref.entry == nullptr) return absl::NotFoundError(name);
    shape = ref.entry->shape;
    std::vector<int64_t> values(ref.entry->count());
    if (ref.entry->dtype == model::DType::kI64) {
      SDP_RETURN_IF_ERROR(PreadFully(ref.file->fd.get(), values.data(),
                                     values.size() * 8, ref.entry->begin,
                                     name));
    } else if (ref.entry->dtype == model::DType::kI32) {
      std::vector<int32_t> narrow(values.size());
      SDP_RETURN_IF_ERROR(PreadFully(ref.file->fd.get(), narrow.data(),
                                     narrow.size() * 4, ref.entry->begin,
                                     name));
      std::copy(narrow.begin(), narrow.end(), values.begin());
    } else {
      return absl::InvalidArgumentError(absl::StrCat(name, ": not integers"));
    }
    return values;
  }

 private:
  explicit Golden(model::TensorSource source) : source_(std::move(source)) {}
  model::TensorSource source_;
};

// The case's batch as a dataset of one document a sequence.
absl::Status WriteDataset(const std::string& path,
                          const std::vector<int64_t>& ids,
                          const std::vector<int64_t>& labels, int64_t sequences,
                          int64_t length) {
  std::vector<int32_t> input_ids(ids.begin(), ids.end());
  std::vector<uint8_t> mask(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (labels[i] >= 0 && labels[i] != ids[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("label ", labels[i], " at ", i, " is not its token"));
    }
    mask[i] = labels[i] >= 0;
  }
  std::vector<int64_t> offsets(sequences + 1);
  for (int64_t s = 0; s <= sequences; ++s) offsets[s] = s * length;
  const int64_t n = static_cast<int64_t>(ids.size());
  std::vector<model::TensorEntry> entries = {
      {"doc_offsets", model::DType::kI64, {sequences + 1}, 0, 0},
      {"input_ids", model::DType::kI32, {n}, 0, 0},
      {"loss_mask", model::DType::kU8, {n}, 0, 0}};
  std::string file =
      model::EncodeSafetensorsHeader(entries, {{"format", "slidedp-dataset"},
                                               {"version", "1"},
                                               {"layout", "documents"},
                                               {"tokenizer_sha256", "none"}});
  auto append = [&file](const auto& values) {
    file.append(reinterpret_cast<const char*>(values.data()),
                values.size() * sizeof(values[0]));
  };
  append(offsets);
  append(input_ids);
  append(mask);
  return WriteFileAtomically(path, file);
}

absl::StatusOr<nlohmann::json> Probe(const std::string& folder,
                                     const std::string& model,
                                     const std::string& scratch) {
  SDP_ASSIGN_OR_RETURN(const Golden golden, Golden::Open(folder));
  std::vector<int64_t> shape;
  SDP_ASSIGN_OR_RETURN(const auto ids, golden.Ints("input_ids", shape));
  SDP_ASSIGN_OR_RETURN(const auto labels, golden.Ints("labels", shape));
  if (shape.size() != 2) return absl::InvalidArgumentError("input_ids shape");
  const int64_t sequences = shape[0], length = shape[1];
  testing::LocalJobOptions options;
  options.model = model;
  options.data = absl::StrCat(scratch, "/dataset.safetensors");
  SDP_RETURN_IF_ERROR(
      WriteDataset(options.data, ids, labels, sequences, length));
  options.problem.sequence_length = length;
  options.problem.batch_size = sequences;
  options.problem.micro_batch_size = 1;
  options.apply_updates = false;

  std::vector<std::vector<float>> gradients;
  options.hooks.on_gradient = [&](int unit, const float* data, uint64_t count) {
    if (gradients.size() <= static_cast<size_t>(unit)) {
      gradients.resize(unit + 1);
    }
    gradients[unit].assign(data, data + count);
  };
  SDP_ASSIGN_OR_RETURN(const auto golden_logits, golden.Floats("logits"));
  const int64_t vocab =
      static_cast<int64_t>(golden_logits.size()) / (sequences * length);
  std::vector<float> logits(golden_logits.size());
  const data::Sampler sampler(sequences, options.seed);
  options.hooks.on_logits = [&](int64_t micro_batch, int64_t first,
                                int64_t rows, const float* data) {
    const int64_t sequence = static_cast<int64_t>(sampler.At(micro_batch));
    std::copy(data, data + rows * vocab,
              logits.begin() + (sequence * length + first) * vocab);
  };
  SDP_ASSIGN_OR_RETURN(const testing::LocalJobResult result,
                       testing::RunLocalJob(options));

  Error error;
  for (size_t u = 0; u < result.layout.units.size(); ++u) {
    for (const model::Tensor& tensor : result.layout.units[u].tensors) {
      SDP_ASSIGN_OR_RETURN(const auto reference,
                           golden.Floats(absl::StrCat("grad.", tensor.name)));
      error.Take(
          RelativeError(gradients.at(u).data() + tensor.offset, reference),
          tensor.name);
    }
  }
  return nlohmann::json{
      {"logits_rel", RelativeError(logits.data(), golden_logits)},
      {"grad_rel", error.worst},
      {"worst_grad", error.tensor}};
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s CASE_FOLDER MODEL_FOLDER\n", argv[0]);
    return 2;
  }
  char scratch[] = "/tmp/slidedp-golden-XXXXXX";
  if (mkdtemp(scratch) == nullptr) {
    std::perror("mkdtemp");
    return 1;
  }
  const auto result = slidedp::Probe(argv[1], argv[2], scratch);
  unlink((std::string(scratch) + "/dataset.safetensors").c_str());
  rmdir(scratch);
  if (!result.ok()) {
    std::fprintf(stderr, "%s: %s\n", argv[1],
                 std::string(result.status().message()).c_str());
    return 1;
  }
  std::puts(result->dump().c_str());
  return 0;
}
