#include "worker/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::data {
namespace {

constexpr uint64_t kLongestWindow = 65536;
constexpr double kDecimals = 1e6;

}  // namespace

std::vector<uint32_t> WholeShares(const std::vector<double>& weights) {
  std::vector<uint64_t> whole;
  uint64_t divisor = 0, sum = 0;
  for (const double weight : weights) {
    whole.push_back(std::max<uint64_t>(
        1, static_cast<uint64_t>(std::llround(weight * kDecimals))));
    divisor = std::gcd(divisor, whole.back());
    sum += whole.back();
  }
  std::vector<uint32_t> shares;
  for (const uint64_t w : whole) {
    const bool exact = sum / divisor <= kLongestWindow;
    const double rounded = static_cast<double>(w) / static_cast<double>(sum) *
                           static_cast<double>(kLongestWindow);
    shares.push_back(static_cast<uint32_t>(
        exact ? w / divisor : std::max<uint64_t>(1, std::llround(rounded))));
  }
  return shares;
}

absl::StatusOr<Mixture> Mixture::Create(std::vector<Dataset> datasets,
                                        const std::vector<double>& weights,
                                        uint64_t seed) {
  SDP_CHECK(!datasets.empty(), "a mixture of no data set");
  Mixture mixture;
  mixture.datasets_ = std::move(datasets);
  mixture.first_ = {0};
  for (const Dataset& dataset : mixture.datasets_) {
    SDP_CHECK(dataset.sequence_length() == mixture.sequence_length() &&
                  (dataset.documents_per_sequence() > 0) ==
                      (mixture.datasets_[0].documents_per_sequence() > 0),
              "data sets cut in different ways");
    mixture.first_.push_back(mixture.first_.back() + dataset.sequences());
    mixture.tokens_ += dataset.tokens();
    mixture.used_tokens_ += dataset.used_tokens();
    mixture.valid_tokens_ += dataset.valid_tokens();
    mixture.documents_per_sequence_ = std::max(
        mixture.documents_per_sequence_, dataset.documents_per_sequence());
  }
  if (weights.empty()) {
    mixture.samplers_ = {Sampler(mixture.sequences(), seed)};
    return mixture;
  }
  if (weights.size() != mixture.datasets_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " weights for ", mixture.datasets_.size(),
                     " data sets"));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    // Also false for NaN.
    if (!(weights[i] >= kLeastWeight && weights[i] <= kLargestWeight)) {
      return InvalidInput(
          mixture.datasets_[i].path(), "weight", absl::StrCat(weights[i]),
          "out of range",
          absl::StrCat("choose ", kLeastWeight, " to ", kLargestWeight));
    }
    mixture.samplers_.emplace_back(mixture.datasets_[i].sequences(),
                                   DerivedSeed(seed, i));
  }
  mixture.shares_ = WholeShares(weights);
  mixture.Spread();
  return mixture;
}

// Each turn goes to the data set that is owed most.
void Mixture::Spread() {
  const int64_t turns =
      std::accumulate(shares_.begin(), shares_.end(), int64_t{0});
  std::vector<int64_t> owed(shares_.size(), 0);
  std::vector<uint32_t> before(shares_.size(), 0);
  window_.reserve(turns);
  for (int64_t turn = 0; turn < turns; ++turn) {
    for (size_t i = 0; i < owed.size(); ++i) owed[i] += shares_[i];
    const auto next = static_cast<uint32_t>(
        std::max_element(owed.begin(), owed.end()) - owed.begin());
    owed[next] -= turns;
    window_.push_back({next, before[next]++});
  }
}

Mixture::Place Mixture::At(uint64_t position) const {
  if (!weighted()) {
    const uint64_t sequence = samplers_[0].At(position);
    const size_t i = std::upper_bound(first_.begin(), first_.end(), sequence) -
                     first_.begin() - 1;
    return {datasets_[i], sequence - first_[i]};
  }
  const Turn& turn = window_[position % window_.size()];
  const uint64_t nth =
      position / window_.size() * shares_[turn.dataset] + turn.before;
  return {datasets_[turn.dataset], samplers_[turn.dataset].At(nth)};
}

uint64_t Mixture::PositionsOfTokens(uint64_t tokens) const {
  uint64_t position = 0, seen = 0;
  if (!weighted()) {  // every epoch has the same tokens
    const uint64_t epochs = tokens / used_tokens_;
    position = epochs * sequences();
    seen = epochs * used_tokens_;
  }
  for (; seen < tokens; ++position) {
    const Place place = At(position);
    seen += place.dataset.TokenCount(place.sequence);
  }
  return position;
}

}  // namespace slidedp::data
