#include "common/shm/segment.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/common_shm/child_process.h"

namespace slidedp::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr SegmentKind kKinds[] = {
    SegmentKind::kParams,   SegmentKind::kState,   SegmentKind::kGrads,
    SegmentKind::kVersions, SegmentKind::kReports, SegmentKind::kExchange};

bool ReadOnlyForWorkers(SegmentKind kind) {
  return kind == SegmentKind::kParams || kind == SegmentKind::kVersions;
}

size_t FilesIn(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

std::string ProcPath(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

class SegmentTest : public ::testing::TestWithParam<SegmentKind> {
 protected:
  // An odd size that ends within a page.
  static constexpr uint64_t kBytes = 3 * kPageBytes + 17;

  Segment Make() {
    absl::StatusOr<Segment> segment =
        Segment::Create(GetParam(), kBytes, "job-7");
    EXPECT_THAT(segment, IsOk());
    return *std::move(segment);
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, SegmentTest, ::testing::ValuesIn(kKinds),
                         [](const auto& info) {
                           const absl::string_view name =
                               SegmentKindName(info.param);
                           return std::string(name.data(), name.size());
                         });

TEST_P(SegmentTest, IsZeroExactlySizedReservedAndPrivate) {
  const Segment segment = Make();
  EXPECT_EQ(segment.kind(), GetParam());
  EXPECT_EQ(segment.bytes(), kBytes);
  struct stat info;
  ASSERT_EQ(fstat(segment.fd(), &info), 0);
  EXPECT_EQ(static_cast<uint64_t>(info.st_size), kBytes);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kBytes);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  const char* data = segment.mapping().at<char>(0);
  EXPECT_TRUE(std::all_of(data, data + kBytes, [](char c) { return c == 0; }));
}

TEST_P(SegmentTest, SizeAndSealsAreFinal) {
  const Segment segment = Make();
  EXPECT_NE(ftruncate(segment.fd(), kBytes - 1), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(ftruncate(segment.fd(), kBytes + 1), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(errno, EPERM);
  const int seals = fcntl(segment.fd(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW),
            F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_EQ((seals & F_SEAL_FUTURE_WRITE) != 0, ReadOnlyForWorkers(GetParam()));
}

TEST_P(SegmentTest, NoNewWritableMappingWhereWorkersOnlyRead) {
  const Segment segment = Make();
  // Even through the daemon's own descriptor.
  const auto again =
      Mapping::Map(segment.fd(), kBytes, Access::kReadWrite, "again");
  if (ReadOnlyForWorkers(GetParam())) {
    EXPECT_THAT(again, StatusIs(absl::StatusCode::kPermissionDenied,
                                HasSubstr("again: mapping")));
    EXPECT_LT(write(segment.fd(), "x", 1), 0);
  } else {
    EXPECT_THAT(again, IsOk());
  }
}

TEST_P(SegmentTest, AWorkerProcessMayDoWhatItsKindSaysAndNoMore) {
  Segment segment = Make();
  if (GetParam() == SegmentKind::kState) {
    EXPECT_THAT(segment.WorkerFd(),
                StatusIs(absl::StatusCode::kPermissionDenied));
    return;
  }
  absl::StatusOr<UniqueFd> fd = segment.WorkerFd();
  ASSERT_THAT(fd, IsOk());
  EXPECT_EQ(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  const bool read_only = ReadOnlyForWorkers(GetParam());
  EXPECT_EQ(fcntl(fd->get(), F_GETFL) & O_ACCMODE,
            read_only ? O_RDONLY : O_RDWR);
  *segment.mapping().at<char>(kBytes - 1) = 'd';

  EXPECT_EQ(
      ExitCodeInChild([&] {
        auto reader =
            Mapping::Map(fd->get(), kBytes, Access::kReadOnly, "worker");
        if (!reader.ok()) return 1;
        if (*reader->at<char>(kBytes - 1) != 'd') return 2;
        auto writer =
            Mapping::Map(fd->get(), kBytes, Access::kReadWrite, "worker");
        if (writer.ok() == read_only) return 3;
        if (writer.ok()) *writer->at<char>(5) = 'w';
        if (read_only) {
          if (mprotect(reader->data(), kBytes, PROT_READ | PROT_WRITE) == 0) {
            return 4;
          }
          if (pwrite(fd->get(), "x", 1, 5) >= 0) return 5;
          if (fallocate(fd->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        0, kPageBytes) == 0) {
            return 6;
          }
        }
        if (ftruncate(fd->get(), 0) == 0) return 7;
        if (fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE) == 0) return 8;
        return 0;
      }),
      0);
  EXPECT_EQ(*segment.mapping().at<char>(5), read_only ? 0 : 'w');
  EXPECT_EQ(*segment.mapping().at<char>(kBytes - 1), 'd');
}

// In a child that has become user `uid`. /proc/self stays readable, so that
// only the mode of the file itself is in the way.
bool BecomeUser(uid_t uid) {
  return setgroups(0, nullptr) == 0 && setgid(uid) == 0 && setuid(uid) == 0 &&
         prctl(PR_SET_DUMPABLE, 1) == 0;
}

TEST_P(SegmentTest, AnotherUserCannotReopenItForWriting) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  if (GetParam() == SegmentKind::kState) return;  // never handed out
  const Segment segment = Make();
  const absl::StatusOr<UniqueFd> fd = segment.WorkerFd();
  ASSERT_THAT(fd, IsOk());
  // What the mode protects from: a plain memfd is 0777.
  UniqueFd plain(memfd_create("plain", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(plain.get(), 1), 0);
  ASSERT_EQ(fchmod(plain.get(), 0777), 0);
  UniqueFd plain_read_only(open(ProcPath(plain.get()).c_str(), O_RDONLY));

  EXPECT_EQ(ExitCodeInChild([&] {
              if (!BecomeUser(65534)) return 1;
              if (open(ProcPath(plain_read_only.get()).c_str(), O_RDWR) < 0) {
                return 2;
              }
              if (open(ProcPath(fd->get()).c_str(), O_RDWR) >= 0) return 3;
              if (errno != EACCES) return 4;
              if (open(ProcPath(fd->get()).c_str(), O_RDONLY) >= 0) return 5;
              if (!Mapping::Map(fd->get(), kBytes, Access::kReadOnly, "worker")
                       .ok()) {
                return 6;
              }
              return 0;
            }),
            0);
}

TEST_P(SegmentTest, LeavesNothingBehind) {
  const size_t open_files = FilesIn("/proc/self/fd");
  const size_t shared_memory = FilesIn("/dev/shm");
  {
    Segment a = Make();
    EXPECT_EQ(FilesIn("/dev/shm"), shared_memory);
    Segment b = std::move(a);
    EXPECT_EQ(a.bytes(), 0u);
    EXPECT_EQ(b.bytes(), kBytes);
    EXPECT_FALSE(a.WorkerFd().ok());
    b = Make();
  }
  EXPECT_EQ(FilesIn("/proc/self/fd"), open_files);
  EXPECT_EQ(FilesIn("/dev/shm"), shared_memory);
}

TEST(SegmentSizeTest, TooLargeIsRefusedBeforeAnyPageIsTaken) {
  const size_t open_files = FilesIn("/proc/self/fd");
  for (uint64_t bytes : {uint64_t{1} << 45, uint64_t{1} << 62}) {
    EXPECT_THAT(Segment::Create(SegmentKind::kParams, bytes, "job-7"),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("slidedp-params-job-7"),
                               HasSubstr(absl::StrCat(bytes, " bytes")),
                               HasSubstr("are left by"))));
  }
  EXPECT_EQ(FilesIn("/proc/self/fd"), open_files);
}

TEST(SegmentSizeTest, WhatThreadsReserveIsWholeAndZero) {
  // Not a multiple of what one thread takes at once, nor of a page.
  constexpr uint64_t kBytes = kGiB + 65 * kMiB + 5;
  absl::StatusOr<Segment> segment =
      Segment::Create(SegmentKind::kState, kBytes, "large");
  ASSERT_THAT(segment, IsOk());
  struct stat info;
  ASSERT_EQ(fstat(segment->fd(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kBytes);
  const char* data = segment->mapping().at<char>(0);
  for (uint64_t at = 0; at < kBytes; at += kPageBytes) ASSERT_EQ(data[at], 0);
  EXPECT_EQ(data[kBytes - 1], 0);
}

TEST(SegmentSizeTest, ImpossibleSizesAreRefused) {
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_THAT(Segment::Create(SegmentKind::kGrads, bytes, "job-7"),
                StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST(SegmentSizeTest, LongAndOddJobNamesWork) {
  EXPECT_THAT(Segment::Create(SegmentKind::kGrads, 1, std::string(4000, 'j')),
              IsOk());
  EXPECT_THAT(Segment::Create(SegmentKind::kGrads, 1, "../a b\n"), IsOk());
  EXPECT_THAT(Segment::Create(SegmentKind::kGrads, 1, ""), IsOk());
}

TEST(MappingTest, WrongSizeIsRefusedWithBothSizes) {
  const auto segment = Segment::Create(SegmentKind::kGrads, 5000, "job");
  ASSERT_THAT(segment, IsOk());
  for (uint64_t bytes : {0, 4999, 5001, 8192}) {
    EXPECT_THAT(
        Mapping::Map(segment->fd(), bytes, Access::kReadOnly, "grads"),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr(absl::StrCat("grads: the segment is 5000 bytes, "
                                        "not ",
                                        bytes))));
  }
}

TEST(MappingTest, NeedsARegularFile) {
  int raw[2];
  ASSERT_EQ(pipe(raw), 0);
  UniqueFd read_end(raw[0]), write_end(raw[1]);
  EXPECT_FALSE(Mapping::Map(raw[0], 10, Access::kReadOnly, "p").ok());
  EXPECT_FALSE(Mapping::Map(-1, 10, Access::kReadOnly, "p").ok());
}

TEST(MappingTest, OutlivesTheDescriptor) {
  Mapping mapping;
  EXPECT_EQ(mapping.data(), nullptr);
  EXPECT_EQ(mapping.bytes(), 0u);
  {
    const auto segment = Segment::Create(SegmentKind::kParams, 100, "job");
    *segment->mapping().at<int>(96) = 42;
    mapping = *Mapping::Map(segment->fd(), 100, Access::kReadOnly, "params");
  }
  EXPECT_EQ(*mapping.at<int>(96), 42);
}

}  // namespace
}  // namespace slidedp::shm
