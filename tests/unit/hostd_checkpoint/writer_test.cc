// What is written: a Hugging Face model and the rest of the state, to the bit.
#include "hostd/checkpoint/writer.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <vector>

#include "tests/unit/hostd_checkpoint/state_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::ElementsAre;
using testing::StatusIs;
using ::testing::UnorderedElementsAreArray;

class WriterTest : public StateTest {};

std::vector<testing::TinyModelOptions> Models() {
  std::vector<testing::TinyModelOptions> all(6);
  all[1].tied = true;
  all[2].tied = all[2].extra_head = true;
  all[3].dtype = model::DType::kF32;
  all[4].shards = 3;
  all[5].dtype = model::DType::kF16;
  all[5].unaligned = true;
  return all;
}

TEST_F(WriterTest, ComesBackBitForBitWhateverTheModelsFiles) {
  uint64_t step = 10;
  for (const testing::TinyModelOptions& options : Models()) {
    for (int threads : {1, 3}) {
      std::filesystem::remove_all(folder_.Sub("model"));
      MakeModel(options);
      ASSERT_OK(Save(++step, RealDiskCalls(), threads));
      HostState& other = Other();
      const auto manifest = Load(PathOf(step), other);
      ASSERT_OK(manifest);
      EXPECT_EQ(manifest->step, step);
      EXPECT_EQ(manifest->updates, step - 1);
      EXPECT_TRUE(BytesOf(other) == BytesOf(*state_));
    }
  }
}

TEST_F(WriterTest, IsAModelFolderWithTheSourcesTensorsInBf16) {
  uint64_t step = 10;
  for (const testing::TinyModelOptions& options : Models()) {
    std::filesystem::remove_all(folder_.Sub("model"));
    MakeModel(options);
    ASSERT_OK(Save(++step));
    const auto written = model::OpenModelFolder(PathOf(step));
    ASSERT_OK(written);
    ASSERT_EQ(written->files().size(), source_->files().size());
    ASSERT_OK(model::ValidateSource(layout_, *written));
    for (const model::SourceFile& file : source_->files()) {
      for (const model::TensorEntry& entry : file.header.tensors) {
        const auto ref = written->Find(entry.name);
        ASSERT_NE(ref.entry, nullptr);
        EXPECT_EQ(ref.file->name, file.name);
        EXPECT_EQ(ref.entry->shape, entry.shape);
        EXPECT_EQ(ref.entry->dtype, model::DType::kBf16);
      }
    }
    // Its weights are the hi plane.
    const auto reloaded = NewState();
    ASSERT_OK(LoadParameters(*written, *reloaded));
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const int unit = static_cast<int>(u);
      for (const model::Tensor& tensor : layout_.units[u].tensors) {
        EXPECT_EQ(
            std::memcmp(reloaded->planes(unit, tensor.offset, tensor.count).hi,
                        state_->planes(unit, tensor.offset, tensor.count).hi,
                        2 * tensor.count),
            0);
      }
    }
  }
}

TEST_F(WriterTest, UnitsAreSavedOnceEachInTheOrderOfTheirUpdates) {
  testing::TinyModelOptions options;
  options.layers = 3;
  MakeModel(options);
  EXPECT_THAT(SaveOrder(layout_, policy::UpdateMode::kEager),
              ElementsAre(0, 4, 3, 2, 1));
  EXPECT_THAT(SaveOrder(layout_, policy::UpdateMode::kSpeculative),
              ElementsAre(0, 4, 3, 2, 1));
  EXPECT_THAT(SaveOrder(layout_, policy::UpdateMode::kDeferred),
              ElementsAre(0, 1, 2, 3, 4));
  for (int threads : {1, 3}) {
    auto made = checkpoint::NewCheckpoint::Create(
        Checkpoints(), threads, folder_.Sub("model"), files_, "job-1");
    ASSERT_OK(made);
    std::vector<int> fds, saved;
    for (const UniqueFd& fd : (*made)->fds()) fds.push_back(fd.get());
    std::mutex mutex;
    WriteOptions write;
    write.threads = threads;
    write.unit_order = SaveOrder(layout_, policy::UpdateMode::kEager);
    // Once told, the unit's planes may become anything.
    const std::string before = BytesOf(*state_);
    write.unit_saved = [&](int unit) {
      const PlaneSpan p = state_->planes(unit, 0, layout_.units[unit].count);
      std::fill_n(p.hi, p.count, 0x7fc0);
      std::fill_n(p.v, p.count, -1.0f);
      std::lock_guard lock(mutex);
      saved.push_back(unit);
    };
    const auto crcs = WriteCheckpoint(files_, *source_, *state_, fds, write);
    ASSERT_OK(crcs);
    if (threads == 1) {
      EXPECT_THAT(saved, ElementsAre(0, 4, 3, 2, 1));
    } else {
      EXPECT_THAT(saved, UnorderedElementsAreArray({0, 4, 3, 2, 1}));
    }
    checkpoint::Manifest manifest;
    manifest.step = threads;
    manifest.layout_hash = checkpoint::PlanesHash(layout_);
    manifest.sampler = Sampler();
    for (size_t i = 0; i < files_.size(); ++i) {
      manifest.files.push_back({files_[i].name, files_[i].bytes, (*crcs)[i]});
    }
    ASSERT_OK((*made)->Commit(manifest));
    HostState& other = Other();
    ASSERT_OK(Load(PathOf(threads), other));
    EXPECT_TRUE(BytesOf(other) == before);
    state_ = NewState();
    ASSERT_OK(LoadParameters(*source_, *state_));
    Train(2);
  }
}

TEST_F(WriterTest, StopsWhenToldTo) {
  MakeModel({});
  auto made = checkpoint::NewCheckpoint::Create(
      Checkpoints(), 1, folder_.Sub("model"), files_, "job-1");
  ASSERT_OK(made);
  std::vector<int> fds;
  for (const UniqueFd& fd : (*made)->fds()) fds.push_back(fd.get());
  std::atomic<bool> stop = false;
  WriteOptions write;
  write.unit_order = SaveOrder(layout_, policy::UpdateMode::kEager);
  write.unit_saved = [&](int) { stop = true; };
  write.stop = &stop;
  EXPECT_THAT(WriteCheckpoint(files_, *source_, *state_, fds, write),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
}

}  // namespace
}  // namespace slidedp::hostd
