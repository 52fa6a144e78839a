#include "common/base/log.h"

#include <array>
#include <memory>

#include "common/base/status.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace slidedp {
namespace {

// syslog(3) priority of a record, as sd-daemon(3) wants it before a line.
class PriorityFlag : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    // trace, debug, info, warning, error, critical, off
    static constexpr std::array<char, 7> kPriority = {'7', '7', '6', '4',
                                                      '3', '2', '2'};
    const char text[] = {'<', kPriority.at(message.level), '>'};
    out.append(text, text + sizeof(text));
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return spdlog::details::make_unique<PriorityFlag>();
  }
};

}  // namespace

absl::Status InitLogging(const std::string& role, const std::string& level,
                         bool journal) {
  const spdlog::level::level_enum parsed = spdlog::level::from_str(level);
  // from_str answers `off` to every text that it doesn't know.
  if (parsed == spdlog::level::off && level != "off") {
    return InvalidInput("", "log level", level, "unknown level",
                        "use trace, debug, info, warning, error, critical or "
                        "off");
  }
  std::string escaped_role;
  for (char c : role) {
    escaped_role += c;
    if (c == '%') escaped_role += '%';
  }
  const std::string pattern =
      journal ? absl::StrCat("%*", escaped_role, ": %v")
              : absl::StrCat("%Y-%m-%d %H:%M:%S.%e %L ", escaped_role, ": %v");
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<PriorityFlag>('*').set_pattern(pattern);

  auto logger = std::make_shared<spdlog::logger>(
      "", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->set_level(parsed);
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  return absl::OkStatus();
}

}  // namespace slidedp
