#include "worker/data/job_data.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::data {
namespace {

SequenceOptions OptionsOf(const v1::JobSpec& spec) {
  SequenceOptions options;
  options.packing = spec.packing();
  options.long_documents = spec.long_documents() == v1::LONG_DOCUMENTS_TRUNCATE
                               ? LongDocuments::kTruncate
                               : LongDocuments::kSplit;
  return options;
}

}  // namespace

absl::StatusOr<Mixture> OpenJobData(const v1::JobSpec& spec, int64_t vocab) {
  if (spec.sources().empty()) {
    return InvalidInput("job spec", "data", "", "names no data set",
                        "give a dataset made by slidedp-prepare");
  }
  SequenceOptions options = OptionsOf(spec);
  options.seed = spec.seed();
  std::vector<Dataset> datasets;
  std::vector<double> weights;
  for (const v1::DataSource& source : spec.sources()) {
    SDP_ASSIGN_OR_RETURN(
        Dataset dataset,
        Dataset::Open(source.path(),
                      static_cast<int64_t>(spec.sequence_length()), vocab,
                      options));
    datasets.push_back(std::move(dataset));
    if (spec.sources(0).weight() != 0) weights.push_back(source.weight());
  }
  return Mixture::Create(std::move(datasets), weights, spec.seed());
}

absl::StatusOr<Dataset> OpenHeldOut(const v1::JobSpec& spec, int64_t vocab) {
  return Dataset::Open(spec.eval().data(),
                       static_cast<int64_t>(spec.sequence_length()), vocab,
                       OptionsOf(spec));
}

absl::Status CheckUnchanged(const Dataset& dataset,
                            const Submitted& submitted) {
  struct Pair {
    absl::string_view name;
    uint64_t found, submitted;
  };
  for (const Pair& pair :
       {Pair{"sequences", dataset.sequences(), submitted.sequences},
        Pair{"tokens", dataset.tokens(), submitted.tokens},
        Pair{"checksum", dataset.crc32c(), submitted.crc32c}}) {
    if (pair.found == pair.submitted) continue;
    return InvalidInput(
        dataset.path(), pair.name, absl::StrCat(pair.found),
        absl::StrCat("was ", pair.submitted, " when the job was submitted"),
        "the file has changed; submit again");
  }
  return absl::OkStatus();
}

}  // namespace slidedp::data
