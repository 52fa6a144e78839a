// What slidedpctl takes from its surroundings. Read once, in main.
#pragma once

#include <sys/types.h>

#include <istream>
#include <ostream>
#include <string>

#include "hostd/ctl/device.h"
#include "hostd/ctl/interrupt.h"

namespace slidedp::ctl {

struct Environment {
  std::istream* in = nullptr;   // `submit -`
  std::ostream* out = nullptr;  // data
  std::ostream* err = nullptr;  // talk
  Interrupt* interrupt = nullptr;

  uid_t uid = 0;
  std::string current_folder;    // absolute
  std::string program_folder;    // of this program, where slidedpd is too
  std::string command;           // the command line as given, for records
  std::string temporary_folder;  // TMPDIR
  int logical_cpus = 1;
  FindGpus find_gpus;  // empty: there are none

  bool out_is_terminal = false;
  bool err_is_terminal = false;
  int err_columns = 80;

  std::string socket;           // SLIDEDP_SOCKET
  std::string xdg_runtime_dir;  // XDG_RUNTIME_DIR
  std::string no_color;         // NO_COLOR
  std::string term;             // TERM

  // Prefix of /proc and /sys for doctor; "" outside tests.
  std::string system_root;
};

}  // namespace slidedp::ctl
