// Threads that work off tasks in slices, a pool for each NUMA node of a
// placement. First task first; many threads share a task. Knows nothing of
// planes and words.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "common/base/units.h"
#include "hostd/store/placement.h"
#include "hostd/update/step_work.h"

namespace slidedp::hostd {

enum class TaskKind {
  kSum,       // a piece's chunks into the `reduced` plane
  kNorm,      // one block of a reduced unit
  kRows,      // rows of a piece that no rank's batch uses
  kUpdate,    // a piece, before the clip coefficient is known (c = 1)
  kFinal,     // a piece, once the step is decided
  kUndoRows,  // what kRows did
};

// For traces.
const char* TaskName(TaskKind kind);

// Ordered: turns first, then the lowest unit, which the next forward needs
// first.
struct Task {
  int unit;
  TaskKind kind;
  uint64_t index;  // piece; kNorm: block
  uint64_t turn = kLastTurn;

  bool operator<(const Task& other) const {
    return std::tie(turn, unit, kind, index) <
           std::tie(other.turn, other.unit, other.kind, other.index);
  }
};

class NodePools {
 public:
  // A slice of a task, on thread `thread` of all pools. No lock is held.
  using Run = std::function<void(const Task& task, uint64_t slice, int thread)>;

  // Spreads `threads` over the nodes, at least one on each, in proportion to
  // their CPUs; pins them to their node if there are several.
  NodePools(const Placement& placement, int threads, Run run);
  ~NodePools();  // what is queued is dropped
  NodePools(const NodePools&) = delete;
  NodePools& operator=(const NodePools&) = delete;

  int threads() const { return static_cast<int>(threads_.size()); }
  // Thread-safe. Slices [first, end) of the task.
  void Push(int node, const Task& task, uint64_t first, uint64_t end);
  // Drops what is queued. Not from Run.
  void Drain();  // returns when no slice runs
  // Nothing starts any more; from any thread.
  void Close();

 private:
  struct Slices {
    uint64_t first, end;
  };
  // One per node, on cache lines of its own.
  struct alignas(kCacheLineBytes) Node {
    std::mutex mutex;
    std::condition_variable ready, idle;
    // All below: guarded by mutex; `queued` is also read without.
    std::multimap<Task, Slices> queue;
    std::atomic<bool> queued = false;
    int sleeping = 0, running = 0;
    bool closed = false, ending = false;
  };

  void Work(Node& node, int thread);
  // Waits for work a little while, not holding the mutex.
  static void Spin(const Node& node);

  const Run run_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::thread> threads_;
};

// Threads of each node: `threads` in proportion to `cpus`, at least one each.
std::vector<int> SpreadThreads(const std::vector<int>& cpus, int threads);

}  // namespace slidedp::hostd
