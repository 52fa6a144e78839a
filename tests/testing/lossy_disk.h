// What a power failure may leave of a folder: the calls that change it go to
// the real disk and are recorded; any moment's possible remains can be looked
// at afterwards.
//
// Kept is what was synced: a file's bytes and size with the file, names with
// their folder. Any of the rest may be lost: POSIX promises no more, whatever
// the file systems of today do. A rename happens as a whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/base/disk_calls.h"

namespace slidedp::testing {

class LossyDisk : public DiskCalls {
 public:
  // Files by their paths below the root; folders have a '/' at their end.
  using Tree = std::map<std::string, std::string>;
  enum class Fate { kLost, kTorn, kKept };  // kTorn: its first half

  // What is in the folder `root` now is safe.
  explicit LossyDisk(const std::string& root);

  // Calls so far.
  size_t calls() const { return ops_.size(); }
  // After the first `calls` of them: different remains, with words for each.
  // All, none, names without bytes, bytes without names, the last write torn,
  // each name alone or missing, and mixtures by `seed`.
  std::vector<std::pair<Tree, std::string>> Remains(size_t calls,
                                                    uint32_t seed) const;
  // The same for a disk that says it has synced and has not: all calls' lot is
  // open.
  std::vector<std::pair<Tree, std::string>> RemainsOfLies(uint32_t seed) const;

  absl::Status MakeFolder(const std::string& path) override;
  absl::StatusOr<UniqueFd> Create(int folder, const std::string& name,
                                  const std::string& path) override;
  absl::Status Truncate(int fd, uint64_t bytes,
                        const std::string& path) override;
  absl::Status Reserve(int fd, uint64_t bytes,
                       const std::string& path) override;
  absl::Status Write(int fd, const void* data, size_t bytes, uint64_t offset,
                     const std::string& path) override;
  absl::Status Sync(int fd, const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Unlink(int folder, const std::string& name,
                      const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;

 private:
  struct Node {
    bool folder = false;
    std::string bytes = {};
    std::map<std::string, int> names;
  };
  struct Op {
    enum Kind { kSize, kWrite, kName, kSync } kind;
    int node = 0;
    uint64_t offset = 0;  // or the size
    std::string bytes = {};
    std::string name = {}, from = {};  // kName: `from` goes, if not empty
    int child = -1;  // kName: what the name leads to; -1: nothing
  };
  using Choice = std::function<Fate(size_t op)>;

  int Adopt(const std::string& path);
  int NodeOf(int fd) const;
  int NodeOf(const std::string& path) const;
  void Record(Op op) { ops_.push_back(std::move(op)); }
  // Which of the first `calls` are not synced by one of them.
  std::vector<size_t> Open(size_t calls) const;
  Tree Apply(size_t calls, const std::vector<size_t>& open,
             const Choice& fate) const;
  std::vector<std::pair<Tree, std::string>> Choose(
      size_t calls, const std::vector<size_t>& open, uint32_t seed) const;

  const std::string root_;
  std::map<std::pair<uint64_t, uint64_t>, int> ids_;  // device and inode
  std::vector<Node> nodes_;  // [0]: the root, as it was
  std::vector<Op> ops_;
};

// Makes the tree in the folder, which becomes empty first.
void WriteTree(const LossyDisk::Tree& tree, const std::string& folder);

}  // namespace slidedp::testing
