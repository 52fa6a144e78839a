#include "tests/testing/lossy_disk.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::testing {
namespace {

constexpr int kMixtures = 6;

std::pair<uint64_t, uint64_t> IdOf(const struct stat& info) {
  return {info.st_dev, info.st_ino};
}

struct stat StatOf(const std::string& path) {
  struct stat info;
  SDP_CHECK(lstat(path.c_str(), &info) == 0, path);
  return info;
}

std::pair<std::string, std::string> SplitPath(const std::string& path) {
  const size_t slash = path.rfind('/');
  return {path.substr(0, slash), path.substr(slash + 1)};
}

}  // namespace

LossyDisk::LossyDisk(const std::string& root) : root_(root) { Adopt(root); }

int LossyDisk::Adopt(const std::string& path) {
  const int node = static_cast<int>(nodes_.size());
  ids_[IdOf(StatOf(path))] = node;
  nodes_.emplace_back();
  nodes_[node].folder = std::filesystem::is_directory(path);
  if (!nodes_[node].folder) {
    nodes_[node].bytes = ReadWhole(path);
    return node;
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const int child = Adopt(entry.path());
    nodes_[node].names[entry.path().filename()] = child;
  }
  return node;
}

int LossyDisk::NodeOf(int fd) const {
  struct stat info;
  SDP_CHECK(fstat(fd, &info) == 0, "fstat");
  const auto it = ids_.find(IdOf(info));
  return it == ids_.end() ? -1 : it->second;
}

int LossyDisk::NodeOf(const std::string& path) const {
  return ids_.at(IdOf(StatOf(path)));
}

absl::Status LossyDisk::MakeFolder(const std::string& path) {
  SDP_RETURN_IF_ERROR(DiskCalls::MakeFolder(path));
  const auto [parent, name] = SplitPath(path);
  const int node = static_cast<int>(nodes_.size());
  nodes_.emplace_back().folder = true;
  ids_[IdOf(StatOf(path))] = node;
  Record(
      {.kind = Op::kName, .node = NodeOf(parent), .name = name, .child = node});
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> LossyDisk::Create(int folder, const std::string& name,
                                           const std::string& path) {
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, DiskCalls::Create(folder, name, path));
  struct stat info;
  SDP_CHECK(fstat(fd.get(), &info) == 0, path);
  const int node = static_cast<int>(nodes_.size());
  nodes_.emplace_back();
  ids_[IdOf(info)] = node;
  Record(
      {.kind = Op::kName, .node = NodeOf(folder), .name = name, .child = node});
  return fd;
}

absl::Status LossyDisk::Truncate(int fd, uint64_t bytes,
                                 const std::string& path) {
  SDP_RETURN_IF_ERROR(DiskCalls::Truncate(fd, bytes, path));
  Record({.kind = Op::kSize, .node = NodeOf(fd), .offset = bytes});
  return absl::OkStatus();
}

absl::Status LossyDisk::Reserve(int fd, uint64_t bytes,
                                const std::string& path) {
  SDP_RETURN_IF_ERROR(DiskCalls::Reserve(fd, bytes, path));
  Record({.kind = Op::kSize, .node = NodeOf(fd), .offset = bytes});
  return absl::OkStatus();
}

absl::Status LossyDisk::Write(int fd, const void* data, size_t bytes,
                              uint64_t offset, const std::string& path) {
  SDP_RETURN_IF_ERROR(DiskCalls::Write(fd, data, bytes, offset, path));
  Record({.kind = Op::kWrite,
          .node = NodeOf(fd),
          .offset = offset,
          .bytes = std::string(static_cast<const char*>(data), bytes)});
  return absl::OkStatus();
}

absl::Status LossyDisk::Sync(int fd, const std::string& path) {
  SDP_RETURN_IF_ERROR(DiskCalls::Sync(fd, path));
  // A folder above the root is of no interest.
  if (const int node = NodeOf(fd); node >= 0) {
    Record({.kind = Op::kSync, .node = node});
  }
  return absl::OkStatus();
}

absl::Status LossyDisk::Rename(const std::string& from, const std::string& to) {
  const int child = NodeOf(from);
  const auto [from_folder, from_name] = SplitPath(from);
  const auto [to_folder, to_name] = SplitPath(to);
  SDP_CHECK(from_folder == to_folder, "renames here stay in their folder");
  SDP_RETURN_IF_ERROR(DiskCalls::Rename(from, to));
  Record({.kind = Op::kName,
          .node = NodeOf(to_folder),
          .name = to_name,
          .from = from_name,
          .child = child});
  return absl::OkStatus();
}

absl::Status LossyDisk::Unlink(int folder, const std::string& name,
                               const std::string& path) {
  struct stat info;
  const bool there =
      fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
  SDP_RETURN_IF_ERROR(DiskCalls::Unlink(folder, name, path));
  // The number may be another's soon.
  if (there && info.st_nlink == 1) ids_.erase(IdOf(info));
  Record({.kind = Op::kName, .node = NodeOf(folder), .name = name});
  return absl::OkStatus();
}

absl::Status LossyDisk::RemoveFolder(const std::string& path) {
  const struct stat info = StatOf(path);
  SDP_RETURN_IF_ERROR(DiskCalls::RemoveFolder(path));
  ids_.erase(IdOf(info));
  const auto [parent, name] = SplitPath(path);
  Record({.kind = Op::kName, .node = NodeOf(parent), .name = name});
  return absl::OkStatus();
}

