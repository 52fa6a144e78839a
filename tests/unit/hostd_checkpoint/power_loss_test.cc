// The power fails after any call that changes the disk, and what was not synced
// may be lost in any way: a visible checkpoint is whole, one that was told of
// is there, and so is the one before.
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/lossy_disk.h"
#include "tests/unit/hostd_checkpoint/state_fixture.h"

namespace slidedp::hostd {
namespace {

using testing::LossyDisk;
using Tree = LossyDisk::Tree;

constexpr char kCheckpoints[] = "checkpoints/";

class PowerLossTest : public StateTest {
 protected:
  PowerLossTest() : StateTest(testing::TempFolder::MemoryFolder()) {
    root_ = folder_.Sub("disk");
    std::filesystem::create_directory(root_);
    testing::TinyModelOptions options;
    options.layers = 1;
    options.hidden = 32;
    options.vocab = 64;
    options.shards = 2;  // with an index
    MakeModel(options);
  }
  void TrainTo(uint64_t step) {
    Train(static_cast<uint32_t>(step));
    bytes_[step] = BytesOf(*state_);
  }
  // Visible folders of checkpoints, each with what is in it.
  static std::map<std::string, Tree> Visible(const Tree& tree) {
    std::map<std::string, Tree> visible;
    for (const auto& [path, bytes] : tree) {
      if (!absl::StartsWith(path, absl::StrCat(kCheckpoints, "step-")))
        continue;
      const std::string below = path.substr(sizeof(kCheckpoints) - 1);
      const size_t slash = below.find('/');
      Tree& in = visible[below.substr(0, slash)];
      if (slash + 1 < below.size()) in[below.substr(slash + 1)] = bytes;
    }
    return visible;
  }
  absl::Status LoadTree(const std::string& name, const Tree& tree) {
    const std::string path = folder_.Sub("look/" + name);
    testing::WriteTree(tree, path);
    HostState& other = Other();
    SDP_RETURN_IF_ERROR(Load(path, other).status());
    return BytesOf(other) == bytes_[std::stoull(name.substr(5))]
               ? absl::OkStatus()
               : absl::InternalError("loads, and is not what was saved");
  }
  // The steps that can be seen: all of them whole.
  std::set<uint64_t> ExpectWhole(const Tree& tree, const std::string& where) {
    std::set<uint64_t> steps;
    for (const auto& [name, in] : Visible(tree)) {
      steps.insert(std::stoull(name.substr(5)));
      if (whole_.contains(in)) continue;
      EXPECT_OK(LoadTree(name, in)) << where << ": " << name;
      whole_.insert(in);  // told of once
    }
    return steps;
  }
  // What a job that is back does next.
  void ExpectGoesOn(const Tree& tree, const std::string& where) {
    const std::string before = std::exchange(root_, folder_.Sub("again"));
    testing::WriteTree(tree, root_);
    if (!std::filesystem::exists(PathOf(30))) {
      ASSERT_OK(Commit(30, RealDiskCalls())) << where;
    }
    ASSERT_OK(checkpoint::Prune(Checkpoints(), 2)) << where;
    std::set<std::string> names;
    for (const auto& entry :
         std::filesystem::directory_iterator(Checkpoints())) {
      names.insert(entry.path().filename());
    }
    EXPECT_EQ(names, (std::set<std::string>{"step-00000020", "step-00000030"}))
        << where;
    root_ = before;
  }

  std::map<uint64_t, std::string> bytes_;
  std::set<Tree> whole_;
};

TEST_F(PowerLossTest, BesideOlderOnes) {
  for (uint64_t step : {10, 20}) {
    TrainTo(step);
    ASSERT_OK(Save(step));
  }
  TrainTo(30);
  LossyDisk disk(root_);
  ASSERT_OK(Commit(30, disk));
  const size_t committed = disk.calls();
  ASSERT_OK(checkpoint::Prune(Checkpoints(), 2, disk));
  ASSERT_FALSE(std::filesystem::exists(PathOf(10)));
  size_t states = 0;
  for (size_t calls = 0; calls <= disk.calls(); ++calls) {
    const auto remains = disk.Remains(calls, static_cast<uint32_t>(calls));
    states += remains.size();
    for (size_t i = 0; i < remains.size(); ++i) {
      const auto& [tree, where] = remains[i];
      const std::set<uint64_t> steps = ExpectWhole(tree, where);
      EXPECT_TRUE(steps.contains(20)) << where;
      EXPECT_TRUE(steps.contains(30) || calls < committed) << where;
      EXPECT_TRUE(steps.contains(10) || calls > committed) << where;
      if (i < 3) ExpectGoesOn(tree, where);
    }
  }
  EXPECT_GT(committed, 30u);
  EXPECT_GT(states, 300u);
}

TEST_F(PowerLossTest, TheFirstOfItsFolder) {
  TrainTo(10);
  LossyDisk disk(root_);
  ASSERT_OK(Commit(10, disk));
  for (size_t calls = 0; calls <= disk.calls(); ++calls) {
    for (const auto& [tree, where] :
         disk.Remains(calls, static_cast<uint32_t>(calls))) {
      const std::set<uint64_t> steps = ExpectWhole(tree, where);
      EXPECT_TRUE(steps.contains(10) || calls < disk.calls()) << where;
    }
  }
}

// A job goes on from step 20: what is set aside must not come back as its own.
TEST_F(PowerLossTest, SetAside) {
  for (uint64_t step : {10, 20, 30}) {
    TrainTo(step);
    ASSERT_OK(Commit(step, RealDiskCalls()));
  }
  LossyDisk disk(root_);
  ASSERT_OK(checkpoint::SetAside(Checkpoints(), 20, disk));
  for (size_t calls = 0; calls <= disk.calls(); ++calls) {
    for (const auto& [tree, where] : disk.Remains(calls, 1)) {
      const std::set<uint64_t> steps = ExpectWhole(tree, where);
      EXPECT_TRUE(steps.contains(20)) << where;
      EXPECT_NE(steps.contains(30),
                tree.contains("checkpoints/aside-step-00000030/manifest.json"))
          << where;
      EXPECT_FALSE(steps.contains(30) && calls == disk.calls()) << where;
    }
  }
}

// A disk that lies about its syncs can show a checkpoint that is not whole.
// None is taken for one: it is refused, and what is wrong is named.
TEST_F(PowerLossTest, DisksThatDoNotSync) {
  TrainTo(20);
  ASSERT_OK(Save(20));
  TrainTo(30);
  LossyDisk disk(root_);
  ASSERT_OK(Commit(30, disk));
  int refused = 0, whole = 0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    for (const auto& [tree, where] : disk.RemainsOfLies(seed)) {
      const std::map<std::string, Tree> visible = Visible(tree);
      ASSERT_TRUE(visible.contains("step-00000020")) << where;
      const auto it = visible.find("step-00000030");
      if (it == visible.end()) continue;
      const absl::Status status = LoadTree(it->first, it->second);
      whole += status.ok();
      if (status.ok()) continue;
      ++refused;
      bool named = absl::StrContains(status.message(), "manifest.json");
      for (const auto& entry :
           std::filesystem::directory_iterator(PathOf(30))) {
        named |= absl::StrContains(status.message(),
                                   entry.path().filename().string());
      }
      EXPECT_TRUE(named) << where << ": " << status;
      EXPECT_FALSE(absl::IsInternal(status)) << where << ": " << status;
    }
  }
  EXPECT_GT(refused, 20);
  EXPECT_GT(whole, 0);
}

}  // namespace
}  // namespace slidedp::hostd
