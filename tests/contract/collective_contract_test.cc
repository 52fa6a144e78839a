#include "tests/contract/collective_contract_test.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/bf16.h"
#include "common/base/status.h"
#include "tests/testing/random.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::collective {
namespace {

using testing::IsOk;

// Sizes around cache lines and staging buffers; with the least staging nearly
// all need several pieces.
constexpr size_t kCounts[] = {0, 1, 3, 16, 17, 255, 1531};
constexpr size_t kStagings[] = {0, 1000};
constexpr DType kDTypes[] = {DType::kF32, DType::kBf16};

void StoreElement(DType dtype, float value, char* data, size_t i) {
  if (dtype == DType::kF32) {
    std::memcpy(data + 4 * i, &value, 4);
  } else {
    const bf16 rounded = FloatToBf16Even(value);
    std::memcpy(data + 2 * i, &rounded, 2);
  }
}

float LoadElement(DType dtype, const char* data, size_t i) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
  }
  bf16 value;
  std::memcpy(&value, data + 2 * i, 2);
  return Bf16ToFloat(value);
}

// What rank `rank` brings to operation `seed`: magnitudes far apart, so that
// the order of a sum shows in its bits; signed zeros, infinities of one sign
// and denormals among them.
std::vector<char> Input(uint64_t seed, int rank, DType dtype, size_t count) {
  testing::Random random(seed * 1000 + rank + 1);
  std::vector<char> data(count * DTypeBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    double value = std::ldexp(random.Normal(), random.Below(40) - 20);
    if (random.Below(50) == 0) value = -0.0;
    if (random.Below(50) == 0) value = 1e-41;
    if (random.Below(200) == 0) value = std::numeric_limits<double>::infinity();
    StoreElement(dtype, static_cast<float>(value), data.data(), i);
  }
  return data;
}

// The oracle: one element at a time, in rank order.
std::vector<char> Sum(uint64_t seed, int world_size, DType dtype,
                      size_t count) {
  std::vector<std::vector<char>> inputs;
  for (int rank = 0; rank < world_size; ++rank) {
    inputs.push_back(Input(seed, rank, dtype, count));
  }
  std::vector<char> sums(count * DTypeBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    float sum = LoadElement(dtype, inputs[0].data(), i);
    for (int rank = 1; rank < world_size; ++rank) {
      sum += LoadElement(dtype, inputs[rank].data(), i);
    }
    StoreElement(dtype, sum, sums.data(), i);
  }
  return sums;
}

absl::StatusOr<device::Buffer> OnDevice(RankContext& rank,
                                        const std::vector<char>& contents) {
  SDP_ASSIGN_OR_RETURN(device::Buffer buffer,
                       rank.device.Allocate("data", contents.size(),
                                            device::Memory::kPinnedHost));
  if (!contents.empty()) {
    std::memcpy(buffer.data(), contents.data(), contents.size());
  }
  return buffer;
}

absl::Status ExpectSame(const char* got, const char* want, size_t bytes,
                        absl::string_view what) {
  for (size_t i = 0; i < bytes; ++i) {
    if (got[i] != want[i]) {
      return absl::InternalError(
          absl::StrCat(what, ": byte ", i, " of ", bytes, " differs"));
    }
  }
  return absl::OkStatus();
}

// A seed that all ranks agree on.
class Seeds {
 public:
  uint64_t Next() { return ++last_; }

 private:
  uint64_t last_ = 0;
};

absl::Status CheckAllReduce(RankContext& rank, uint64_t seed, DType dtype,
                            size_t count) {
  const int world = rank.collective.world_size();
  SDP_ASSIGN_OR_RETURN(
      device::Buffer data,
      OnDevice(rank, Input(seed, rank.collective.rank(), dtype, count)));
  SDP_RETURN_IF_ERROR(
      rank.collective.AllReduce(data.data(), count, dtype, rank.stream));
  SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
  return ExpectSame(data.as<char>(), Sum(seed, world, dtype, count).data(),
                    data.bytes(), absl::StrCat("all-reduce of ", count));
}

absl::Status CheckReduce(RankContext& rank, uint64_t seed, DType dtype,
                         size_t count, int root) {
  const int world = rank.collective.world_size();
  const std::vector<char> input =
      Input(seed, rank.collective.rank(), dtype, count);
  SDP_ASSIGN_OR_RETURN(device::Buffer data, OnDevice(rank, input));
  SDP_RETURN_IF_ERROR(
      rank.collective.Reduce(data.data(), count, dtype, root, rank.stream));
  SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
  const std::vector<char> want =
      rank.collective.rank() == root ? Sum(seed, world, dtype, count) : input;
  return ExpectSame(data.as<char>(), want.data(), data.bytes(),
                    absl::StrCat("reduce of ", count, " to ", root));
}

