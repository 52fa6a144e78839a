#include "common/base/memory.h"

#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp {
namespace {

constexpr uint64_t kMaxSystemFileBytes = 4 * kMiB;

// A memory controller: where it is mounted, which of its groups the mount
// shows as its top, and the group of this process.
struct Controller {
  bool v2;
  std::string mount;
  std::string mount_root;
  std::string group;
};

struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};
constexpr GroupFiles kV1Files = {"memory.limit_in_bytes",
                                 "memory.usage_in_bytes", "total_inactive_file",
                                 "total_active_file"};
constexpr GroupFiles kV2Files = {"memory.max", "memory.current",
                                 "inactive_file", "active_file"};

// The number after `key` and white space at the start of a line.
std::optional<uint64_t> NumberAfter(absl::string_view text,
                                    absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::ConsumePrefix(&line, key)) continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    uint64_t number;
    if (!words.empty() && line.front() <= ' ' &&
        absl::SimpleAtoi(words[0], &number)) {
      return number;
    }
  }
  return std::nullopt;
}

std::optional<std::string> ReadIfThere(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxSystemFileBytes);
  if (!text.ok()) return std::nullopt;
  return *std::move(text);
}

bool NamesMemory(absl::string_view comma_list) {
  for (absl::string_view name : absl::StrSplit(comma_list, ',')) {
    if (name == "memory") return true;
  }
  return false;
}

// From /proc/self/cgroup and /proc/self/mountinfo; none if either is missing,
// as on a kernel without cgroups.
std::vector<Controller> Controllers(const std::string& root) {
  std::vector<Controller> found;
  const auto groups = ReadIfThere(root + "/proc/self/cgroup");
  const auto mounts = ReadIfThere(root + "/proc/self/mountinfo");
  if (!groups || !mounts) return found;
  for (absl::string_view line : absl::StrSplit(*groups, '\n')) {
    // hierarchy:controllers:path
    const std::vector<absl::string_view> part =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (part.size() != 3) continue;
    const bool v2 = part[0] == "0" && part[1].empty();
    if (!v2 && !NamesMemory(part[1])) continue;
    for (absl::string_view mount : absl::StrSplit(*mounts, '\n')) {
      // id parent device root mountpoint options... - type source options
      const std::pair<absl::string_view, absl::string_view> halves =
          absl::StrSplit(mount, absl::MaxSplits(" - ", 1));
      const std::vector<absl::string_view> left =
          absl::StrSplit(halves.first, ' ');
      const std::vector<absl::string_view> right =
          absl::StrSplit(halves.second, ' ');
      if (left.size() < 5 || right.size() < 3) continue;
      if (v2 ? right[0] != "cgroup2"
             : right[0] != "cgroup" || !NamesMemory(right[2])) {
        continue;
      }
      found.push_back({v2, std::string(left[4]), std::string(left[3]),
                       std::string(part[2])});
      break;
    }
  }
  return found;
}

std::optional<uint64_t> LimitOfGroup(const std::string& folder,
                                     const GroupFiles& files) {
  const auto limit_text = ReadIfThere(absl::StrCat(folder, "/", files.limit));
  uint64_t limit;
  // "max" in v2, a number beyond any memory in v1: no limit.
  if (!limit_text || !absl::SimpleAtoi(*limit_text, &limit)) {
    return std::nullopt;
  }
  return limit;
}

std::optional<uint64_t> RoomOfGroup(const std::string& folder,
                                    const GroupFiles& files) {
  const auto limit_bytes = LimitOfGroup(folder, files);
  const auto usage_text = ReadIfThere(absl::StrCat(folder, "/", files.usage));
  uint64_t usage;
  if (!limit_bytes || !usage_text || !absl::SimpleAtoi(*usage_text, &usage)) {
    return std::nullopt;
  }
  const uint64_t limit = *limit_bytes;
  uint64_t reclaimable = 0;
  if (const auto stat = ReadIfThere(folder + "/memory.stat")) {
    reclaimable = NumberAfter(*stat, files.inactive_file).value_or(0) +
                  NumberAfter(*stat, files.active_file).value_or(0);
  }
  const uint64_t held = usage > reclaimable ? usage - reclaimable : 0;
  return limit > held ? limit - held : 0;
}

// The smallest of the line `key` of /proc/meminfo and what `of_group` says of
// each memory cgroup of this process.
absl::StatusOr<MemoryRoom> SmallestOf(
    const std::string& root, absl::string_view key,
    std::optional<uint64_t> (*of_group)(const std::string&,
                                        const GroupFiles&)) {
  const std::string meminfo_path = root + "/proc/meminfo";
  SDP_ASSIGN_OR_RETURN(const std::string meminfo,
                       ReadFile(meminfo_path, kMaxSystemFileBytes));
  const auto host_kib = NumberAfter(meminfo, absl::StrCat(key, ":"));
  if (!host_kib) {
    return absl::NotFoundError(
        absl::StrCat(meminfo_path, ": no ", key, " line"));
  }
  MemoryRoom room = {*host_kib * kKiB, absl::StrCat(key, " of the host")};
  for (const Controller& controller : Controllers(root)) {
    const GroupFiles& files = controller.v2 ? kV2Files : kV1Files;
    // In a container the mount may show a group deep in the hierarchy as "/".
    absl::string_view group = controller.group;
    if (controller.mount_root != "/") {
      absl::ConsumePrefix(&group, controller.mount_root);
    }
    group = absl::StripSuffix(group, "/");
    // The limit of every ancestor binds too.
    while (true) {
      const auto bytes =
          of_group(absl::StrCat(root, controller.mount, group), files);
      if (bytes && *bytes < room.bytes) {
        room = {*bytes, absl::StrCat(files.limit, " of cgroup ",
                                     group.empty() ? "/" : group)};
      }
      const size_t slash = group.rfind('/');
      if (slash == absl::string_view::npos) break;
      group = group.substr(0, slash);
    }
  }
  return room;
}

}  // namespace

absl::StatusOr<MemoryRoom> AvailableMemory(const std::string& root) {
  return SmallestOf(root, "MemAvailable", RoomOfGroup);
}

absl::StatusOr<MemoryRoom> MemoryCapacity(const std::string& root) {
  return SmallestOf(root, "MemTotal", LimitOfGroup);
}

uint64_t ProcessPssBytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(rollup, line)) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "Pss: %llu kB", &kib) == 1) {
      return uint64_t{kib} * kKiB;
    }
  }
  return 0;
}

}  // namespace slidedp