std::vector<size_t> LossyDisk::Open(size_t calls) const {
  std::vector<size_t> open;
  std::set<int> synced;
  for (size_t i = calls; i-- > 0;) {
    if (ops_[i].kind == Op::kSync) {
      synced.insert(ops_[i].node);
    } else if (!synced.contains(ops_[i].node)) {
      open.push_back(i);
    }
  }
  std::reverse(open.begin(), open.end());
  return open;
}

LossyDisk::Tree LossyDisk::Apply(size_t calls, const std::vector<size_t>& open,
                                 const Choice& fate) const {
  std::vector<Node> nodes = nodes_;
  size_t next = 0;
  for (size_t i = 0; i < calls; ++i) {
    const Op& op = ops_[i];
    Fate what = Fate::kKept;
    if (next < open.size() && open[next] == i) {
      ++next;
      what = fate(i);
    }
    if (what == Fate::kLost || op.kind == Op::kSync) continue;
    Node& node = nodes[op.node];
    switch (op.kind) {
      case Op::kSize:
        node.bytes.resize(op.offset);
        break;
      case Op::kWrite: {
        const size_t bytes =
            what == Fate::kTorn ? op.bytes.size() / 2 : op.bytes.size();
        node.bytes.resize(
            std::max<size_t>(node.bytes.size(), op.offset + bytes));
        node.bytes.replace(op.offset, bytes, op.bytes, 0, bytes);
        break;
      }
      case Op::kName:
        if (!op.from.empty()) node.names.erase(op.from);
        if (op.child < 0) {
          node.names.erase(op.name);
        } else {
          node.names[op.name] = op.child;
        }
        break;
      case Op::kSync:
        break;
    }
  }
  Tree tree;
  const std::function<void(int, const std::string&)> walk =
      [&](int id, const std::string& path) {
        for (const auto& [name, child] : nodes[id].names) {
          const std::string at = path + name;
          if (nodes[child].folder) {
            tree[at + "/"];
            walk(child, at + "/");
          } else {
            tree[at] = nodes[child].bytes;
          }
        }
      };
  walk(0, "");
  return tree;
}

std::vector<std::pair<LossyDisk::Tree, std::string>> LossyDisk::Choose(
    size_t calls, const std::vector<size_t>& open, uint32_t seed) const {
  std::vector<std::pair<Tree, std::string>> remains;
  std::set<Tree> seen;
  const auto add = [&](const std::string& words, const Choice& fate) {
    Tree tree = Apply(calls, open, fate);
    if (!seen.insert(tree).second) return;
    remains.emplace_back(std::move(tree),
                         absl::StrCat("after ", calls, " calls, ", words));
  };
  const auto kept_if = [](bool kept) {
    return kept ? Fate::kKept : Fate::kLost;
  };
  add("all kept", [](size_t) { return Fate::kKept; });
  add("all lost", [](size_t) { return Fate::kLost; });
  add("names kept",
      [&](size_t i) { return kept_if(ops_[i].kind == Op::kName); });
  add("names and sizes kept",
      [&](size_t i) { return kept_if(ops_[i].kind != Op::kWrite); });
  add("names lost",
      [&](size_t i) { return kept_if(ops_[i].kind != Op::kName); });
  const auto last = std::find_if(open.rbegin(), open.rend(), [&](size_t i) {
    return ops_[i].kind == Op::kWrite;
  });
  if (last != open.rend()) {
    add("last write torn",
        [&](size_t i) { return i == *last ? Fate::kTorn : Fate::kKept; });
  }
  for (size_t one : open) {
    if (ops_[one].kind != Op::kName) continue;
    add(absl::StrCat("name of call ", one, " alone lost"),
        [&](size_t i) { return kept_if(i != one); });
    add(absl::StrCat("name of call ", one, " alone kept"),
        [&](size_t i) { return kept_if(i == one); });
  }
  std::mt19937 random(seed);
  for (int mixture = 0; mixture < kMixtures && !open.empty(); ++mixture) {
    add(absl::StrCat("mixture ", mixture),
        [&](size_t) { return static_cast<Fate>(random() % 3); });
  }
  return remains;
}

std::vector<std::pair<LossyDisk::Tree, std::string>> LossyDisk::Remains(
    size_t calls, uint32_t seed) const {
  return Choose(calls, Open(calls), seed);
}

std::vector<std::pair<LossyDisk::Tree, std::string>> LossyDisk::RemainsOfLies(
    uint32_t seed) const {
  std::vector<size_t> open;
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (ops_[i].kind != Op::kSync) open.push_back(i);
  }
  return Choose(ops_.size(), open, seed);
}

void WriteTree(const LossyDisk::Tree& tree, const std::string& folder) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  for (const auto& [path, bytes] : tree) {
    const std::string at = absl::StrCat(folder, "/", path);
    if (absl::EndsWith(path, "/")) {
      std::filesystem::create_directory(at);
      continue;
    }
    const auto fd = OpenFile(at, O_WRONLY | O_CREAT | O_EXCL);
    SDP_CHECK(fd.ok(), fd.status().ToString());
    const absl::Status written =
        PwriteFully(fd->get(), bytes.data(), bytes.size(), 0, at);
    SDP_CHECK(written.ok(), written.ToString());
  }
}

}  // namespace slidedp::testing
