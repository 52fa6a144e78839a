// slidedp-bench-host at a size that takes a moment.
#include "tests/bench/host_bench.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::bench {
namespace {

class HostBenchTest : public ::testing::Test {
 protected:
  HostBenchTest() {
    options_.unit = {1024, 512};
    options_.contending_threads = 2;
    options_.chunk_bytes = 1000 * 256;  // does not divide the unit
    options_.repeats = 1;
    options_.machine.device = "cpu";
    options_.origin.json_file = folder_.Sub("results.jsonl");
  }
  std::vector<Json> Lines() {
    std::vector<Json> lines;
    std::ifstream file(options_.origin.json_file);
    for (std::string line; std::getline(file, line);) {
      lines.push_back(Json::parse(line));
    }
    return lines;
  }

  testing::TempFolder folder_;
  HostOptions options_;
};

TEST_F(HostBenchTest, TheDefaultUnitHas800MillionParameters) {
  const UnitOptions o;
  const int64_t h = o.hidden;
  const int64_t parameters =
      h * (h + 2 * 1024) + h * h + 3 * h * o.intermediate + 2 * h;
  EXPECT_NEAR(static_cast<double>(parameters), 800e6, 1e6);
}

// Threads share the work: every element moves once.
TEST_F(HostBenchTest, UpdateMovesEveryElementWhateverTheThreads) {
  std::vector<std::vector<bf16>> results;
  for (int threads : {1, 3}) {
    ASSERT_OK_AND_ASSIGN(auto unit, HostUnit::Create(options_.unit, 1));
    unit->Update(threads);
    results.emplace_back(unit->hi(), unit->hi() + unit->parameters());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(HostBenchTest, DeliveriesAreMeasuredAloneAndBesideAnUpdate) {
  ASSERT_OK_AND_ASSIGN(auto unit, HostUnit::Create(options_.unit, 2));
  ASSERT_OK(BenchDelivery(options_, *unit));
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(lines[0]["bench"], "delivery-800m");
  EXPECT_EQ(lines[1]["bench"], "delivery-800m-contended");
  const Json& detail = lines[0]["detail"];
  EXPECT_DOUBLE_EQ(
      lines[0]["value"],
      detail["gigabytes_per_second_each"].get<double>() /
          detail["pinned_gigabytes_per_second_each"].get<double>());
  EXPECT_DOUBLE_EQ(
      lines[1]["value"],
      detail["gigabytes_per_second_each"].get<double>() /
          detail["contended_gigabytes_per_second_each"].get<double>());
  EXPECT_GT(detail["updates_per_second_alone"].get<double>(), 0);
}

}  // namespace
}  // namespace slidedp::bench
