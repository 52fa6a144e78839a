#include "common/base/fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>

#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TempFolder;

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

size_t FilesIn(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

TEST(UniqueFdTest, OwnsExactlyOneDescriptor) {
  int raw[2];
  ASSERT_EQ(pipe(raw), 0);
  {
    UniqueFd a(raw[0]);
    UniqueFd b(raw[1]);
    a = std::move(b);
    EXPECT_FALSE(IsOpen(raw[0]));
    EXPECT_EQ(a.get(), raw[1]);
    EXPECT_FALSE(b.valid());
    UniqueFd& same = a;
    a = std::move(same);
    EXPECT_TRUE(IsOpen(raw[1]));
  }
  EXPECT_FALSE(IsOpen(raw[1]));
}

TEST(FileTest, OpenedFilesCloseOnExecAndErrorsNameThePath) {
  TempFolder folder;
  const auto fd = OpenFile(folder.Write("a", "x"), O_RDONLY);
  ASSERT_THAT(fd, IsOk());
  EXPECT_EQ(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_THAT(
      OpenFile(folder.Sub("none"), O_RDONLY),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder.Sub("none"))));
}

TEST(FileTest, ReadsAndWritesExactRanges) {
  TempFolder folder;
  const auto fd = OpenFile(folder.Sub("a"), O_RDWR | O_CREAT);
  ASSERT_THAT(fd, IsOk());
  ASSERT_THAT(PwriteFully(fd->get(), "abcdefg", 7, 5, "a"), IsOk());
  EXPECT_EQ(*RegularFileBytes(fd->get(), "a"), 12u);
  char got[7];
  ASSERT_THAT(PreadFully(fd->get(), got, 7, 5, "a"), IsOk());
  EXPECT_EQ(std::string(got, 7), "abcdefg");
  ASSERT_THAT(PreadFully(fd->get(), got, 0, 100, "a"), IsOk());
}

TEST(FileTest, ShortFileIsAnErrorThatNamesTheEnd) {
  TempFolder folder;
  const auto fd = OpenFile(folder.Write("a", "abc"), O_RDONLY);
  char got[8];
  EXPECT_THAT(PreadFully(fd->get(), got, 8, 1, "weights"),
              StatusIs(absl::StatusCode::kOutOfRange,
                       HasSubstr("weights: ends at byte 3")));
}

TEST(FileTest, OffsetsBeyondAnyFileAreRefused) {
  TempFolder folder;
  const auto fd = OpenFile(folder.Write("a", "abc"), O_RDWR);
  char byte = 0;
  for (uint64_t offset : {uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_THAT(PreadFully(fd->get(), &byte, 1, offset, "a"),
                StatusIs(absl::StatusCode::kOutOfRange));
    EXPECT_THAT(PwriteFully(fd->get(), &byte, 1, offset, "a"),
                StatusIs(absl::StatusCode::kOutOfRange));
  }
}

TEST(FileTest, OnlyRegularFilesHaveASize) {
  int raw[2];
  ASSERT_EQ(pipe(raw), 0);
  UniqueFd read_end(raw[0]), write_end(raw[1]);
  EXPECT_THAT(RegularFileBytes(raw[0], "shard 3"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("shard 3: not a regular file")));
  EXPECT_THAT(ReadFile("/", 10), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(FileTest, ReadFileObeysItsLimit) {
  TempFolder folder;
  const std::string text(5000, 'q');
  const std::string path = folder.Write("a", text);
  EXPECT_EQ(*ReadFile(path, 5000), text);
  EXPECT_THAT(ReadFile(path, 4999),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4999")));
  EXPECT_EQ(*ReadFile(folder.Write("b", ""), 0), "");
}

TEST(FileTest, ReadFileReadsFilesThatSayTheyAreEmpty) {
  const auto text = ReadFile("/proc/self/status", 1 << 20);
  ASSERT_THAT(text, IsOk());
  EXPECT_THAT(*text, HasSubstr("Pid:"));
  EXPECT_THAT(ReadFile("/proc/self/status", 10),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(FileTest, AFifoDoesNotHangTheReader) {
  TempFolder folder;
  ASSERT_EQ(mkfifo(folder.Sub("fifo").c_str(), 0600), 0);
  EXPECT_THAT(ReadFile(folder.Sub("fifo"), 10),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(WriteFileAtomicallyTest, ReplacesTheWholeFileAndLeavesNothingElse) {
  TempFolder folder;
  const std::string path = folder.Write("state", std::string(10000, 'o'));
  ASSERT_THAT(WriteFileAtomically(path, "new"), IsOk());
  EXPECT_EQ(testing::ReadWhole(path), "new");
  ASSERT_THAT(WriteFileAtomically(folder.Sub("empty"), ""), IsOk());
  EXPECT_EQ(testing::ReadWhole(folder.Sub("empty")), "");
  EXPECT_EQ(FilesIn(folder.path()), 2u);
}

TEST(WriteFileAtomicallyTest, FailureLeavesTheOldFileAndNoTemporary) {
  TempFolder folder;
  // A folder in the place of the file: the rename fails, last of all.
  const std::string path = folder.Sub("taken");
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_FALSE(WriteFileAtomically(path, "new").ok());
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_EQ(FilesIn(folder.path()), 1u);
  EXPECT_THAT(WriteFileAtomically(folder.Sub("no/such"), "x"),
              StatusIs(absl::StatusCode::kNotFound));
}

TEST(WriteFileAtomicallyTest, AReaderWithTheOldFileOpenKeepsIt) {
  TempFolder folder;
  const std::string path = folder.Write("a", "old");
  const auto fd = OpenFile(path, O_RDONLY);
  ASSERT_THAT(WriteFileAtomically(path, "newer"), IsOk());
  char got[3];
  ASSERT_THAT(PreadFully(fd->get(), got, 3, 0, "a"), IsOk());
  EXPECT_EQ(std::string(got, 3), "old");
}

TEST(WriteFileAtomicallyTest, PlantedTemporaryIsNotFollowed) {
  TempFolder folder;
  const std::string victim = folder.Write("victim", "precious");
  const std::string path = folder.Sub("a");
  // Names that it may try first; each a link to somebody's file.
  for (int i = 0; i < 64; ++i) {
    const std::string name =
        path + ".tmp-" + std::to_string(getpid()) + "-" + std::to_string(i);
    ASSERT_EQ(symlink(victim.c_str(), name.c_str()), 0);
  }
  ASSERT_THAT(WriteFileAtomically(path, "mine"), IsOk());
  EXPECT_EQ(testing::ReadWhole(victim), "precious");
  EXPECT_EQ(testing::ReadWhole(path), "mine");
}

TEST(FsyncFolderTest, NeedsAFolder) {
  TempFolder folder;
  EXPECT_THAT(FsyncFolder(folder.path()), IsOk());
  EXPECT_FALSE(FsyncFolder(folder.Write("a", "")).ok());
}

}  // namespace
}  // namespace slidedp
