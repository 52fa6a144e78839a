#include "hostd/ctl/data_summary.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/units.h"
#include "hostd/ctl/yaml_tree.h"
#include "worker/data/mixture.h"

namespace slidedp::ctl {

DataSummary SummarizeData(const v1::JobSpec& spec) {
  DataSummary summary;
  const auto all = static_cast<double>(spec.dataset_sequences());
  const bool weighted = spec.sources_size() > 0 && spec.sources(0).weight() > 0;
  std::vector<uint32_t> shares;
  if (weighted) {
    std::vector<double> weights;
    for (const v1::DataSource& source : spec.sources()) {
      weights.push_back(source.weight());
    }
    shares = data::WholeShares(weights);
  }
  const double window = std::accumulate(shares.begin(), shares.end(), 0.0);
  uint64_t used = 0;
  for (int i = 0; i < spec.sources_size(); ++i) {
    const v1::DataSource& source = spec.sources(i);
    const auto sequences = static_cast<double>(source.sequences());
    const double share = weighted ? shares[i] / window : sequences / all;
    summary.sources.push_back(
        {source.path(), source.sequences(), share, share * all / sequences});
    const double places = share * static_cast<double>(spec.batch_size());
    summary.tokens_per_step +=
        places * static_cast<double>(source.used_tokens()) / sequences;
    summary.labels_per_step +=
        places * static_cast<double>(source.valid_tokens()) / sequences;
    used += source.used_tokens();
  }
  const double positions = static_cast<double>(spec.batch_size()) *
                           static_cast<double>(spec.sequence_length());
  summary.padding_share = 1 - summary.tokens_per_step / positions;
  summary.fewest_sequences = CeilDiv(used, spec.sequence_length());
  return summary;
}

void PrintData(const v1::JobSpec& spec, std::ostream& out) {
  const DataSummary summary = SummarizeData(spec);
  for (const DataSummary::Source& source : summary.sources) {
    out << "data     " << Printable(source.path, 4096) << ": "
        << source.sequences << " sequences";
    if (summary.sources.size() > 1) {
      out << absl::StrFormat(", %.1f%% of each step, %.2f passes an epoch",
                             100 * source.share, source.passes);
    }
    out << "\n";
  }
  out << "step     " << spec.batch_size() << " sequences of "
      << spec.sequence_length()
      << absl::StrFormat(": %.0f tokens and %.0f labels on average, ",
                         summary.tokens_per_step, summary.labels_per_step)
      << absl::StrFormat("%.1f%% padding, ", 100 * summary.padding_share)
      << (spec.packing() ? "documents packed and isolated" : "not packed")
      << "\n";
}

Json JsonData(const v1::JobSpec& spec) {
  const DataSummary summary = SummarizeData(spec);
  Json sources = Json::array();
  for (const DataSummary::Source& source : summary.sources) {
    sources.push_back(Json{{"path", source.path},
                           {"sequences", source.sequences},
                           {"share", source.share},
                           {"passes_per_epoch", source.passes}});
  }
  return Json{{"sequences", spec.dataset_sequences()},
              {"sources", std::move(sources)},
              {"packing", spec.packing()},
              {"tokens_per_step", summary.tokens_per_step},
              {"labels_per_step", summary.labels_per_step},
              {"padding_share", summary.padding_share}};
}

}  // namespace slidedp::ctl
