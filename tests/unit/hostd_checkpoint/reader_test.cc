// Damaged and hostile checkpoints are refused, and the file is named.
#include "hostd/checkpoint/reader.h"

#include <sys/stat.h>

#include <limits>
#include <random>

#include "common/base/crc32c.h"
#include "tests/unit/hostd_checkpoint/state_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::StatusIs;

class ReaderTest : public StateTest {
 protected:
  ReaderTest() {
    testing::TinyModelOptions options;
    options.shards = 2;
    MakeModel(options);
    SDP_CHECK(Save(10).ok(), "save");
  }
  // Writes a byte at `offset` of the file anew.
  void Put(const std::string& name, uint64_t offset, char value) const {
    UniqueFd fd = *OpenFile(PathOf(10) + "/" + name, O_RDWR);
    SDP_CHECK(pwrite(fd.get(), &value, 1, static_cast<off_t>(offset)) == 1,
              "pwrite");
  }
  char At(const std::string& name, uint64_t offset) const {
    UniqueFd fd = *OpenFile(PathOf(10) + "/" + name, O_RDONLY);
    char value;
    SDP_CHECK(pread(fd.get(), &value, 1, static_cast<off_t>(offset)) == 1,
              "pread");
    return value;
  }
  // The manifest says what the files hold now.
  void Forge() const {
    const std::string path = PathOf(10);
    checkpoint::Manifest manifest = *checkpoint::ReadManifest(path);
    for (checkpoint::FileEntry& entry : manifest.files) {
      const std::string bytes = testing::ReadWhole(path + "/" + entry.name);
      entry.crc32c = Crc32c(0, bytes.data(), bytes.size());
    }
    folder_.Write("checkpoints/step-00000010/manifest.json",
                  checkpoint::ToJson(manifest));
  }
};

TEST_F(ReaderTest, AnyFlippedBitOfAnyFileNamesTheFile) {
  std::mt19937_64 random(5);
  for (const checkpoint::File& file : files_) {
    std::vector<uint64_t> offsets = {0, 9, file.header.size() - 1,
                                     file.header.size(), file.bytes - 1};
    for (int i = 0; i < 5; ++i) offsets.push_back(random() % file.bytes);
    for (uint64_t offset : offsets) {
      const char good = At(file.name, offset);
      Put(file.name, offset, static_cast<char>(good ^ (1 << random() % 8)));
      HostState& other = Other();
      EXPECT_THAT(std::string(Load(PathOf(10), other).status().message()),
                  HasSubstr(file.name))
          << offset;
      Put(file.name, offset, good);
    }
  }
  HostState& other = Other();
  EXPECT_OK(Load(PathOf(10), other));
}

TEST_F(ReaderTest, TornFilesAreNamed) {
  for (const checkpoint::File& file : files_) {
    const std::string path = PathOf(10) + "/" + file.name;
    const std::string good = testing::ReadWhole(path);
    for (uint64_t bytes : {uint64_t{0}, file.bytes / 2, file.bytes - 1}) {
      ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(bytes)), 0);
      // Of the right size again, but with a hole: blocks that never reached
      // the disk.
      if (bytes > 0) {
        ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(file.bytes)), 0);
      }
      HostState& other = Other();
      EXPECT_THAT(std::string(Load(PathOf(10), other).status().message()),
                  HasSubstr(file.name));
      folder_.Write("checkpoints/step-00000010/" + file.name, good);
    }
  }
}

TEST_F(ReaderTest, ValuesThatNoUpdateLeavesAreRefusedWhateverTheChecksums) {
  const std::string state = checkpoint::StateFileName(1);
  const checkpoint::File& file =
      files_[files_.size() - layout_.units.size() + 1];
  ASSERT_EQ(file.name, state);
  const uint64_t lo = file.extents[1].begin, m = file.extents[2].begin,
                 v = file.extents[3].begin;
  struct Case {
    uint64_t offset;
    std::vector<unsigned char> bytes;
  };
  for (const Case& c : {Case{m, {0, 0, 0xc0, 0x7f}},     // NaN
                        Case{v, {0, 0, 0x80, 0x7f}},     // infinity
                        Case{v, {0, 0, 0x80, 0xbf}}}) {  // -1
    std::vector<char> good;
    for (size_t i = 0; i < c.bytes.size(); ++i) {
      good.push_back(At(state, c.offset + i));
      Put(state, c.offset + i, static_cast<char>(c.bytes[i]));
    }
    Forge();
    HostState& other = Other();
    EXPECT_THAT(Load(PathOf(10), other).status(),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(state), HasSubstr("model.layers.0"))));
    for (size_t i = 0; i < good.size(); ++i) {
      Put(state, c.offset + i, good[i]);
    }
  }
  // A weight that is not what its upper half was rounded from: -0x8000 below
  // zero makes a NaN.
  const checkpoint::File& weights = files_[0];
  for (const checkpoint::Extent& extent : weights.extents) {
    if (extent.unit != 1 || extent.first != 0) continue;
    Put(weights.name, extent.begin, 0);
    Put(weights.name, extent.begin + 1, 0);
    Put(state, lo, 0);
    Put(state, lo + 1, static_cast<char>(0x80));
    Forge();
    HostState& other = Other();
    EXPECT_THAT(Load(PathOf(10), other).status(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(state)));
  }
}

TEST_F(ReaderTest, AnotherModelsCheckpointIsRefused) {
  testing::TinyModelOptions options;
  options.layers = 3;
  std::filesystem::remove_all(folder_.Sub("model"));
  MakeModel(options);
  HostState& other = Other();
  EXPECT_FALSE(Load(PathOf(10), other).ok());
}

TEST_F(ReaderTest, DescriptorsThatAreNotTheFilesAreRefused) {
  HostState& other = Other();
  EXPECT_THAT(
      LoadCheckpoint({}, {Sampler(), 1000}, other).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("manifest.json")));
  std::vector<std::pair<std::string, UniqueFd>> files;
  files.emplace_back(checkpoint::kManifestFile,
                     *OpenFile(PathOf(10) + "/manifest.json", O_RDONLY));
  files.emplace_back("model.safetensors", *OpenFile("/dev/null", O_RDONLY));
  EXPECT_FALSE(LoadCheckpoint(std::move(files), {Sampler(), 1000}, other).ok());
}

}  // namespace
}  // namespace slidedp::hostd
