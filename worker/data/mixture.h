// The data sets of a job and the order in which it reads them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"

namespace slidedp::data {

inline constexpr double kLeastWeight = 1e-6;
inline constexpr double kLargestWeight = 1e6;

// Position p (0, 1, 2, ... over all steps) is one sequence of one data set, the
// same on every rank and after a resume: any position costs O(log data sets) at
// most. Step t takes positions [t * batch_size, (t + 1) * batch_size).
//
// Without weights the data sets are joined, and each epoch of sequences() has
// every sequence once. With weights, window() positions in a row, wherever they
// begin, have exactly share(i) of data set i, spread evenly; each data set goes
// through an order of its own, again and again. An epoch is sequences()
// positions then too.
class Mixture {
 public:
  // Weights: none, or a positive one for each data set. `datasets` are of one
  // sequence length, all packed or none.
  static absl::StatusOr<Mixture> Create(std::vector<Dataset> datasets,
                                        const std::vector<double>& weights,
                                        uint64_t seed);

  struct Place {
    const Dataset& dataset;
    uint64_t sequence;
  };
  Place At(uint64_t position) const;

  const std::vector<Dataset>& datasets() const { return datasets_; }
  // Over all data sets, each once.
  uint64_t sequences() const { return first_.back(); }
  uint64_t tokens() const { return tokens_; }
  uint64_t used_tokens() const { return used_tokens_; }
  uint64_t valid_tokens() const { return valid_tokens_; }
  int64_t sequence_length() const { return datasets_[0].sequence_length(); }
  // The most of any; 0: not packed.
  int64_t documents_per_sequence() const { return documents_per_sequence_; }

  bool weighted() const { return !shares_.empty(); }
  uint64_t window() const { return window_.size(); }
  uint64_t share(size_t dataset) const { return shares_[dataset]; }

  // The fewest positions, from 0 on, whose sequences hold `tokens` tokens,
  // padding not counted.
  uint64_t PositionsOfTokens(uint64_t tokens) const;

 private:
  // A position of the window: which data set, and how many of the same lie
  // before it in the window.
  struct Turn {
    uint32_t dataset, before;
  };
  Mixture() = default;
  void Spread();

  std::vector<Dataset> datasets_;
  // The data sets' sequences before each one; then all.
  std::vector<uint64_t> first_;
  std::vector<Sampler> samplers_;  // joined: one; weighted: one each
  std::vector<uint32_t> shares_;   // weighted
  std::vector<Turn> window_;       // weighted
  uint64_t tokens_ = 0, used_tokens_ = 0, valid_tokens_ = 0;
  int64_t documents_per_sequence_ = 0;
};

// Weights in whole numbers, with a window of at most 65536 + one for each data
// set: exact for weights of up to six decimals whose ratio allows it.
std::vector<uint32_t> WholeShares(const std::vector<double>& weights);

}  // namespace slidedp::data
