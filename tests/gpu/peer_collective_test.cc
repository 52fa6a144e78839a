// The Collective contract over the GPUs' own copies, and that its sums are
// those of rank order to the last bit. Needs two GPUs that reach each other.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/base/bf16.h"
#include "common/base/status.h"
#include "common/collective/cuda_peer_collective.h"
#include "common/device/cuda_device.h"
#include "tests/contract/collective_contract_test.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::collective {
namespace {

std::vector<int> PeerWorlds() {
  static const int gpus = CountGpus();
  return gpus >= 2 ? std::vector<int>{2} : std::vector<int>{};
}

INSTANTIATE_TEST_SUITE_P(Peers, CollectiveContract,
                         ::testing::Combine(::testing::Values(CollectiveBackend{
                                                "peers", RunOverPeers,
                                                /*staged=*/false}),
                                            ::testing::ValuesIn(PeerWorlds())),
                         CollectiveContractName);

// Any bits that are a finite number of moderate size, different on each rank.
float Value(int rank, size_t i) {
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u + 97u * rank + 1u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return static_cast<float>(static_cast<int32_t>(x)) * 3.1e-7f;
}

template <typename T>
T Stored(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return FloatToBf16Even(value);
  }
}

float Widened(float value) { return value; }
float Widened(bf16 value) { return Bf16ToFloat(value); }

// Shards of `count` elements, of which this rank's is the sum afterwards.
template <typename T>
absl::Status SumsInRankOrder(RankContext& rank, size_t count, DType dtype) {
  const int world = rank.collective.world_size();
  const int me = rank.collective.rank();
  const size_t bytes = count * world * sizeof(T);
  SDP_ASSIGN_OR_RETURN(
      device::Buffer data,
      rank.device.Allocate("data", bytes, device::Memory::kDevice));
  SDP_ASSIGN_OR_RETURN(
      device::Buffer host,
      rank.device.Allocate("host", bytes, device::Memory::kPinnedHost));
  T* values = host.as<T>();
  // Operations follow each other without a pause.
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < count * world; ++i) {
      values[i] = Stored<T>(Value(me + 7 * round, i));
    }
    SDP_RETURN_IF_ERROR(
        rank.device.Copy(data.data(), values, bytes, rank.stream));
    SDP_RETURN_IF_ERROR(
        rank.collective.ReduceScatter(data.data(), count, dtype, rank.stream));
    SDP_RETURN_IF_ERROR(
        rank.collective.AllGather(data.data(), count * sizeof(T), rank.stream));
    SDP_RETURN_IF_ERROR(
        rank.device.Copy(values, data.data(), bytes, rank.stream));
    SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
    for (size_t i = 0; i < count * world; ++i) {
      float sum = 0;
      for (int r = 0; r < world; ++r) {
        const float term = Widened(Stored<T>(Value(r + 7 * round, i)));
        sum = r == 0 ? term : sum + term;
      }
      const T want = Stored<T>(sum);
      if (std::memcmp(&want, &values[i], sizeof(T)) != 0) {
        return absl::InternalError(absl::StrCat(
            "round ", round, ", element ", i, " of ", count, " a shard is ",
            Widened(values[i]), ", not ", Widened(want)));
      }
    }
  }
  return absl::OkStatus();
}

TEST(PeerCollectiveTest, SumsAreThoseOfRankOrderBitForBit) {
  if (PeerWorlds().empty()) GTEST_SKIP() << "needs two GPUs";
  RankSetup setup;
  setup.world_size = 2;
  // One element; an odd number; many pieces and no multiple of one.
  const size_t several_pieces = 2'500'013;
  for (const absl::Status& status :
       RunOverPeers(setup, [&](RankContext& rank) -> absl::Status {
         for (const size_t count :
              {size_t{1}, size_t{64}, size_t{1001}, several_pieces}) {
           SDP_RETURN_IF_ERROR(
               SumsInRankOrder<float>(rank, count, DType::kF32));
           SDP_RETURN_IF_ERROR(
               SumsInRankOrder<bf16>(rank, count, DType::kBf16));
         }
         return absl::OkStatus();
       })) {
    EXPECT_OK(status);
  }
}

// A rank that is far ahead writes over nothing that another still reads.
TEST(PeerCollectiveTest, AFastRankWaitsForASlowOne) {
  if (PeerWorlds().empty()) GTEST_SKIP() << "needs two GPUs";
  RankSetup setup;
  setup.world_size = 2;
  for (const absl::Status& status :
       RunOverPeers(setup, [](RankContext& rank) -> absl::Status {
         const int me = rank.collective.rank();
         const size_t count = 4096;
         const size_t bytes = 2 * count * sizeof(float);
         constexpr int kRounds = 64;
         SDP_ASSIGN_OR_RETURN(
             device::Buffer data,
             rank.device.Allocate("data", bytes, device::Memory::kDevice));
         // What rank 1 does between its rounds.
         SDP_ASSIGN_OR_RETURN(device::Buffer ballast,
                              rank.device.Allocate("ballast", size_t{1} << 30,
                                                   device::Memory::kDevice));
         SDP_ASSIGN_OR_RETURN(
             device::Buffer host,
             rank.device.Allocate("host", bytes * kRounds,
                                  device::Memory::kPinnedHost));
         SDP_ASSIGN_OR_RETURN(
             device::Buffer sums,
             rank.device.Allocate("sums", bytes * kRounds,
                                  device::Memory::kPinnedHost));
         for (int round = 0; round < kRounds; ++round) {
           for (size_t i = 0; i < 2 * count; ++i) {
             host.as<float>()[round * 2 * count + i] =
                 static_cast<float>(round * 10 + me);
           }
         }
         for (int round = 0; round < kRounds; ++round) {
           if (me == 1) {
             SDP_RETURN_IF_ERROR(rank.device.FillZero(
                 ballast.data(), ballast.bytes(), rank.stream));
           }
           SDP_RETURN_IF_ERROR(rank.device.Copy(data.data(),
                                                host.as<char>() + round * bytes,
                                                bytes, rank.stream));
           SDP_RETURN_IF_ERROR(rank.collective.ReduceScatter(
               data.data(), count, DType::kF32, rank.stream));
           SDP_RETURN_IF_ERROR(rank.device.Copy(sums.as<char>() + round * bytes,
                                                data.data(), bytes,
                                                rank.stream));
         }
         SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
         for (int round = 0; round < kRounds; ++round) {
           const float* shard =
               sums.as<float>() + round * 2 * count + me * count;
           for (size_t i = 0; i < count; ++i) {
             if (shard[i] != static_cast<float>(round * 20 + 1)) {
               return absl::InternalError(absl::StrCat(
                   "round ", round, ", element ", i, " is ", shard[i]));
             }
           }
         }
         return absl::OkStatus();
       })) {
    EXPECT_OK(status);
  }
}

TEST(PeerCollectiveTest, NcclIsUsedWhereTheUserForbidsPeerAccess) {
  if (PeerWorlds().empty()) GTEST_SKIP() << "needs two GPUs";
  setenv("NCCL_P2P_DISABLE", "1", /*overwrite=*/1);
  RankSetup setup;
  setup.world_size = 2;
  const auto statuses =
      RunOverPeers(setup, [](RankContext&) { return absl::OkStatus(); });
  unsetenv("NCCL_P2P_DISABLE");
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
}

}  // namespace
}  // namespace slidedp::collective
