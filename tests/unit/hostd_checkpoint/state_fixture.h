// A tiny model's state with moments, and its checkpoints.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/checkpoint/reader.h"
#include "hostd/checkpoint/writer.h"
#include "hostd/store/split.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::hostd {

// All planes' bytes, padding included.
inline std::string BytesOf(const HostState& state) {
  std::string bytes;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    const PlaneSpan p =
        state.planes(static_cast<int>(u), 0, state.layout().units[u].count);
    bytes.append(reinterpret_cast<const char*>(p.hi), 2 * p.count);
    bytes.append(reinterpret_cast<const char*>(p.lo), 2 * p.count);
    bytes.append(reinterpret_cast<const char*>(p.m), 4 * p.count);
    bytes.append(reinterpret_cast<const char*>(p.v), 4 * p.count);
  }
  return bytes;
}

class StateTest : public ::testing::Test {
 protected:
  explicit StateTest(
      const std::string& base = testing::TempFolder::DiskFolder())
      : folder_(base), root_(folder_.path()) {}

  void MakeModel(const testing::TinyModelOptions& options) {
    testing::WriteTinyModel(folder_.Sub("model"), options);
    layout_ = model::MakeStateLayout(testing::TinyConfig(options));
    auto source = model::OpenModelFolder(folder_.Sub("model"));
    SDP_CHECK(source.ok(), source.status().ToString());
    source_ = std::make_unique<model::TensorSource>(*std::move(source));
    files_ = *checkpoint::MakeFiles(layout_, *source_);
    state_ = NewState();
    other_ = nullptr;
    SDP_CHECK(LoadParameters(*source_, *state_).ok(), "load");
    Train(1);
  }
  std::unique_ptr<HostState> NewState() const {
    policy::Plan plan;
    plan.ranks = 1;
    plan.d2h_chunk_bytes = plan.h2d_chunk_bytes = 4096;
    plan.ring_chunks = 4;
    plan.update_threads = 2;
    auto state = HostState::Create("test", layout_, plan);
    SDP_CHECK(state.ok(), state.status().ToString());
    return *std::move(state);
  }
  // A state to load into, made once, as its segments are large beside what is
  // in them: full of garbage each time.
  HostState& Other() {
    if (other_ == nullptr) other_ = NewState();
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const PlaneSpan p =
          other_->planes(static_cast<int>(u), 0, layout_.units[u].count);
      std::memset(p.lo, 0x55, 2 * p.count);
      std::memset(p.m, 0x55, 4 * p.count);
      std::memset(p.v, 0x55, 4 * p.count);
      // A model's files have no padding.
      for (const model::Tensor& t : layout_.units[u].tensors) {
        std::memset(p.hi + t.offset, 0x55, 2 * t.count);
      }
    }
    return *other_;
  }
  // Other values everywhere, as after some steps.
  void Train(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.1f);
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      for (const model::Tensor& t : layout_.units[u].tensors) {
        const PlaneSpan p =
            state_->planes(static_cast<int>(u), t.offset, t.count);
        for (uint64_t i = 0; i < t.count; ++i) {
          SplitFloat(normal(random), p.hi[i], p.lo[i]);
          p.m[i] = normal(random);
          p.v[i] = std::fabs(normal(random));
        }
      }
    }
  }

  static checkpoint::Identity Sampler() { return {{"seed", "42"}}; }
  std::string Checkpoints() const { return root_ + "/checkpoints"; }

  // As rank 0 and the daemon do it together.
  absl::Status Save(uint64_t step, DiskCalls& calls = RealDiskCalls(),
                    int threads = 1, uint64_t keep = 2) {
    SDP_RETURN_IF_ERROR(Commit(step, calls, threads));
    return checkpoint::Prune(Checkpoints(), keep, calls);
  }
  absl::Status Commit(uint64_t step, DiskCalls& calls, int threads = 1) {
    SDP_ASSIGN_OR_RETURN(
        auto made,
        checkpoint::NewCheckpoint::Create(
            Checkpoints(), step, folder_.Sub("model"), files_, "job-1", calls));
    std::vector<int> fds;
    for (const UniqueFd& fd : made->fds()) fds.push_back(fd.get());
    WriteOptions options;
    options.threads = threads;
    options.unit_order = SaveOrder(layout_, policy::UpdateMode::kEager);
    options.unit_saved = [](int) {};
    options.calls = &calls;
    SDP_ASSIGN_OR_RETURN(
        const std::vector<uint32_t> crcs,
        WriteCheckpoint(files_, *source_, *state_, fds, options));
    checkpoint::Manifest manifest;
    manifest.step = step;
    manifest.updates = step - 1;
    manifest.layout_hash = checkpoint::PlanesHash(layout_);
    manifest.sampler = Sampler();
    for (size_t i = 0; i < files_.size(); ++i) {
      manifest.files.push_back({files_[i].name, files_[i].bytes, crcs[i]});
    }
    return made->Commit(manifest);
  }
  // As rank 0 passes its files.
  absl::StatusOr<checkpoint::Manifest> Load(const std::string& path,
                                            HostState& state) const {
    SDP_ASSIGN_OR_RETURN(const checkpoint::Manifest manifest,
                         checkpoint::ReadManifest(path));
    std::vector<std::pair<std::string, UniqueFd>> files;
    std::vector<std::string> names = {checkpoint::kManifestFile};
    for (const checkpoint::File& file : files_) names.push_back(file.name);
    for (const std::string& name : names) {
      SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path + "/" + name, O_RDONLY));
      files.emplace_back(name, std::move(fd));
    }
    return LoadCheckpoint(std::move(files), {Sampler(), 1000}, state);
  }
  std::string PathOf(uint64_t step) const {
    return Checkpoints() + "/" + checkpoint::FolderName(step);
  }

  testing::TempFolder folder_;
  std::string root_;  // where checkpoints are
  model::StateLayout layout_;
  std::unique_ptr<model::TensorSource> source_;
  std::vector<checkpoint::File> files_;
  std::unique_ptr<HostState> state_, other_;
};

}  // namespace slidedp::hostd
