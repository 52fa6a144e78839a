// slidedpctl top: what the jobs that have not ended are doing, again and again
// on a terminal, else once.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/clock.h"
#include "common/base/units.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/table.h"

namespace slidedp::ctl {
namespace {

constexpr auto kInterval = std::chrono::seconds(2);

std::string Real(double value, const char* format, bool known) {
  if (!known || !std::isfinite(value) || value <= 0) return "-";
  return absl::StrFormat(*absl::ParsedFormat<'f'>::New(format), value);
}

std::string Bytes(uint64_t bytes) {
  return bytes == 0 ? "-" : FormatBytes(bytes);
}

// What it is doing, beside its steps.
std::string Doing(const v1::JobInfo& job) {
  if (job.load_bytes() > 0) {
    return absl::StrCat(job.progress().checkpointing() ? "saving " : "loading ",
                        FormatBytes(job.loaded_bytes()), " of ",
                        FormatBytes(job.load_bytes()));
  }
  return job.reason();
}

Table TopTable(const std::vector<v1::JobInfo>& jobs) {
  constexpr Align kRight = Align::kRight;
  Table table({{"ID", kRight},
               {"NAME"},
               {"STATE"},
               {"STEP", kRight},
               {"LOSS", kRight},
               {"EVAL", kRight},
               {"TOKENS/s", kRight},
               {"MFU", kRight},
               {"HOST", kRight},
               {"DEVICE", kRight},
               {"ETA", kRight},
               {"DOING"}});
  for (const v1::JobInfo& job : jobs) {
    table.Add({{absl::StrCat(job.id())},
               {job.name().empty() ? "-" : job.name()},
               {Word(job.state()), StateColor(job.state())},
               {absl::StrCat(job.step(), "/", job.steps())},
               {Real(job.last_loss(), "%.4f", job.step() > 0)},
               {Real(job.eval_loss(), "%.4f", job.has_eval_loss())},
               {Real(job.tokens_per_second(), "%.0f", true)},
               {Real(100 * job.mfu(), "%.1f%%", job.has_mfu())},
               {Bytes(job.host_pss_peak_bytes())},
               {Bytes(job.device_peak_bytes())},
               {EtaText(job)},
               {Doing(job)}});
  }
  return table;
}

// Until `duration` has passed; false: Ctrl-C.
bool Pause(Interrupt& interrupt, std::chrono::nanoseconds duration) {
  std::mutex mutex;
  std::condition_variable changed;
  interrupt.Arm([&] {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, duration);
  }
  interrupt.Arm(nullptr);
  return !interrupt.raised();
}

}  // namespace

ExitCode Top(const Context& context) {
  ControlClient client(context.socket);
  const bool again = context.environment.out_is_terminal && !context.json() &&
                     context.output != Output::kName;
  do {
    auto reply = client.List(/*ended=*/false);
    if (!reply.ok()) return context.FailCall(reply.status());
    const std::vector<v1::JobInfo> jobs(reply->jobs().begin(),
                                        reply->jobs().end());
    if (context.json()) {
      Json json = JsonDocument();
      json["jobs"] = Json::array();
      for (const v1::JobInfo& job : jobs) json["jobs"].push_back(JsonJob(job));
      context.out() << ToText(json) << "\n";
    } else if (context.output == Output::kName) {
      for (const v1::JobInfo& job : jobs) context.out() << job.id() << "\n";
    } else {
      // From the top left corner over what stands there.
      if (again) {
        context.out() << "\x1b[H\x1b[J" << LocalTimeText(UnixMicros()) << "  "
                      << jobs.size() << (jobs.size() == 1 ? " job" : " jobs")
                      << (reply->draining() ? ", draining" : "") << "\n\n";
      }
      TopTable(jobs).Print(context.headers, context.color, context.out());
    }
    context.out().flush();
  } while (again && Pause(*context.environment.interrupt, kInterval));
  return kExitOk;
}

}  // namespace slidedp::ctl
