#include "hostd/update/node_pools.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"

namespace slidedp::hostd {
namespace {

// A thread that runs out of work looks for more this long before it sleeps:
// about what waking it costs. Chunks of one link arrive every 80 us.
constexpr int64_t kSpinNs = 20'000;

// Failure costs speed only: a cpuset may have been narrowed since the topology
// was read.
void PinTo(const NumaNode& node, int thread) {
  const int last = *std::max_element(node.cpus.begin(), node.cpus.end());
  cpu_set_t* set = CPU_ALLOC(last + 1);
  const size_t bytes = CPU_ALLOC_SIZE(last + 1);
  CPU_ZERO_S(bytes, set);
  for (int cpu : node.cpus) CPU_SET_S(cpu, bytes, set);
  const int error = pthread_setaffinity_np(pthread_self(), bytes, set);
  CPU_FREE(set);
  if (error != 0) {
    spdlog::warn("update thread {} can't be pinned to NUMA node {}: error {}",
                 thread, node.os_index, error);
  }
}

}  // namespace

const char* TaskName(TaskKind kind) {
  switch (kind) {
    case TaskKind::kSum:
      return "sum";
    case TaskKind::kNorm:
      return "norm";
    case TaskKind::kRows:
      return "unused rows";
    case TaskKind::kUpdate:
      return "update";
    case TaskKind::kFinal:
      return "final update";
    case TaskKind::kUndoRows:
      return "undo rows";
  }
  SDP_CHECK(false, "task kind");
}

std::vector<int> SpreadThreads(const std::vector<int>& cpus, int threads) {
  std::vector<int> spread(cpus.size(), 1);
  for (int left = threads - static_cast<int>(cpus.size()); left > 0; --left) {
    // To the node with the fewest threads for its CPUs; the first of equals.
    size_t best = 0;
    for (size_t n = 1; n < cpus.size(); ++n) {
      if (int64_t{spread[n]} * cpus[best] < int64_t{spread[best]} * cpus[n]) {
        best = n;
      }
    }
    ++spread[best];
  }
  return spread;
}

NodePools::NodePools(const Placement& placement, int threads, Run run)
    : run_(std::move(run)) {
  std::vector<int> cpus(placement.node_count(), 1);
  for (size_t n = 0; n < placement.nodes.size(); ++n) {
    cpus[n] = std::max<int>(1, placement.nodes[n].cpus.size());
  }
  for (size_t n = 0; n < cpus.size(); ++n) {
    nodes_.push_back(std::make_unique<Node>());
  }
  const std::vector<int> spread = SpreadThreads(cpus, threads);
  int thread = 0;
  for (size_t n = 0; n < spread.size(); ++n) {
    for (int i = 0; i < spread[n]; ++i, ++thread) {
      const NumaNode* pin =
          nodes_.size() > 1 && !placement.nodes[n].cpus.empty()
              ? &placement.nodes[n]
              : nullptr;
      threads_.emplace_back([this, thread, pin, node = nodes_[n].get()] {
        if (pin != nullptr) PinTo(*pin, thread);
        Work(*node, thread);
      });
    }
  }
}

NodePools::~NodePools() {
  for (auto& node : nodes_) {
    {
      std::lock_guard lock(node->mutex);
      node->ending = true;
      node->queued = true;  // ends spinning
    }
    node->ready.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void NodePools::Push(int n, const Task& task, uint64_t first, uint64_t end) {
  SDP_CHECK(first < end, "a task without slices");
  Node& node = *nodes_[n];
  uint64_t wake = 0;
  bool all = false;
  {
    std::lock_guard lock(node.mutex);
    if (node.closed) return;
    node.queue.insert({task, {first, end}});
    node.queued = true;
    wake = std::min<uint64_t>(node.sleeping, end - first);
    all = wake == static_cast<uint64_t>(node.sleeping) && wake > 1;
  }
  if (all) return node.ready.notify_all();
  for (; wake > 0; --wake) node.ready.notify_one();
}

void NodePools::Drain() {
  for (auto& node : nodes_) {
    std::unique_lock lock(node->mutex);
    node->queue.clear();
    node->queued = node->ending;
    node->idle.wait(lock, [&] { return node->running == 0; });
  }
}

void NodePools::Close() {
  for (auto& node : nodes_) {
    std::lock_guard lock(node->mutex);
    node->closed = true;
    node->queue.clear();
    node->queued = node->ending;
  }
}

void NodePools::Spin(const Node& node) {
  const int64_t end_ns = MonotonicNs() + kSpinNs;
  do {
    for (int i = 0; i < 64; ++i) {
      if (node.queued.load(std::memory_order_relaxed)) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  } while (MonotonicNs() < end_ns);
}

void NodePools::Work(Node& node, int thread) {
  std::unique_lock lock(node.mutex);
  while (true) {
    if (node.queue.empty() && !node.ending) {
      lock.unlock();
      Spin(node);
      lock.lock();
      ++node.sleeping;
      node.ready.wait(lock, [&] { return node.ending || !node.queue.empty(); });
      --node.sleeping;
    }
    if (node.ending) return;
    const auto next = node.queue.begin();
    const Task task = next->first;
    const uint64_t slice = next->second.first++;
    if (next->second.first == next->second.end) {
      node.queue.erase(next);
      node.queued = !node.queue.empty();
    }
    ++node.running;
    lock.unlock();
    run_(task, slice, thread);
    lock.lock();
    if (--node.running == 0) node.idle.notify_all();
  }
}

}  // namespace slidedp::hostd
