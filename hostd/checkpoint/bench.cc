// slidedp-bench-checkpoint: how fast a checkpoint is written, against what the
// same disk takes of the same bytes in the same run. Prints a JSON line:
// {bench, value, unit, target, detail}.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/checkpoint/folder.h"
#include "common/model/blank_source.h"
#include "common/model/shapes.h"
#include "hostd/checkpoint/writer.h"
#include "hostd/store/random_weights.h"
#include "nlohmann/json.hpp"

namespace slidedp::hostd {
namespace {

struct Options {
  std::string folder = "/tmp";
  std::string model = "qwen2.5-0.5b";
  int threads = 4;
  int rounds = 3;
};

double Seconds(int64_t begin_ns) {
  return static_cast<double>(MonotonicNs() - begin_ns) * 1e-9;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Pieces past the page cache, from as many threads, to one file that has its
// size already; then a sync.
absl::StatusOr<double> WriteRaw(const std::string& path, uint64_t bytes,
                                int threads) {
  constexpr uint64_t kPieceBytes = 8 * kMiB;
  SDP_ASSIGN_OR_RETURN(const UniqueFd fd,
                       OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT));
  bytes = CeilDiv(bytes, kPieceBytes) * kPieceBytes;
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(errno, path);
  }
  const std::unique_ptr<char, void (*)(void*)> data(
      static_cast<char*>(std::aligned_alloc(4096, kPieceBytes)), &std::free);
  uint64_t word = 1;
  for (uint64_t i = 0; i < kPieceBytes; ++i) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    data.get()[i] = static_cast<char>(word >> 56);
  }
  std::atomic<uint64_t> next = 0;
  std::atomic<bool> failed = false;
  const int64_t begin_ns = MonotonicNs();
  std::vector<std::thread> writers;
  for (int i = 0; i < threads; ++i) {
    writers.emplace_back([&] {
      for (uint64_t at; (at = next.fetch_add(kPieceBytes)) < bytes;) {
        if (!PwriteFully(fd.get(), data.get(), kPieceBytes, at, path).ok()) {
          failed = true;
        }
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  if (failed || fsync(fd.get()) != 0) {
    return absl::DataLossError(absl::StrCat(path, ": write"));
  }
  return static_cast<double>(bytes) / Seconds(begin_ns);
}

struct Written {
  double held_s = 0;   // until the last unit may change again
  double bytes_s = 0;  // with all syncs, in bytes a second
};

absl::StatusOr<Written> WriteOnce(const std::string& folder,
                                  const HostState& state,
                                  const model::TensorSource& source,
                                  uint64_t step, int threads) {
  SDP_ASSIGN_OR_RETURN(const std::vector<checkpoint::File> files,
                       checkpoint::MakeFiles(state.layout(), source));
  uint64_t bytes = 0;
  for (const checkpoint::File& file : files) bytes += file.bytes;
  const int64_t begin_ns = MonotonicNs();
  SDP_ASSIGN_OR_RETURN(const auto made, checkpoint::NewCheckpoint::Create(
                                            folder + "/checkpoints", step,
                                            folder + "/model", files, "bench"));
  std::vector<int> fds;
  for (const UniqueFd& fd : made->fds()) fds.push_back(fd.get());
  std::atomic<int64_t> last_saved_ns = 0;
  WriteOptions options;
  options.threads = threads;
  options.unit_order = SaveOrder(state.layout(), policy::UpdateMode::kEager);
  options.unit_saved = [&](int) { last_saved_ns = MonotonicNs(); };
  SDP_ASSIGN_OR_RETURN(const std::vector<uint32_t> crcs,
                       WriteCheckpoint(files, source, state, fds, options));
  checkpoint::Manifest manifest;
  manifest.step = step;
  for (size_t i = 0; i < files.size(); ++i) {
    manifest.files.push_back({files[i].name, files[i].bytes, crcs[i]});
  }
  SDP_RETURN_IF_ERROR(made->Commit(manifest));
  Written written;
  written.bytes_s = static_cast<double>(bytes) / Seconds(begin_ns);
  written.held_s = static_cast<double>(last_saved_ns - begin_ns) * 1e-9;
  return written;
}

absl::Status Run(const Options& options) {
  SDP_ASSIGN_OR_RETURN(const model::Shape shape,
                       model::FindShape(options.model));
  std::string folder = options.folder + "/slidedp-bench-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return ErrnoStatus(errno, folder);
  const std::unique_ptr<const std::string, void (*)(const std::string*)> gone(
      &folder, [](const std::string* path) {
        std::error_code ignored;
        std::filesystem::remove_all(*path, ignored);
      });
  std::filesystem::create_directory(folder + "/model");
  const std::string config_file = folder + "/model/config.json";
  SDP_RETURN_IF_ERROR(
      WriteFileAtomically(config_file, model::ConfigJson(shape)));
  SDP_ASSIGN_OR_RETURN(
      const model::ModelConfig config,
      model::ParseModelConfig(model::ConfigJson(shape), config_file));
  policy::Plan plan;
  plan.ranks = 1;
  plan.d2h_chunk_bytes = plan.h2d_chunk_bytes = kMiB;
  plan.ring_chunks = 1;
  SDP_ASSIGN_OR_RETURN(
      const auto state,
      HostState::Create("bench", model::MakeStateLayout(config), plan));
  SDP_RETURN_IF_ERROR(FillRandomParameters(1, options.threads, *state));
  // Moments as hard to compress as they are.
  for (size_t u = 0; u < state->layout().units.size(); ++u) {
    const PlaneSpan p =
        state->planes(static_cast<int>(u), 0, state->layout().units[u].count);
    for (uint64_t i = 0; i < p.count; ++i) {
      p.m[i] = 1e-3f * static_cast<float>(p.lo[i]) + static_cast<float>(i);
      p.v[i] = p.m[i] * p.m[i];
    }
  }
  SDP_ASSIGN_OR_RETURN(const model::TensorSource source,
                       model::BlankSource(state->layout()));
  const uint64_t bytes = 12 * state->layout().parameters;
  std::vector<double> raw, ours, ratios, held;
  for (int round = 0; round < options.rounds; ++round) {
    SDP_ASSIGN_OR_RETURN(const double before,
                         WriteRaw(folder + "/raw", bytes, options.threads));
    std::filesystem::remove(folder + "/raw");
    SDP_ASSIGN_OR_RETURN(
        const Written written,
        WriteOnce(folder, *state, source, round, options.threads));
    std::filesystem::remove_all(folder + "/checkpoints");
    raw.push_back(before);
    ours.push_back(written.bytes_s);
    ratios.push_back(written.bytes_s / before);
    held.push_back(written.held_s);
  }
  const nlohmann::json line = {
      {"bench", "checkpoint-write"},
      {"value", Median(ratios)},
      {"unit", "of the disk's rate"},
      {"target", 0.9},
      {"detail",
       {{"model", options.model},
        {"gigabytes", static_cast<double>(bytes) * 1e-9},
        {"threads", options.threads},
        {"disk_gb_per_second", Median(raw) * 1e-9},
        {"checkpoint_gb_per_second", Median(ours) * 1e-9},
        {"held_seconds", Median(held)},
        {"ratios", ratios}}}};
  std::printf("%s\n", line.dump().c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace slidedp::hostd

int main(int argc, char** argv) {
  slidedp::hostd::Options options;
  CLI::App app("Checkpoints against the disk's own rate");
  app.add_option("--folder", options.folder, "On the disk to measure");
  app.add_option("--model", options.model, "Published shape: 12 bytes each");
  app.add_option("--threads", options.threads, "That write")
      ->check(CLI::Range(1, 64));
  app.add_option("--rounds", options.rounds, "Of both, in turns")
      ->check(CLI::Range(1, 100));
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slidedp::hostd::Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "slidedp-bench-checkpoint: %s\n",
               std::string(status.message()).c_str());
  return 1;
}
