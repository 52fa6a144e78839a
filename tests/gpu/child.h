// A second process for a test. CUDA does not survive fork, so the child is this
// binary anew, running one test that is otherwise disabled.
#pragma once

#include <string>
#include <vector>

namespace slidedp::testing {

// Runs the disabled test "Suite.DISABLED_Name" of this binary in a child that
// inherits `fds` as descriptors 3, 4, ..., and returns its process id.
int SpawnTest(const std::string& test, const std::vector<int>& fds);

// Exit status, or 128 + signal.
int AwaitChild(int pid);

}  // namespace slidedp::testing
