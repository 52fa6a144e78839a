// manifest.json, a checkpoint's last file: what the checkpoint is of, and the
// size and checksum of every other file. A folder without a manifest that fits
// its files is no checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::checkpoint {

inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr uint64_t kMaxManifestBytes = uint64_t{16} << 20;
inline constexpr uint64_t kMaxFiles = 4096;

struct FileEntry {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  bool operator==(const FileEntry&) const = default;
};

// Words of a job by their names: what makes two jobs the same.
using Identity = std::map<std::string, std::string>;

// What a run has seen and goes by: losses of steps, evaluations.
struct Memory {
  static constexpr size_t kMaxLosses = 64;
  std::vector<double> losses;  // of the last steps, the oldest first
  uint64_t skipped_in_a_row = 0;
  // On which held-out sequences: those of another set are no measure.
  Identity held_out;
  std::optional<double> best_loss;
  uint64_t best_step = 0;
  // What patience counts from, and how far it has come.
  std::optional<double> mark;
  uint64_t since_better = 0;
  bool operator==(const Memory&) const = default;
};

struct Manifest {
  // The state after so many steps, of which so many were applied.
  uint64_t step = 0;
  uint64_t updates = 0;
  uint64_t clip_history = 0;  // UpdateConfig's
  uint64_t layout_hash = 0;   // PlanesHash
  // A job that goes on from here must have this very sampler; it may train
  // otherwise.
  Identity sampler, training;
  Memory memory;
  // Trained tensors whose dtype in the source was not BF16: "F32", "F16".
  Identity source_dtypes;
  std::vector<FileEntry> files;

  const FileEntry* Find(absl::string_view name) const;
  bool operator==(const Manifest&) const = default;
};

// One line of JSON that ends with a checksum of itself.
std::string ToJson(const Manifest& manifest);
// Hostile: syntax, types, names of files (no folders, no doubles), checksum.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view file);

// Why a job of this layout and sampler can't go on from the checkpoint. Names
// the file and the first thing that differs.
absl::Status CheckFits(const Manifest& manifest, absl::string_view file,
                       uint64_t layout_hash, const Identity& sampler,
                       uint64_t steps);
// "optimizer was lr: 0.1, is lr: 0.2"; empty if nothing differs.
std::vector<std::string> Differences(const Identity& was, const Identity& is);

}  // namespace slidedp::checkpoint