absl::Status CheckReduceScatter(RankContext& rank, uint64_t seed, DType dtype,
                                size_t shard_count) {
  const int world = rank.collective.world_size();
  const size_t count = shard_count * world;
  SDP_ASSIGN_OR_RETURN(
      device::Buffer data,
      OnDevice(rank, Input(seed, rank.collective.rank(), dtype, count)));
  SDP_RETURN_IF_ERROR(rank.collective.ReduceScatter(data.data(), shard_count,
                                                    dtype, rank.stream));
  SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
  const size_t shard_bytes = shard_count * DTypeBytes(dtype);
  const size_t offset = rank.collective.rank() * shard_bytes;
  return ExpectSame(data.as<char>() + offset,
                    Sum(seed, world, dtype, count).data() + offset, shard_bytes,
                    absl::StrCat("reduce-scatter of ", shard_count));
}

absl::Status CheckAllGather(RankContext& rank, uint64_t seed,
                            size_t shard_bytes) {
  const int world = rank.collective.world_size();
  std::vector<char> want;
  for (int other = 0; other < world; ++other) {
    std::vector<char> shard(shard_bytes);
    testing::Random random(seed * 77 + other);
    for (char& byte : shard) byte = static_cast<char>(random.Next());
    want.insert(want.end(), shard.begin(), shard.end());
  }
  // Only this rank's shard is there.
  std::vector<char> input(want.size(), 'x');
  const size_t offset = rank.collective.rank() * shard_bytes;
  std::copy_n(want.begin() + offset, shard_bytes, input.begin() + offset);
  SDP_ASSIGN_OR_RETURN(device::Buffer data, OnDevice(rank, input));
  SDP_RETURN_IF_ERROR(
      rank.collective.AllGather(data.data(), shard_bytes, rank.stream));
  SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
  return ExpectSame(data.as<char>(), want.data(), want.size(),
                    absl::StrCat("all-gather of ", shard_bytes));
}

}  // namespace

std::vector<size_t> CollectiveContract::stagings() const {
  if (!std::get<0>(GetParam()).staged) return {0};
  return {std::begin(kStagings), std::end(kStagings)};
}

void CollectiveContract::Run(const RankSetup& setup, const RankBody& body) {
  const auto statuses = std::get<0>(GetParam()).run(setup, body);
  ASSERT_EQ(statuses.size(), static_cast<size_t>(setup.world_size));
  for (const absl::Status& status : statuses) EXPECT_THAT(status, IsOk());
}

std::string CollectiveContractName(
    const ::testing::TestParamInfo<CollectiveContract::ParamType>& info) {
  return absl::StrCat(std::get<0>(info.param).name, std::get<1>(info.param));
}

TEST_P(CollectiveContract, RanksAreNumbered) {
  std::atomic<uint64_t> seen{0};  // of threads; processes each see their own
  Run(WithStaging(64), [&](RankContext& rank) {
    const int r = rank.collective.rank();
    const bool fine = rank.collective.world_size() == world_size() && r >= 0 &&
                      r < world_size() &&
                      (seen.fetch_or(1u << r) & (1u << r)) == 0;
    return fine ? absl::OkStatus() : absl::InternalError("wrong rank");
  });
}

