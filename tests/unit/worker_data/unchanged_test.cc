// A data file is known again by its checksum.
#include <iterator>
#include <set>

#include "gmock/gmock.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_data/dataset_fixture.h"
#include "worker/data/job_data.h"

namespace slidedp::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

TEST_F(DatasetTest, ChecksumTellsFilesOfTheSameSizeApart) {
  const RawDataset files[] = {
      {{1, 2, 3, 4}, {1, 1, 1, 1}, {0, 2, 4}, "documents"},
      {{1, 2, 3, 5}, {1, 1, 1, 1}, {0, 2, 4}, "documents"},
      {{1, 2, 3, 4}, {0, 1, 1, 1}, {0, 2, 4}, "documents"},
      {{1, 2, 3, 4}, {1, 1, 1, 1}, {0, 1, 4}, "documents"},
      {{1, 2, 3, 4}, {1, 1, 1, 1}, {0, 2, 4}, "stream"}};
  std::set<uint32_t> seen;
  for (const RawDataset& file : files) {
    const auto dataset = Open(file.Encode(), 2);
    ASSERT_TRUE(dataset.ok()) << dataset.status();
    seen.insert(dataset->crc32c());
  }
  EXPECT_EQ(seen.size(), std::size(files));
  EXPECT_TRUE(seen.contains(Open(files[0].Encode(), 3)->crc32c()));
}

TEST_F(DatasetTest, ChangedFilesAreNamedByWhatChanged) {
  const auto dataset = Open(CountingStream(11).Encode(), 4);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  const Submitted same = {2, 11, dataset->crc32c()};
  EXPECT_OK(CheckUnchanged(*dataset, same));
  Submitted other = same;
  other.sequences = 3;
  EXPECT_THAT(CheckUnchanged(*dataset, other),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(path_), HasSubstr("sequences = 2"),
                             HasSubstr("was 3"))));
  other = same;
  other.tokens = 12;
  EXPECT_THAT(
      CheckUnchanged(*dataset, other),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tokens = 11")));
  other = same;
  ++other.crc32c;
  EXPECT_THAT(
      CheckUnchanged(*dataset, other),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("checksum"), HasSubstr("submit again"))));
}

}  // namespace
}  // namespace slidedp::data
