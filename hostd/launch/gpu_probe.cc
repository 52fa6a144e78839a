#include "hostd/launch/gpu_probe.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/launch/spawn.h"
#include "nlohmann/json.hpp"

namespace slidedp::hostd {
namespace {

constexpr int64_t kDeadlineNs = 60'000'000'000;
constexpr size_t kMaxOutputBytes = kMiB;
constexpr size_t kMaxGpus = 1024;
constexpr size_t kMaxShownBytes = 200;

// What the process says until it closes its output.
absl::StatusOr<std::string> ReadAll(int fd) {
  std::string output;
  const int64_t deadline_ns = MonotonicNs() + kDeadlineNs;
  char piece[4096];
  while (true) {
    const int64_t left_ns = deadline_ns - MonotonicNs();
    if (left_ns <= 0) {
      return absl::DeadlineExceededError("does not answer within a minute");
    }
    pollfd polled = {fd, POLLIN, 0};
    const int ready =
        poll(&polled, 1, static_cast<int>(left_ns / 1'000'000) + 1);
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
    if (ready <= 0) continue;
    const ssize_t got = read(fd, piece, sizeof(piece));
    if (got == 0) return output;
    if (got < 0) {
      if (errno == EAGAIN || errno == EINTR) continue;
      return ErrnoStatus(errno, "read");
    }
    output.append(piece, static_cast<size_t>(got));
    if (output.size() > kMaxOutputBytes) {
      return absl::ResourceExhaustedError("says more than a MiB");
    }
  }
}

absl::Status Strange(absl::string_view output) {
  return absl::InternalError(absl::StrCat(
      "slidedp-worker --probe answered: ", output.substr(0, kMaxShownBytes),
      "; all SlideDP programs must be of one release"));
}

}  // namespace

bool NvidiaIsVisible(const std::string& root) {
  for (const char* node : {"/dev/nvidiactl", "/dev/dxg"}) {
    if (access(absl::StrCat(root, node).c_str(), F_OK) == 0) return true;
  }
  return false;
}

absl::StatusOr<GpuFacts> ProbeGpus(
    const std::string& worker_binary,
    const std::vector<std::string>& environment) {
  LaunchRequest request;
  request.argv = {worker_binary, "--probe"};
  request.environment = environment;
  request.uid = geteuid();
  request.gid = getegid();
  SDP_ASSIGN_OR_RETURN(Spawned process, Spawn(request));
  absl::StatusOr<std::string> output = ReadAll(process.output.get());
  // It leads a group of its own.
  kill(-process.pid, SIGKILL);
  int status = 0;
  while (waitpid(process.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!output.ok()) {
    return Annotate(output.status(), absl::StrCat(worker_binary, " --probe"));
  }
  absl::StatusOr<GpuFacts> facts = ParseGpuFacts(*output);
  if (!facts.ok()) return Annotate(facts.status(), worker_binary);
  return facts;
}

absl::StatusOr<GpuFacts> ParseGpuFacts(absl::string_view output) {
  const absl::string_view text = absl::StripAsciiWhitespace(output);
  const size_t newline = text.rfind('\n');
  const absl::string_view line =
      newline == absl::string_view::npos ? text : text.substr(newline + 1);
  const nlohmann::json json = nlohmann::json::parse(
      line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("cuda") ||
      !json["cuda"].is_boolean() || !json.contains("problem") ||
      !json["problem"].is_string() || !json.contains("gpus") ||
      !json["gpus"].is_array() || json["gpus"].size() > kMaxGpus) {
    return Strange(line);
  }
  GpuFacts facts;
  facts.built = json["cuda"].get<bool>();
  facts.problem = json["problem"].get<std::string>();
  for (const nlohmann::json& entry : json["gpus"]) {
    if (!entry.is_object() || !entry.contains("name") ||
        !entry["name"].is_string() || !entry.contains("uuid") ||
        !entry["uuid"].is_string() || !entry.contains("memory_bytes") ||
        !entry["memory_bytes"].is_number_unsigned()) {
      return Strange(line);
    }
    facts.gpus.push_back({entry["name"].get<std::string>(),
                          entry["uuid"].get<std::string>(),
                          entry["memory_bytes"].get<uint64_t>()});
    // It becomes part of an environment variable, as one of a list.
    const std::string& uuid = facts.gpus.back().uuid;
    if (uuid.empty() || !std::all_of(uuid.begin(), uuid.end(), [](char c) {
          return absl::ascii_isalnum(c) || c == '-';
        })) {
      return Strange(line);
    }
  }
  return facts;
}

}  // namespace slidedp::hostd