TEST_P(CollectiveContract, SumsAreThoseOfRankOrderBitForBit) {
  for (size_t staging : stagings()) {
    Run(WithStaging(staging), [&](RankContext& rank) {
      Seeds seeds;
      for (DType dtype : kDTypes) {
        for (size_t count : kCounts) {
          SDP_RETURN_IF_ERROR(CheckAllReduce(rank, seeds.Next(), dtype, count));
          SDP_RETURN_IF_ERROR(CheckReduce(
              rank, seeds.Next(), dtype, count,
              static_cast<int>(count % rank.collective.world_size())));
          SDP_RETURN_IF_ERROR(
              CheckReduceScatter(rank, seeds.Next(), dtype, count));
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(CollectiveContract, AllGatherDeliversEveryShard) {
  for (size_t staging : stagings()) {
    Run(WithStaging(staging), [&](RankContext& rank) {
      Seeds seeds;
      for (size_t bytes : kCounts) {
        SDP_RETURN_IF_ERROR(CheckAllGather(rank, seeds.Next(), bytes));
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(CollectiveContract, OperationsOnTheSameInputsAgree) {
  constexpr size_t kShard = 1234;
  Run(WithStaging(1000), [&](RankContext& rank) -> absl::Status {
    const int world = rank.collective.world_size();
    for (DType dtype : kDTypes) {
      const std::vector<char> input =
          Input(9, rank.collective.rank(), dtype, kShard * world);
      SDP_ASSIGN_OR_RETURN(device::Buffer a, OnDevice(rank, input));
      SDP_ASSIGN_OR_RETURN(device::Buffer b, OnDevice(rank, input));
      SDP_ASSIGN_OR_RETURN(device::Buffer c, OnDevice(rank, input));
      // Enqueued together: nothing waits in between.
      SDP_RETURN_IF_ERROR(rank.collective.AllReduce(a.data(), kShard * world,
                                                    dtype, rank.stream));
      SDP_RETURN_IF_ERROR(
          rank.collective.ReduceScatter(b.data(), kShard, dtype, rank.stream));
      SDP_RETURN_IF_ERROR(rank.collective.AllGather(
          b.data(), kShard * DTypeBytes(dtype), rank.stream));
      for (int root = 0; root < world; ++root) {
        // Each root takes its own copy; others' data stays the input.
        SDP_RETURN_IF_ERROR(rank.collective.Reduce(c.data(), kShard * world,
                                                   dtype, root, rank.stream));
        if (root == rank.collective.rank()) break;
      }
      for (int root = rank.collective.rank() + 1; root < world; ++root) {
        SDP_ASSIGN_OR_RETURN(device::Buffer spare, OnDevice(rank, input));
        SDP_RETURN_IF_ERROR(rank.collective.Reduce(spare.data(), kShard * world,
                                                   dtype, root, rank.stream));
        SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
      }
      SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
      SDP_RETURN_IF_ERROR(ExpectSame(b.as<char>(), a.as<char>(), a.bytes(),
                                     "reduce-scatter and all-gather"));
      SDP_RETURN_IF_ERROR(
          ExpectSame(c.as<char>(), a.as<char>(), a.bytes(), "reduce"));
    }
    return absl::OkStatus();
  });
}

TEST_P(CollectiveContract, ManyOperationsInFlightStayInOrder) {
  constexpr int kRounds = 60;
  Run(WithStaging(64), [&](RankContext& rank) -> absl::Status {
    const int world = rank.collective.world_size();
    SDP_ASSIGN_OR_RETURN(device::Buffer data,
                         OnDevice(rank, std::vector<char>(4 * 37)));
    for (size_t i = 0; i < 37; ++i) data.as<float>()[i] = 0x1p-100f;
    for (int round = 0; round < kRounds; ++round) {
      SDP_RETURN_IF_ERROR(
          rank.collective.AllReduce(data.data(), 37, DType::kF32, rank.stream));
      SDP_RETURN_IF_ERROR(rank.collective.Barrier(rank.stream));
      if (round % 20 == 19) {
        SDP_RETURN_IF_ERROR(rank.device.FillZero(data.data(), 4, rank.stream));
      }
    }
    SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
    const double want = 0x1p-100 * std::pow(world, kRounds);
    for (size_t i = 0; i < 37; ++i) {
      const float expected = i == 0 ? 0.0f : static_cast<float>(want);
      // Powers of 3 and 5 round on the way; exactness is the other tests' care.
      const float got = data.as<float>()[i];
      if (!(got == expected || std::fabs(got / expected - 1) < 1e-4)) {
        return absl::InternalError(absl::StrCat(i, " is ", got));
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CollectiveContract, BadArgumentsAreRefusedAtTheCall) {
  Run(WithStaging(64), [&](RankContext& rank) -> absl::Status {
    Collective& c = rank.collective;
    SDP_ASSIGN_OR_RETURN(device::Buffer data,
                         OnDevice(rank, std::vector<char>(4096)));
    const absl::Status refused[] = {
        c.AllReduce(nullptr, 1, DType::kF32, rank.stream),
        c.AllReduce(data.as<char>() + 2, 1, DType::kF32, rank.stream),
        c.AllReduce(data.as<char>() + 1, 1, DType::kBf16, rank.stream),
        c.AllReduce(data.data(), SIZE_MAX / 2, DType::kF32, rank.stream),
        c.Reduce(data.data(), 1, DType::kF32, c.world_size(), rank.stream),
        c.Reduce(data.data(), 1, DType::kF32, -1, rank.stream),
        c.ReduceScatter(nullptr, 1, DType::kF32, rank.stream),
        c.AllGather(nullptr, 1, rank.stream),
        c.AllGather(data.data(), SIZE_MAX, rank.stream),
    };
    for (const absl::Status& status : refused) {
      if (status.code() != absl::StatusCode::kInvalidArgument) {
        return absl::InternalError(
            absl::StrCat("not refused: ", status.ToString()));
      }
    }
    // Refused calls leave no trace: the ranks still agree.
    SDP_RETURN_IF_ERROR(
        c.AllReduce(data.data(), 1024, DType::kF32, rank.stream));
    return rank.device.Synchronize(rank.stream);
  });
}

}  // namespace slidedp::collective
