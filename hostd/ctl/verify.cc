// slidedpctl verify: all of a checkpoint, without a daemon.
#include <bit>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/checkpoint/folder.h"
#include "common/checkpoint/open.h"
#include "hostd/ctl/byte_progress.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/yaml_tree.h"
#include "hostd/store/split.h"

namespace slidedp::ctl {
namespace {

using checkpoint::OpenCheckpoint;
using checkpoint::Plane;

constexpr uint64_t kPieceElements = uint64_t{1} << 18;
constexpr uint64_t kElementBytes = 12;  // of all planes
constexpr size_t kMaxProblemBytes = 2000;

bool Finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
}

// The first value of the tensor that no training leaves, in words; empty: none.
absl::StatusOr<std::string> FirstBadValue(const OpenCheckpoint& open, int unit,
                                          const model::Tensor& tensor,
                                          ByteProgress& progress) {
  const uint64_t room = std::min(tensor.count, kPieceElements);
  std::vector<bf16> hi(room);
  std::vector<int16_t> lo(room);
  std::vector<float> m(room), v(room);
  for (uint64_t first = 0; first < tensor.count; first += room) {
    const uint64_t count = std::min(room, tensor.count - first);
    SDP_RETURN_IF_ERROR(open.ReadHi(tensor, first, count, hi.data()));
    SDP_RETURN_IF_ERROR(
        open.ReadState(Plane::kLo, unit, tensor, first, count, lo.data()));
    SDP_RETURN_IF_ERROR(
        open.ReadState(Plane::kM, unit, tensor, first, count, m.data()));
    SDP_RETURN_IF_ERROR(
        open.ReadState(Plane::kV, unit, tensor, first, count, v.data()));
    for (uint64_t i = 0; i < count; ++i) {
      const char* bad = !hostd::IsSplit(hi[i], lo[i])
                            ? "no weight that training leaves"
                        : !Finite(m[i]) ? "m is not finite"
                        : !Finite(v[i]) ? "v is not finite"
                        : v[i] < 0      ? "v is negative"
                                        : nullptr;
      if (bad == nullptr) continue;
      return absl::StrCat(tensor.name, "[", first + i, "]: ", bad);
    }
    progress.Add(count * kElementBytes);
  }
  return std::string();
}

void CheckBytes(const Environment& environment, const std::string& path,
                const checkpoint::Manifest& manifest,
                std::vector<std::string>& problems) {
  uint64_t total_bytes = 0;
  for (const checkpoint::FileEntry& entry : manifest.files) {
    total_bytes += entry.bytes;
  }
  ByteProgress progress(environment, "checksums", total_bytes);
  for (const checkpoint::FileEntry& entry : manifest.files) {
    const absl::Status status = checkpoint::CheckChecksum(
        path, entry, [&](uint64_t bytes) { progress.Add(bytes); });
    if (!status.ok()) problems.emplace_back(status.message());
  }
}

void CheckValues(const Environment& environment, const std::string& path,
                 std::vector<std::string>& problems) {
  const absl::StatusOr<OpenCheckpoint> open = OpenCheckpoint::Open(path);
  if (!open.ok()) {
    problems.emplace_back(open.status().message());
    return;
  }
  const model::StateLayout& layout = open->layout();
  ByteProgress progress(environment, "values",
                        layout.parameters * kElementBytes);
  for (size_t u = 0; u < layout.units.size(); ++u) {
    for (const model::Tensor& tensor : layout.units[u].tensors) {
      const absl::StatusOr<std::string> bad =
          FirstBadValue(*open, static_cast<int>(u), tensor, progress);
      if (!bad.ok()) {
        problems.emplace_back(bad.status().message());
      } else if (!bad->empty()) {
        problems.push_back(*bad);
      }
    }
  }
}

}  // namespace

ExitCode VerifyCheckpoint(const Context& context, const std::string& folder) {
  const std::string path =
      AbsolutePath(folder, context.environment.current_folder);
  std::vector<std::string> problems;
  const absl::StatusOr<checkpoint::Manifest> manifest =
      checkpoint::ReadManifest(path);
  if (!manifest.ok()) {
    problems.emplace_back(manifest.status().message());
  } else {
    CheckBytes(context.environment, path, *manifest, problems);
    // Of damaged files the values are of no interest.
    if (problems.empty()) CheckValues(context.environment, path, problems);
  }
  if (context.json()) {
    Json json = JsonDocument();
    json["checkpoint"] = path;
    json["step"] = manifest.ok() ? Json(manifest->step) : Json(nullptr);
    json["problems"] = problems;
    context.out() << ToText(json) << "\n";
  } else {
    for (const std::string& problem : problems) {
      context.out() << Printable(problem, kMaxProblemBytes) << "\n";
    }
    if (problems.empty()) {
      *context.environment.err << path << ": step " << manifest->step
                               << ", nothing is wrong\n";
    }
  }
  return problems.empty() ? kExitOk : kExitFailure;
}

}  // namespace slidedp::ctl
