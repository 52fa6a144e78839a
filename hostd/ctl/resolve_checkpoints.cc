#include "hostd/ctl/resolve_checkpoints.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/folder.h"
#include "hostd/ctl/job_fields.h"
#include "hostd/ctl/resolve.h"
#include "proto/identity.h"

namespace slidedp::ctl {
namespace {

constexpr uint32_t kRetries = 2;  // of a job that saves by steps or time
constexpr char kAuto[] = "auto";

}  // namespace

void ResolveCheckpointPaths(const std::string& current_folder,
                            v1::JobSpec& spec) {
  v1::Checkpoint& checkpoint = *spec.mutable_checkpoint();
  if (!checkpoint.folder().empty()) {
    checkpoint.set_folder(AbsolutePath(checkpoint.folder(), current_folder));
  } else if (!spec.output().empty()) {
    checkpoint.set_folder(absl::StrCat(spec.output(), ".checkpoints"));
  }
  if (!spec.resume().empty() && spec.resume() != kAuto) {
    spec.set_resume(AbsolutePath(spec.resume(), current_folder));
  }
}

absl::Status ResolveCheckpoints(absl::string_view file,
                                const model::StateLayout& layout,
                                v1::JobSpec& spec) {
  const v1::Checkpoint& checkpoint = spec.checkpoint();
  const bool saves =
      checkpoint.every_steps() > 0 || checkpoint.every_minutes() > 0;
  if (spec.retries() == kRetriesByDefault) {
    spec.set_retries(saves ? kRetries : 0);
  }
  const std::string& folder = checkpoint.folder();
  if (folder.empty()) {
    if (!saves && spec.resume() != kAuto) return absl::OkStatus();
    return InvalidInput(file, "checkpoint.folder", "",
                        "is required where there is no output",
                        "give a folder for checkpoints");
  }
  const std::string parent =
      std::filesystem::path(folder).parent_path().string();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error) &&
      !std::filesystem::is_directory(parent, error)) {
    return InvalidInput(file, "checkpoint.folder", folder,
                        "neither it nor its parent folder is there",
                        "make the parent folder");
  }
  if (spec.resume().empty()) {
    return Annotate(checkpoint::CheckNoneIn(folder),
                    absl::StrCat(file, ": checkpoint.folder"));
  }
  if (spec.resume() == kAuto) return absl::OkStatus();
  absl::StatusOr<checkpoint::Manifest> manifest =
      checkpoint::ReadManifest(spec.resume());
  const absl::Status fits =
      manifest.ok()
          ? checkpoint::CheckFits(
                *manifest,
                absl::StrCat(spec.resume(), "/", checkpoint::kManifestFile),
                checkpoint::PlanesHash(layout), SamplerIdentity(spec),
                spec.steps())
          : manifest.status();
  return Annotate(fits, absl::StrCat(file, ": resume"));
}

}  // namespace slidedp::ctl
