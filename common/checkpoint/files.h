// Which files a checkpoint has, and where their bytes come from: a pure
// function of the state's layout and the model's files, so that daemon, rank 0
// and slidedpctl agree without a word.
//
// Model files have the source's names, tensors and order; trained tensors are
// the hi plane (BF16), others are as in the source. Each unit also has
// "state-NNNNN.safetensors" with lo (I16), m and v (F32): the planes of the
// whole unit as they lie, padding included.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/layout.h"
#include "common/model/source.h"

namespace slidedp::checkpoint {

enum class Plane { kHi, kLo, kM, kV };
uint64_t ElementBytes(Plane plane);

// A range of a file.
struct Extent {
  enum class From { kHeader, kPlane, kSource };
  From from;
  uint64_t begin, bytes;  // in the file
  // kPlane: from this element of the unit on.
  Plane plane = Plane::kHi;
  int unit = -1;
  uint64_t first = 0;
  bool twice = false;  // a tied model's lm_head: the embedding's bytes again
  // kSource: of this file of the source, from this byte on.
  size_t source_file = 0;
  uint64_t source_begin = 0;
};

struct File {
  std::string name;
  std::string header;           // its first bytes
  std::vector<Extent> extents;  // ascending, without holes; kHeader first
  uint64_t bytes = 0;
};

// Model files in the source's order, then the units' state files. An error
// names a trained tensor that the source lacks.
absl::StatusOr<std::vector<File>> MakeFiles(const model::StateLayout& layout,
                                            const model::TensorSource& source);

std::string StateFileName(int unit);

// Names what the planes hold, and not what is trained of it: a job may go on
// with other tensors frozen.
uint64_t PlanesHash(const model::StateLayout& layout);

}  // namespace slidedp::checkpoint
