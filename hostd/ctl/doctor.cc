#include "hostd/ctl/doctor.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/fd.h"
#include "common/base/memory.h"
#include "common/base/units.h"
#include "hostd/ctl/client.h"
#include "hostd/ctl/table.h"
#include "hwy/targets.h"
#include "proto/protocol.h"

namespace slidedp::ctl {
namespace {

constexpr uint64_t kMaxSystemFileBytes = 1 << 20;

std::string FirstLine(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxSystemFileBytes);
  if (!text.ok()) return "";
  return std::string(
      absl::StripAsciiWhitespace(text->substr(0, text->find('\n'))));
}

// The number of kB after "MemTotal:" and the like; 0 if there is none.
uint64_t MemInfoBytes(const std::string& root, absl::string_view key) {
  absl::StatusOr<std::string> text =
      ReadFile(absl::StrCat(root, "/proc/meminfo"), kMaxSystemFileBytes);
  if (!text.ok()) return 0;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    if (!absl::ConsumePrefix(&line, key) || !absl::ConsumePrefix(&line, ":")) {
      continue;
    }
    absl::ConsumeSuffix(&line, "kB");
    uint64_t kib = 0;
    if (absl::SimpleAtoi(line, &kib)) return kib * kKiB;
  }
  return 0;
}

// The word in brackets: "always [madvise] never".
std::string Chosen(const std::string& line) {
  size_t open = line.find('['), close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    return line;
  }
  return line.substr(open + 1, close - open - 1);
}

Finding CheckMemory(const Environment& environment) {
  Finding finding{"memory"};
  absl::StatusOr<MemoryRoom> room = AvailableMemory(environment.system_root);
  if (!room.ok()) {
    finding.health = Health::kFail;
    finding.found = std::string(room.status().message());
    finding.remedy = "mount /proc";
    return finding;
  }
  uint64_t total = MemInfoBytes(environment.system_root, "MemTotal");
  finding.found = absl::StrCat(FormatBytes(room->bytes), " free (", room->limit,
                               "), host has ", FormatBytes(total));
  if (room->bytes < kGiB) {
    finding.health = Health::kWarn;
    finding.remedy =
        "free memory or raise the limit: a job takes 12 bytes a "
        "parameter and more (`slidedpctl estimate MODEL`)";
  }
  return finding;
}

Finding CheckMemlock() {
  Finding finding{"memlock"};
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY) {
    finding.found = "unlimited";
    return finding;
  }
  finding.found = absl::StrCat("limit is ", FormatBytes(limit.rlim_cur));
  finding.health = Health::kWarn;
  finding.remedy =
      "fine for CPU ranks; a daemon that locks its state needs "
      "LimitMEMLOCK=infinity (systemd) or `ulimit -l unlimited`";
  return finding;
}

Finding CheckHugePages(const Environment& environment) {
  Finding finding{"huge pages"};
  std::string path = absl::StrCat(environment.system_root,
                                  "/sys/kernel/mm/transparent_hugepage/"
                                  "shmem_enabled");
  std::string line = FirstLine(path);
  if (line.empty()) {
    finding.health = Health::kWarn;
    finding.found =
        "this kernel has no transparent huge pages for shared "
        "memory";
    finding.remedy = "jobs run, on 4 KiB pages";
    return finding;
  }
  std::string word = Chosen(line);
  finding.found = absl::StrCat("shmem_enabled is ", word);
  if (word == "never" || word == "deny") {
    finding.health = Health::kWarn;
    finding.remedy =
        "echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled "
        "(as root) lets job state use 2 MiB pages";
  }
  return finding;
}

Finding CheckNuma(const Environment& environment) {
  Finding finding{"numa"};
  std::string online = FirstLine(
      absl::StrCat(environment.system_root, "/sys/devices/system/node/online"));
  finding.found = online.empty()  ? "one node (the kernel shows none)"
                  : online == "0" ? "one node"
                                  : absl::StrCat("nodes ", online);
  return finding;
}

Finding CheckCpu(const Environment& environment) {
  Finding finding{"cpu"};
  std::vector<std::string> names;
  bool fast = false;
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    int64_t target = rest & ~(rest - 1);
    names.push_back(hwy::TargetName(target));
    fast = fast || names.back().rfind("AVX", 0) == 0 ||
           names.back().rfind("SVE", 0) == 0 ||
           names.back().rfind("NEON", 0) == 0;
  }
  finding.found =
      absl::StrCat(environment.logical_cpus,
                   environment.logical_cpus == 1 ? " CPU, " : " CPUs, ",
                   absl::StrJoin(names, " "));
  if (!fast) {
    finding.health = Health::kWarn;
    finding.remedy = "no AVX2 or AVX-512: updates on the host will be slow";
  }
  return finding;
}

