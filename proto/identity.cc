#include "proto/identity.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace slidedp {

namespace {

// Not the paths: files may be moved.
std::string Sources(const v1::JobSpec& spec) {
  std::string text;
  for (const v1::DataSource& source : spec.sources()) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", source.sequences(),
                    " sequences of weight ", source.weight(), ", checksum ",
                    absl::Hex(source.crc32c(), absl::kZeroPad8));
  }
  return text;
}

}  // namespace

std::map<std::string, std::string> SamplerIdentity(const v1::JobSpec& spec) {
  return {
      {"seed", absl::StrCat(spec.seed())},
      {"sequence_length", absl::StrCat(spec.sequence_length())},
      {"batch_size", absl::StrCat(spec.batch_size())},
      {"dataset_sequences", absl::StrCat(spec.dataset_sequences())},
      {"dataset_tokens", absl::StrCat(spec.dataset_tokens())},
      {"dataset_valid_tokens", absl::StrCat(spec.dataset_valid_tokens())},
      {"sources", Sources(spec)},
      {"packing", spec.packing() ? "true" : "false"},
      {"long_documents", v1::LongDocuments_Name(spec.long_documents())},
  };
}

std::map<std::string, std::string> TrainingIdentity(const v1::JobSpec& spec) {
  return {
      {"optimizer", spec.optimizer().ShortDebugString()},
      {"schedule", spec.schedule().ShortDebugString()},
      {"steps", absl::StrCat(spec.steps())},
      {"max_grad_norm",
       spec.has_max_grad_norm() ? absl::StrCat(spec.max_grad_norm()) : "none"},
      {"update", v1::UpdateMode_Name(spec.update_mode())},
      {"freeze", absl::StrJoin(spec.freeze(), ", ")},
      {"compute_dtype", v1::ComputeDtype_Name(spec.compute_dtype())},
  };
}

std::map<std::string, std::string> HeldOutIdentity(const v1::JobSpec& spec) {
  if (!spec.has_eval()) return {};
  const v1::Evaluation& eval = spec.eval();
  return {
      {"sequence_length", absl::StrCat(spec.sequence_length())},
      {"max_sequences", absl::StrCat(eval.max_sequences())},
      {"dataset_sequences", absl::StrCat(eval.dataset_sequences())},
      {"dataset_tokens", absl::StrCat(eval.dataset_tokens())},
      {"dataset_valid_tokens", absl::StrCat(eval.dataset_valid_tokens())},
      {"dataset_crc32c",
       absl::StrCat(absl::Hex(eval.dataset_crc32c(), absl::kZeroPad8))},
  };
}

}  // namespace slidedp
