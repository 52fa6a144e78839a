#include "hostd/daemon/config.h"

#include <cmath>
#include <functional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "yaml-cpp/yaml.h"

namespace slidedp::hostd {
namespace {

struct Entry {
  Setting setting;
  std::function<absl::Status(Config&, absl::string_view)> set;
};

// A setter's errors are the problem alone; Apply adds source, key and value.
auto Text(std::string Config::*field) {
  return [field](Config& config, absl::string_view value) {
    config.*field = std::string(value);
    return absl::OkStatus();
  };
}

auto AbsolutePath(std::string Config::*field) {
  return [field](Config& config, absl::string_view value) {
    if (value.empty() || value[0] != '/') {
      return absl::InvalidArgumentError("not an absolute path");
    }
    std::string path(value);
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    config.*field = std::move(path);
    return absl::OkStatus();
  };
}

auto Count(uint64_t Config::*field, uint64_t least, uint64_t most) {
  return [=](Config& config, absl::string_view value) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < least || number > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("not a whole number from ", least, " to ", most));
    }
    config.*field = number;
    return absl::OkStatus();
  };
}

auto Bytes(uint64_t Config::*field, uint64_t least) {
  return [=](Config& config, absl::string_view value) {
    absl::StatusOr<uint64_t> bytes = ParseBytes(value);
    if (!bytes.ok()) return bytes.status();
    if (*bytes < least) {
      return absl::InvalidArgumentError(
          absl::StrCat("less than ", FormatBytes(least)));
    }
    config.*field = *bytes;
    return absl::OkStatus();
  };
}

