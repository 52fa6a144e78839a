#include "hostd/ctl/progress.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/units.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

constexpr int64_t kPlainIntervalNs = 30'000'000'000;
constexpr int64_t kBarIntervalNs = 100'000'000;
constexpr double kMeanWeight = 0.2;
constexpr size_t kMaxReasonBytes = 1000;

double Mean(double mean, double value) {
  if (!std::isfinite(value) || value <= 0) return mean;
  return mean <= 0 ? value : mean + kMeanWeight * (value - mean);
}

std::string Bar(uint64_t step, uint64_t steps, int width) {
  double done = steps == 0 ? 0
                           : static_cast<double>(std::min(step, steps)) /
                                 static_cast<double>(steps);
  int filled = static_cast<int>(done * width);
  std::string bar(width, ' ');
  std::fill_n(bar.begin(), filled, '=');
  if (filled < width) bar[filled] = '>';
  return absl::StrCat("[", bar, "]");
}

}  // namespace

std::string Progress::Line(const v1::StepRecord& step, uint64_t steps,
                           double seconds_per_step, double tokens_per_second,
                           bool bar, int columns, const std::string& beside) {
  std::string head = absl::StrCat("step ", step.step(), "/", steps);
  std::string tail;
  if (step.skipped()) {
    absl::StrAppend(
        &tail, "skipped: ", Printable(step.skip_reason(), kMaxReasonBytes));
  } else {
    absl::StrAppendFormat(&tail, "loss %.4f", step.loss());
  }
  if (tokens_per_second > 0) {
    absl::StrAppendFormat(&tail, "  %.0f tokens/s", tokens_per_second);
  }
  if (seconds_per_step > 0 && step.step() < steps) {
    absl::StrAppend(&tail, "  ETA ",
                    FormatSeconds(seconds_per_step *
                                  static_cast<double>(steps - step.step())));
  }
  if (!beside.empty()) absl::StrAppend(&tail, "  ", beside);
  std::string middle = "  ";
  if (bar) {
    int width = columns - 1 - static_cast<int>(head.size() + tail.size()) - 5;
    if (width >= 5) {
      middle =
          absl::StrCat(" ", Bar(step.step(), steps, std::min(width, 40)), " ");
    }
  }
  std::string line = absl::StrCat(head, middle, tail);
  if (bar && static_cast<int>(line.size()) > columns - 1) {
    line.resize(std::max(0, columns - 1));
  }
  return line;
}

void Progress::EraseBar() {
  if (!bar_drawn_) return;
  err_ << "\r\x1b[K";
  bar_drawn_ = false;
  step_shown_ = false;
}

void Progress::Draw(bool force, int64_t now_ns) {
  if (!has_step_ || step_shown_) return;
  int64_t interval = terminal_ ? kBarIntervalNs : kPlainIntervalNs;
  if (!force && shown_ns_ != 0 && now_ns - shown_ns_ < interval) return;
  std::string line = Line(step_, info_.steps(), seconds_, tokens_per_second_,
                          terminal_, columns_, Saving());
  if (terminal_) {
    err_ << "\r" << line << "\x1b[K" << std::flush;
    bar_drawn_ = true;
  } else {
    err_ << line << "\n" << std::flush;
  }
  step_shown_ = true;
  shown_ns_ = now_ns;
}

void Progress::OnInfo(const v1::JobInfo& info, int64_t now_ns) {
  bool changed =
      info.state() != info_.state() || info.reason() != info_.reason();
  info_ = info;
  if (!changed) return DrawMoved(now_ns);
  if (terminal_) {
    EraseBar();
  } else {
    Draw(/*force=*/true, now_ns);
  }
  err_ << "job " << info.id() << " is " << Word(info.state());
  if (!info.reason().empty()) {
    err_ << ": " << Printable(info.reason(), kMaxReasonBytes);
  }
  err_ << "\n" << std::flush;
  if (terminal_ && !HasEnded(info.state())) Draw(/*force=*/true, now_ns);
}

std::string Progress::Saving() const {
  if (!info_.progress().checkpointing() || info_.load_bytes() == 0) return "";
  return absl::StrFormat("saving %.0f %%",
                         100 * static_cast<double>(info_.loaded_bytes()) /
                             static_cast<double>(info_.load_bytes()));
}

// A bar on a terminal, else a line now and then. A checkpoint is beside the
// steps.
void Progress::DrawMoved(int64_t now_ns) {
  if (info_.load_bytes() == 0) return;
  if (info_.progress().checkpointing()) {
    step_shown_ = false;
    return Draw(/*force=*/false, now_ns);
  }
  const bool done = info_.loaded_bytes() >= info_.load_bytes();
  const int64_t interval = terminal_ ? kBarIntervalNs : kPlainIntervalNs;
  if (!done && shown_ns_ != 0 && now_ns - shown_ns_ < interval) return;
  const std::string text =
      absl::StrCat("loading ", FormatBytes(info_.loaded_bytes()), " of ",
                   FormatBytes(info_.load_bytes()));
  const int width =
      std::min(40, columns_ - 1 - static_cast<int>(text.size()) - 3);
  if (!terminal_ || width < 5) {
    err_ << text << "\n" << std::flush;
  } else {
    err_ << "\r" << text << " "
         << Bar(info_.loaded_bytes(), info_.load_bytes(), width) << "\x1b[K"
         << std::flush;
    bar_drawn_ = true;
  }
  shown_ns_ = now_ns;
}

void Progress::OnEval(const v1::EvalRecord& eval) {
  if (terminal_) {
    EraseBar();
  } else {
    Draw(/*force=*/true, shown_ns_);
  }
  err_ << absl::StrFormat("evaluation after step %d: loss %.4f%s\n",
                          eval.step(), eval.loss(), eval.best() ? ", best" : "")
       << std::flush;
}

void Progress::OnStep(const v1::StepRecord& step, int64_t now_ns) {
  step_ = step;
  has_step_ = true;
  step_shown_ = false;
  seconds_ = Mean(seconds_, step.seconds());
  if (step.seconds() > 0) {
    tokens_per_second_ =
        Mean(tokens_per_second_,
             static_cast<double>(step.tokens()) / step.seconds());
  }
  bool last = info_.steps() > 0 && step.step() >= info_.steps();
  Draw(/*force=*/last || step.skipped(), now_ns);
}

void Progress::Finish() {
  Draw(/*force=*/true, shown_ns_);
  if (bar_drawn_) err_ << "\n" << std::flush;
  bar_drawn_ = false;
}

}  // namespace slidedp::ctl
