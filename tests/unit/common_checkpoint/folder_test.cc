#include "common/checkpoint/folder.h"

#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::StatusIs;

class FolderTest : public ::testing::Test {
 protected:
  FolderTest() { testing::WriteTinyModel(folder_.Sub("model"), {}); }

  std::string Checkpoints() const { return folder_.Sub("checkpoints"); }
  // Files of four bytes each.
  static std::vector<File> Files() {
    std::vector<File> files(2);
    files[0].name = "model.safetensors";
    files[1].name = "state-00000.safetensors";
    for (File& file : files) {
      file.header = "head";
      file.bytes = 4;
    }
    return files;
  }
  absl::StatusOr<std::string> Make(uint64_t step) {
    const std::vector<File> files = Files();
    auto made = NewCheckpoint::Create(Checkpoints(), step, folder_.Sub("model"),
                                      files, "job-1");
    if (!made.ok()) return made.status();
    Manifest manifest;
    manifest.step = step;
    for (size_t i = 0; i < files.size(); ++i) {
      SDP_RETURN_IF_ERROR(
          PwriteFully((*made)->fds()[i].get(), "head", 4, 0, "test"));
      manifest.files.push_back({files[i].name, 4, 0x2d7ab4f4});
    }
    SDP_RETURN_IF_ERROR((*made)->Commit(manifest));
    return (*made)->path();
  }
  std::set<std::string> Names(const std::string& path) const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  std::vector<uint64_t> Steps() const {
    std::vector<uint64_t> steps;
    const auto all = *List(Checkpoints());
    for (const Found& found : all) steps.push_back(found.step);
    return steps;
  }

  testing::TempFolder folder_;
};

TEST_F(FolderTest, HoldsTheModelsFilesAndItsOwn) {
  absl::StatusOr<std::string> path = Make(100);
  ASSERT_OK(path);
  EXPECT_EQ(*path, folder_.Sub("checkpoints/step-00000100"));
  absl::StatusOr<Manifest> manifest = ReadManifest(*path);
  ASSERT_OK(manifest);
  std::set<std::string> listed = {kManifestFile};
  for (const FileEntry& entry : manifest->files) listed.insert(entry.name);
  EXPECT_EQ(Names(*path), listed);
  EXPECT_TRUE(listed.contains("config.json"));
  EXPECT_TRUE(listed.contains("tokenizer.json"));
  for (const FileEntry& entry : manifest->files) {
    if (entry.name == "config.json") EXPECT_OK(CheckChecksum(*path, entry));
  }
}

TEST_F(FolderTest, ListsTheNewestFirstAndOnlyWhatIsComplete) {
  EXPECT_THAT(Steps(), IsEmpty());
  for (uint64_t step : {9, 100, 20, 123456789}) ASSERT_OK(Make(step));
  std::filesystem::create_directory(folder_.Sub("checkpoints/step-00000300"));
  std::filesystem::create_directory(folder_.Sub("checkpoints/step-5"));
  folder_.Write("checkpoints/step-5/manifest.json", "{}");
  EXPECT_THAT(Steps(), ElementsAre(123456789, 100, 20, 9));
}

TEST_F(FolderTest, PruneKeepsTheNewestAndWhatIsNotOurs) {
  for (uint64_t step : {10, 20, 30}) ASSERT_OK(Make(step));
  // Left by a killed process, and held by a living one.
  std::filesystem::create_directory(
      folder_.Sub("checkpoints/.step-00000040.tmp-job-7"));
  folder_.Write("checkpoints/.step-00000040.tmp-job-7/x", "x");
  const std::string held = folder_.Sub("checkpoints/.step-00000050.tmp-job-8");
  std::filesystem::create_directory(held);
  UniqueFd lock = *OpenFile(held, O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  folder_.Write("checkpoints/notes.txt", "mine");
  EXPECT_OK(Prune(Checkpoints(), 2));
  EXPECT_EQ(Names(Checkpoints()),
            (std::set<std::string>{"step-00000030", "step-00000020",
                                   "notes.txt", ".step-00000050.tmp-job-8"}));
}

TEST_F(FolderTest, SetAsideHidesLaterOnesAndLosesNone) {
  for (uint64_t step : {10, 20, 30}) ASSERT_OK(Make(step));
  ASSERT_OK(SetAside(Checkpoints(), 20));
  EXPECT_THAT(Steps(), ElementsAre(20, 10));
  ASSERT_OK(Make(30));
  absl::StatusOr<std::vector<std::string>> aside = SetAside(Checkpoints(), 10);
  ASSERT_OK(aside);
  EXPECT_THAT(*aside,
              ElementsAre(folder_.Sub("checkpoints/aside-step-00000030.1"),
                          folder_.Sub("checkpoints/aside-step-00000020")));
  EXPECT_TRUE(std::filesystem::exists(
      folder_.Sub("checkpoints/aside-step-00000030/manifest.json")));
}

TEST_F(FolderTest, AnExistingOneIsNotReplaced) {
  ASSERT_OK(Make(10));
  EXPECT_THAT(Make(10), StatusIs(absl::StatusCode::kAlreadyExists,
                                 HasSubstr("step-00000010")));
  EXPECT_THAT(Names(Checkpoints()), ElementsAre("step-00000010"));
}

TEST_F(FolderTest, TooLittleSpaceIsSeenBeforeAnythingIsMade) {
  std::vector<File> files = Files();
  files[0].bytes = uint64_t{1} << 60;
  EXPECT_THAT(NewCheckpoint::Create(Checkpoints(), 10, folder_.Sub("model"),
                                    files, "job-1"),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("a checkpoint takes")));
  EXPECT_THAT(Names(Checkpoints()), IsEmpty());
}

TEST_F(FolderTest, MissingAndShortFilesAreNamed) {
  const std::string path = *Make(10);
  const std::string state = path + "/state-00000.safetensors";
  ASSERT_EQ(truncate(state.c_str(), 3), 0);
  EXPECT_THAT(ReadManifest(path),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("state-00000.safetensors: has 3 bytes")));
  std::filesystem::remove(state);
  EXPECT_THAT(ReadManifest(path),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("state-00000.safetensors")));
  std::filesystem::remove(path + "/manifest.json");
  EXPECT_THAT(ReadManifest(path),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("holds no manifest.json")));
}

}  // namespace
}  // namespace slidedp::checkpoint