const std::vector<Entry>& Entries() {
  constexpr uint64_t kDay = 86400;
  static const auto* const entries = new std::vector<Entry>{
      {{"runtime_dir", "folder of the sockets and the lock"},
       AbsolutePath(&Config::runtime_dir)},
      {{"state_dir", "folder of the job journal and the logs"},
       AbsolutePath(&Config::state_dir)},
      {{"worker_binary", "the slidedp-worker to start"},
       AbsolutePath(&Config::worker_binary)},
      {{"log_level", "trace, debug, info, warning, error"},
       Text(&Config::log_level)},
      {{"update_threads", "update threads of a job; 0: policy chooses"},
       Count(&Config::update_threads, 0, 1024)},
      {{"max_host_bytes", "most that all jobs may take, as 64GiB; 0: all"},
       Bytes(&Config::max_host_bytes, 0)},
      {{"headroom_bytes", "host memory to leave free, as 256MiB"},
       Bytes(&Config::headroom_bytes, 0)},
      {{"max_running_jobs", "jobs that run at once if memory allows"},
       Count(&Config::max_running_jobs, 1, 64)},
      {{"max_pending_jobs_per_user", "waiting jobs of one user"},
       Count(&Config::max_pending_jobs_per_user, 1, 1'000'000)},
      {{"keep_ended_jobs", "ended jobs to remember"},
       Count(&Config::keep_ended_jobs, 1, 1'000'000)},
      {{"log_max_bytes", "most kept of a rank's log, as 64MiB"},
       Bytes(&Config::log_max_bytes, 4096)},
      {{"heartbeat_s", "seconds between the daemon's heartbeats"},
       Count(&Config::heartbeat_s, 1, 60)},
      {{"lease_s", "silence after which a rank is lost"},
       Count(&Config::lease_s, 2, kDay)},
      {{"join_timeout_s", "for the daemon's own workers to join"},
       Count(&Config::join_timeout_s, 1, kDay)},
      {{"manual_join_timeout_s", "for workers started by hand to join"},
       Count(&Config::manual_join_timeout_s, 1, 30 * kDay)},
      {{"kill_timeout_s", "from a job's abort to SIGKILL"},
       Count(&Config::kill_timeout_s, 1, 3600)},
      {{"stop_timeout_s", "for all jobs to be saved and gone after SIGTERM"},
       Count(&Config::stop_timeout_s, 1, 3600)},
      {{"max_connections_per_user", "open connections of one user"},
       Count(&Config::max_connections_per_user, 4, 100'000)},
      {{"user_group", "group whose members may connect; empty: everybody"},
       Text(&Config::user_group)},
      {{"admin_group", "group whose members administrate"},
       Text(&Config::admin_group)},
  };
  return *entries;
}

std::string KnownKeys() {
  std::string keys;
  for (const Entry& entry : Entries()) {
    absl::StrAppend(&keys, keys.empty() ? "" : ", ", entry.setting.key);
  }
  return keys;
}

}  // namespace

std::string Config::log_folder(uint64_t job) const {
  return absl::StrCat(state_dir, "/logs/", job);
}

Config DefaultConfig(const Surroundings& surroundings) {
  Config config;
  if (surroundings.uid == 0) {
    config.runtime_dir = "/run/slidedpd";
    config.state_dir = "/var/lib/slidedpd";
  } else {
    config.runtime_dir = surroundings.xdg_runtime_dir.empty()
                             ? absl::StrCat("/tmp/slidedpd-", surroundings.uid)
                             : surroundings.xdg_runtime_dir + "/slidedpd";
    // Empty without a home; Validate says what to set.
    if (!surroundings.xdg_state_home.empty()) {
      config.state_dir = surroundings.xdg_state_home + "/slidedpd";
    } else if (!surroundings.home.empty()) {
      config.state_dir = surroundings.home + "/.local/state/slidedpd";
    }
  }
  size_t slash = surroundings.executable.rfind('/');
  config.worker_binary =
      surroundings.executable.substr(0, slash + 1) + "slidedp-worker";
  return config;
}

const std::vector<Setting>& Settings() {
  static const auto* const settings = [] {
    auto* all = new std::vector<Setting>;
    for (const Entry& entry : Entries()) all->push_back(entry.setting);
    return all;
  }();
  return *settings;
}

absl::Status Apply(Config& config, absl::string_view source,
                   absl::string_view key, absl::string_view value) {
  for (const Entry& entry : Entries()) {
    if (key != absl::string_view(entry.setting.key)) continue;
    absl::Status status = entry.set(config, value);
    if (status.ok()) return status;
    return InvalidInput(source, key, value, status.message(),
                        entry.setting.help);
  }
  return InvalidInput(source, key, value, "no such setting",
                      absl::StrCat("known are ", KnownKeys()));
}

absl::StatusOr<std::map<std::string, std::string>> ParseConfigFile(
    absl::string_view yaml, absl::string_view file) {
  std::map<std::string, std::string> settings;
  try {
    YAML::Node root = YAML::Load(std::string(yaml));
    if (root.IsNull()) return settings;
    if (!root.IsMap()) {
      return InvalidInput(file, "", "", "not a map of settings",
                          "write one 'key: value' a line");
    }
    for (const auto& item : root) {
      if (!item.first.IsScalar()) {
        return InvalidInput(file, "", "", "a key is not a word", "");
      }
      std::string key = item.first.Scalar();
      if (!item.second.IsScalar()) {
        return InvalidInput(file, key, "", "not a single value",
                            "write 'key: value'");
      }
      if (!settings.emplace(key, item.second.Scalar()).second) {
        return InvalidInput(file, key, item.second.Scalar(), "given twice",
                            "keep one of them");
      }
    }
  } catch (const YAML::Exception& e) {
    return InvalidInput(file, absl::StrCat("line ", e.mark.line + 1), "", e.msg,
                        "");
  }
  return settings;
}

absl::Status Validate(const Config& config) {
  if (config.lease_s < 2 * config.heartbeat_s) {
    return InvalidInput("", "lease_s", absl::StrCat(config.lease_s),
                        "less than two heartbeats",
                        "raise lease_s or lower heartbeat_s");
  }
  // struct sockaddr_un has 108 bytes with the final zero.
  constexpr size_t kMaxSocketPath = 107;
  if (config.control_socket().size() > kMaxSocketPath) {
    return InvalidInput("", "runtime_dir", config.runtime_dir,
                        "too long for the address of a Unix socket",
                        "use a path of at most 93 bytes");
  }
  if (config.runtime_dir.empty() || config.state_dir.empty() ||
      config.state_dir[0] != '/') {
    return InvalidInput("", "state_dir", config.state_dir, "no folder",
                        "set HOME, XDG_STATE_HOME or --state-dir");
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  static constexpr struct {
    absl::string_view suffix;
    double factor;
  } kUnits[] = {{"TiB", 1099511627776.0},
                {"GiB", 1073741824.0},
                {"MiB", 1048576.0},
                {"KiB", 1024.0},
                {"B", 1.0}};
  uint64_t whole = 0;
  if (absl::SimpleAtoi(text, &whole)) return whole;
  for (const auto& unit : kUnits) {
    if (text.size() <= unit.suffix.size() ||
        text.substr(text.size() - unit.suffix.size()) != unit.suffix) {
      continue;
    }
    absl::string_view digits = absl::StripAsciiWhitespace(
        text.substr(0, text.size() - unit.suffix.size()));
    double number = 0;
    if (digits.empty() || !absl::ascii_isdigit(digits[0]) ||
        !absl::SimpleAtod(digits, &number) ||
        !(number * unit.factor < 9007199254740992.0)) {
      break;
    }
    return static_cast<uint64_t>(std::llround(number * unit.factor));
  }
  return absl::InvalidArgumentError(
      "not a number of bytes such as 4096, 512MiB or 1.5GiB");
}

}  // namespace slidedp::hostd
