// Runs slidedpctl in this process.
#pragma once

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "hostd/ctl/cli.h"
#include "hostd/ctl/exit_codes.h"
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

struct Outcome {
  int code = 0;
  std::string out, err;

  Json json() const { return Json::parse(out); }
  // Of a stream: one document a line.
  std::vector<Json> lines() const {
    std::vector<Json> all;
    std::istringstream in(out);
    for (std::string line; std::getline(in, line);) {
      all.push_back(Json::parse(line));
    }
    return all;
  }
};

class CtlRunner {
 public:
  CtlRunner() {
    environment.in = &in_;
    environment.out = &out_;
    environment.err = &err_;
    environment.interrupt = &interrupt;
    environment.uid = 1000;
    environment.current_folder = "/";
    environment.logical_cpus = 2;
    // No test reaches a daemon of this host by accident.
    environment.system_root = "/nonexistent";
  }

  Outcome Run(const std::vector<std::string>& args,
              const std::string& input = "") {
    in_ = std::istringstream(input);
    out_.str("");
    err_.str("");
    Outcome outcome;
    outcome.code = RunCtl(args, environment);
    outcome.out = out_.str();
    outcome.err = err_.str();
    return outcome;
  }

  Environment environment;
  Interrupt interrupt;

 private:
  std::istringstream in_;
  std::ostringstream out_, err_;
};

}  // namespace slidedp::ctl
