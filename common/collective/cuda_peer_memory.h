// Staging memory of one rank that the GPUs of the others write, and theirs.
// Private to this folder.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/collective/collective.h"
#include "common/device/cuda_stream.h"

namespace slidedp::collective {

// Layout, the same on every rank: a line of words for each rank, then room for
// two pieces of every other rank.
class PeerMemory {
 public:
  ~PeerMemory();

  // All ranks of `ranks` call it. Unavailable on all of them, with the reason
  // of those that have one, if not everybody can map everybody's memory or one
  // of them is `unwilling`.
  static absl::StatusOr<std::unique_ptr<PeerMemory>> Create(
      device::Device& device, Collective& ranks, size_t bytes, bool unwilling);
  // The others' memory: nothing but destruction may follow.
  void Unmap();

  size_t piece_bytes() const { return piece_bytes_; }
  // Where rank `from` leaves a piece with rank `to`: one of them is this rank.
  void* Piece(int to, int from, uint64_t number) const;
  // In `of`'s memory, written by `by`, which is another rank: pieces that `by`
  // has pushed to `of`.
  CUdeviceptr PushedWord(int of, int by) const { return Word(of, by, 0); }
  // In `of`'s memory, written by `by`: pieces of `of` that `by` has consumed.
  CUdeviceptr ConsumedWord(int of, int by) const { return Word(of, by, 1); }

 private:
  PeerMemory(int rank, int world_size, size_t bytes);
  // Fills `bases_`; why it can't, else empty.
  std::string MapOthers(const char* handles);
  CUdeviceptr Word(int of, int by, int which) const;

  const int rank_, world_size_;
  size_t header_bytes_, piece_bytes_;
  device::Buffer own_;
  std::vector<char*> bases_;  // by rank
};

}  // namespace slidedp::collective
