// How a job that is being followed shows on stderr: one bar, redrawn, on a
// terminal; otherwise plain lines: the first step, then one at most every 30 s,
// the last step, and every change of state.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "proto/job.pb.h"

namespace slidedp::ctl {

class Progress {
 public:
  // `columns`: of the terminal. Times are given, so nothing here reads a clock.
  Progress(bool terminal, int columns, std::ostream& err)
      : terminal_(terminal), columns_(columns), err_(err) {}

  void OnInfo(const v1::JobInfo& info, int64_t now_ns);
  void OnEval(const v1::EvalRecord& eval);
  void OnStep(const v1::StepRecord& step, int64_t now_ns);
  // Leaves the cursor at the start of a line, the last step shown.
  void Finish();

  // "step 12/60 [====>     ] loss 2.3456  1234 tokens/s  ETA 3m05s", and what
  // goes on beside it.
  static std::string Line(const v1::StepRecord& step, uint64_t steps,
                          double seconds_per_step, double tokens_per_second,
                          bool bar, int columns,
                          const std::string& beside = "");

 private:
  void Draw(bool force, int64_t now_ns);
  void DrawMoved(int64_t now_ns);
  std::string Saving() const;  // empty: no checkpoint is under way
  void EraseBar();

  const bool terminal_;
  const int columns_;
  std::ostream& err_;

  v1::JobInfo info_;
  v1::StepRecord step_;
  bool has_step_ = false;
  bool step_shown_ = false;  // step_ stands on the screen
  bool bar_drawn_ = false;
  int64_t shown_ns_ = 0;
  // Exponential means, so that ETA follows a change of speed.
  double seconds_ = 0, tokens_per_second_ = 0;
};

}  // namespace slidedp::ctl
