// What passes over the attach socket (proto/control.proto): segments to a
// worker, the files of a model and of an output from rank 0.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "common/model/source.h"
#include "common/shm/segment.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

// A worker's connection. Shared: the loop shuts it down to wake a job thread
// that waits in it.
struct AttachConnection {
  UniqueFd socket;
  uint32_t uid = 0;  // the peer's
};

using NamedFiles = std::vector<std::pair<std::string, UniqueFd>>;

// Every segment but the state's, as a worker may have it.
absl::Status SendSegments(int socket,
                          const std::vector<shm::Segment>& segments);
absl::Status SendAttachError(int socket, const std::string& error);

// All parts of a FilesMessage of `kind`. Hostile: number of files, names and
// types of descriptors are checked; every descriptor is a regular file. The
// rank's `error` instead of files is FailedPrecondition. There may be none if
// `may_be_empty`.
absl::StatusOr<NamedFiles> ReceiveFiles(int socket, v1::FilesMessage::Kind kind,
                                        bool may_be_empty = false);
// `warnings` only with an ok status.
absl::Status SendFilesReply(int socket, const absl::Status& status,
                            const std::vector<std::string>& warnings);

// The output's descriptors in the order of the source's files: as many, of the
// same names and sizes, open for writing.
absl::StatusOr<std::vector<int>> MatchOutput(const model::TensorSource& source,
                                             const NamedFiles& output);

}  // namespace slidedp::hostd