Finding CheckGpus(const Environment& environment) {
  Finding finding{"gpu"};
  absl::StatusOr<hostd::GpuFacts> facts =
      environment.find_gpus ? environment.find_gpus() : absl::NotFoundError("");
  if (absl::IsNotFound(facts.status())) {
    finding.found = "no NVIDIA driver: jobs compute on the CPU";
    return finding;
  }
  finding.health = Health::kWarn;
  if (!facts.ok()) {
    finding.found = std::string(facts.status().message());
    finding.remedy = "install slidedp-worker beside slidedpctl";
  } else if (!facts->built) {
    finding.found = "this slidedp-worker is built without CUDA";
    finding.remedy = "install a build with CUDA to use this host's GPUs";
  } else if (!facts->problem.empty()) {
    finding.found = facts->problem;
    finding.remedy = "`nvidia-smi` shows whether the driver works";
  } else if (facts->gpus.empty()) {
    finding.found = "no GPU is visible";
    finding.remedy = "look at CUDA_VISIBLE_DEVICES";
  } else {
    finding.health = Health::kOk;
    std::vector<std::string> gpus;
    for (const hostd::Gpu& gpu : facts->gpus) {
      gpus.push_back(
          absl::StrCat(gpu.name, " ", FormatBytes(gpu.memory_bytes)));
    }
    finding.found = absl::StrJoin(gpus, ", ");
  }
  return finding;
}

Finding CheckSocket(const std::string& socket) {
  Finding finding{"socket"};
  struct stat info = {};
  if (stat(socket.c_str(), &info) != 0) {
    finding.health = Health::kFail;
    finding.found = absl::StrCat(socket, " does not exist");
    finding.remedy =
        "start slidedpd, or name its socket with --socket or "
        "SLIDEDP_SOCKET";
    return finding;
  }
  if (!S_ISSOCK(info.st_mode)) {
    finding.health = Health::kFail;
    finding.found = absl::StrCat(socket, " is not a socket");
    finding.remedy = "remove it, then start slidedpd";
    return finding;
  }
  finding.found = socket;
  return finding;
}

Finding CheckDaemon(const std::string& socket) {
  Finding finding{"daemon"};
  ControlClient client(socket);
  absl::StatusOr<v1::VersionReply> version = client.Version();
  if (!version.ok()) {
    finding.health = Health::kFail;
    finding.found = "does not answer";
    finding.remedy = std::string(version.status().message());
    return finding;
  }
  finding.found =
      absl::StrCat("version ", version->version(), ", pid ", version->pid());
  if (version->protocol() != kProtocolVersion) {
    finding.health = Health::kFail;
    absl::StrAppend(&finding.found, ", protocol ", version->protocol());
    finding.remedy =
        absl::StrCat("this slidedpctl speaks protocol ", kProtocolVersion,
                     "; install slidedpctl and slidedpd of one release");
    return finding;
  }
  absl::StatusOr<v1::ListReply> jobs = client.List(/*ended=*/false);
  if (jobs.ok() && jobs->draining()) {
    finding.health = Health::kWarn;
    absl::StrAppend(&finding.found, ", draining: ", jobs->drain_reason());
    finding.remedy = "no new job starts; `slidedpctl undrain` ends it";
  }
  return finding;
}

}  // namespace

const char* Word(Health health) {
  switch (health) {
    case Health::kOk:
      return "ok";
    case Health::kWarn:
      return "warn";
    case Health::kFail:
      return "fail";
  }
  return "fail";
}

std::vector<Finding> RunDoctor(const Environment& environment,
                               const std::string& socket) {
  std::vector<Finding> findings = {
      CheckMemory(environment),    CheckMemlock(),
      CheckHugePages(environment), CheckNuma(environment),
      CheckCpu(environment),       CheckGpus(environment),
      CheckSocket(socket)};
  if (findings.back().health == Health::kOk) {
    findings.push_back(CheckDaemon(socket));
  }
  return findings;
}

bool AnyFailed(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(), [](const Finding& f) {
    return f.health == Health::kFail;
  });
}

Json JsonDoctor(const std::vector<Finding>& findings) {
  Json json = JsonDocument();
  json["ok"] = !AnyFailed(findings);
  json["findings"] = Json::array();
  for (const Finding& finding : findings) {
    json["findings"].push_back(Json{{"check", finding.check},
                                    {"health", Word(finding.health)},
                                    {"found", finding.found},
                                    {"remedy", finding.remedy}});
  }
  return json;
}

void PrintDoctor(const std::vector<Finding>& findings, bool headers, bool color,
                 std::ostream& out) {
  Table table({{"HEALTH"}, {"CHECK"}, {"FOUND"}, {"WHAT TO DO"}});
  for (const Finding& finding : findings) {
    const char* sgr = finding.health == Health::kOk     ? "32"
                      : finding.health == Health::kWarn ? "33"
                                                        : "31";
    table.Add({{Word(finding.health), sgr},
               {finding.check},
               {finding.found},
               {finding.remedy}});
  }
  table.Print(headers, color, out);
}

}  // namespace slidedp::ctl
