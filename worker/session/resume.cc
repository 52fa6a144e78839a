#include "worker/session/resume.h"

#include <fcntl.h>

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/checkpoint/folder.h"
#include "proto/identity.h"

namespace slidedp::session {
namespace {

constexpr char kAuto[] = "auto";

}  // namespace

absl::StatusOr<Resume> Resume::Find(const Proposal& proposal,
                                    const std::string& from) {
  Resume resume(proposal);
  const std::string& folder = proposal.spec.checkpoint().folder();
  if (from != kAuto) {
    resume.candidates_.push_back(from);
    return resume;
  }
  SDP_ASSIGN_OR_RETURN(const std::vector<checkpoint::Found> found,
                       checkpoint::List(folder));
  resume.automatic_ = true;
  for (const checkpoint::Found& each : found) {
    resume.candidates_.push_back(each.path);
  }
  // A job that began with a named one and has saved nothing yet.
  const std::string& first = proposal.spec.resume();
  if (!first.empty() && first != kAuto) resume.candidates_.push_back(first);
  return resume;
}

absl::StatusOr<checkpoint::Manifest> Resume::Look(
    const std::string& path) const {
  SDP_ASSIGN_OR_RETURN(checkpoint::Manifest manifest,
                       checkpoint::ReadManifest(path));
  SDP_RETURN_IF_ERROR(checkpoint::CheckFits(
      manifest, absl::StrCat(path, "/", checkpoint::kManifestFile),
      checkpoint::PlanesHash(proposal_->layout),
      SamplerIdentity(proposal_->spec), proposal_->spec.steps()));
  return manifest;
}

absl::Status Resume::PassNext(Attachment& attachment) {
  passed_.clear();
  while (!candidates_.empty()) {
    const std::string path = std::move(candidates_.front());
    candidates_.pop_front();
    absl::StatusOr<checkpoint::Manifest> manifest = Look(path);
    if (!manifest.ok()) {
      SDP_RETURN_IF_ERROR(OnRefused(manifest.status()));
      continue;
    }
    std::vector<std::string> names = {checkpoint::kManifestFile};
    for (const checkpoint::FileEntry& entry : manifest->files) {
      if (absl::EndsWith(entry.name, ".safetensors")) {
        names.push_back(entry.name);
      }
    }
    std::vector<UniqueFd> files;
    std::vector<int> fds;
    for (const std::string& name : names) {
      SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(absl::StrCat(path, "/", name),
                                                 O_RDONLY | O_NOFOLLOW));
      fds.push_back(fd.get());
      files.push_back(std::move(fd));
    }
    passed_ = path;
    passed_step_ = manifest->step;
    return attachment.PassFiles(v1::FilesMessage::RESUME, names, fds);
  }
  // Beginning anew would throw away what the damaged ones stand for.
  if (refused_.has_value()) {
    return Annotate(*refused_, "no checkpoint can be used; the newest problem");
  }
  return attachment.PassNone(v1::FilesMessage::RESUME, "");
}

absl::Status Resume::OnRefused(const absl::Status& error) {
  if (!automatic_) return error;
  spdlog::warn("a checkpoint is passed over: {}", std::string(error.message()));
  if (!refused_.has_value()) refused_ = error;
  return absl::OkStatus();
}

absl::Status Resume::OnLoaded() const {
  const std::string& folder = proposal_->spec.checkpoint().folder();
  if (passed_.empty() || folder.empty()) return absl::OkStatus();
  spdlog::info("goes on from {}", passed_);
  SDP_ASSIGN_OR_RETURN(const std::vector<std::string> aside,
                       checkpoint::SetAside(folder, passed_step_));
  for (const std::string& path : aside) {
    spdlog::warn("a later checkpoint is set aside: {}", path);
  }
  return absl::OkStatus();
}

}  // namespace slidedp::session
