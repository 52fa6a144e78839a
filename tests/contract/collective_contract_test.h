// The contract of collective::Collective, for each way of making ranks meet.
// Instantiated in one file per kind of label: TSan sees threads, not processes.
#pragma once

#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/contract/collective_ranks.h"

namespace slidedp::collective {

// Backend and world size.
class CollectiveContract
    : public ::testing::TestWithParam<std::tuple<CollectiveBackend, int>> {
 protected:
  int world_size() const { return std::get<1>(GetParam()); }
  // Staging sizes to try; one if the backend has no such thing.
  std::vector<size_t> stagings() const;
  // All ranks must return OK.
  void Run(const RankSetup& setup, const RankBody& body);
  RankSetup WithStaging(size_t staging_bytes) const {
    RankSetup setup;
    setup.world_size = world_size();
    setup.staging_bytes = staging_bytes;
    return setup;
  }
};

std::string CollectiveContractName(
    const ::testing::TestParamInfo<CollectiveContract::ParamType>& info);

}  // namespace slidedp::collective
