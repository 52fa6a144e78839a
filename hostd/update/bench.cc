// slidedp-bench-update: CPU AdamW by number of threads, against what the
// memory gives to the same threads for the same bytes in the same run. Prints a
// JSON line for each: {bench, value, unit, target, detail}.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/units.h"
#include "hostd/update/adamw.h"
#include "hostd/update/bench_bound.h"
#include "hostd/update/step_work.h"
#include "hostd/update/topology.h"
#include "nlohmann/json.hpp"

namespace slidedp::hostd {
namespace {

struct Options {
  uint64_t parameters = uint64_t{1} << 28;
  int repetitions = 7;
  std::vector<int> threads;
};

// hi, lo, m, v and the gradient, each on its own pages; as a job has them.
class Arrays {
 public:
  explicit Arrays(uint64_t count) : count_(count) {
    hi_ = Map<bf16>();
    lo_ = Map<int16_t>();
    m_ = Map<float>();
    v_ = Map<float>();
    gradient_ = Map<bf16>();
  }
  PlaneSpan Span(uint64_t begin, uint64_t count) const {
    return {hi_ + begin, lo_ + begin, m_ + begin, v_ + begin, count};
  }
  bf16* gradient() const { return gradient_; }
  uint64_t count() const { return count_; }

 private:
  template <typename T>
  T* Map() {
    void* data = mmap(nullptr, count_ * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    return static_cast<T*>(data);  // until the process ends
  }

  uint64_t count_;
  bf16 *hi_, *gradient_;
  int16_t* lo_;
  float *m_, *v_;
};

// All threads work off the slices; returns the fastest of the repetitions.
using Body = std::function<void(uint64_t begin, uint64_t count)>;
double Seconds(int threads, const std::vector<int>& cpus, uint64_t count,
               int repetitions, const Body& body) {
  std::atomic<uint64_t> next = 0;
  const uint64_t slices = CeilDiv(count, kSliceElements);
  int64_t begin_ns = 0, best_ns = INT64_MAX;
  bool begun = false;
  std::barrier all(threads, [&]() noexcept {
    const int64_t now = MonotonicNs();
    if (begun) best_ns = std::min(best_ns, now - begin_ns);
    begun = !begun;
    begin_ns = now;
    next = 0;
  });
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[t % cpus.size()], &set);
      sched_setaffinity(0, sizeof(set), &set);
      for (int r = 0; r < repetitions; ++r) {
        all.arrive_and_wait();
        for (uint64_t s = next++; s < slices; s = next++) {
          const uint64_t begin = s * kSliceElements;
          body(begin, std::min(kSliceElements, count - begin));
        }
        all.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : pool) thread.join();
  return static_cast<double>(best_ns) * 1e-9;
}

void Print(const std::string& bench, double value, const std::string& unit,
           nlohmann::json target, nlohmann::json detail) {
  std::puts(nlohmann::json{{"bench", bench},
                           {"value", value},
                           {"unit", unit},
                           {"target", std::move(target)},
                           {"detail", std::move(detail)}}
                .dump()
                .c_str());
  std::fflush(stdout);
}

int Run(const Options& options) {
  const absl::StatusOr<HostTopology> host = DetectTopology();
  if (!host.ok()) {
    std::fprintf(stderr, "%s\n", host.status().ToString().c_str());
    return 1;
  }
  // Threads go round the nodes, as a job's do.
  std::vector<int> cpus;
  for (size_t i = 0;; ++i) {
    const size_t before = cpus.size();
    for (const NumaNode& node : host->nodes) {
      if (i < node.cpus.size()) cpus.push_back(node.cpus[i]);
    }
    if (cpus.size() == before) break;
  }
  if (cpus.empty()) {
    std::fprintf(stderr, "no CPU that this process may use\n");
    return 1;
  }
  std::vector<int> counts = options.threads;
  if (counts.empty()) {
    for (int n = 1; n < static_cast<int>(cpus.size()); n *= 2) {
      counts.push_back(n);
    }
    counts.push_back(static_cast<int>(cpus.size()));
  }

  const Arrays arrays(options.parameters);
  // First touch in parallel, and values as in training.
  Seconds(static_cast<int>(cpus.size()), cpus, arrays.count(), 1,
          [&](uint64_t begin, uint64_t count) {
            FillPlanes(arrays.Span(begin, count), arrays.gradient() + begin);
          });
  constexpr double kBytes = 26;  // a parameter
  const double bytes = kBytes * static_cast<double>(arrays.count());
  double worst = 1e9;
  nlohmann::json all = nlohmann::json::array();
  for (int threads : counts) {
    const auto rate = [&](const Body& body) {
      return bytes * 1e-9 /
             Seconds(threads, cpus, arrays.count(), options.repetitions, body);
    };
    const double bound = rate([&](uint64_t begin, uint64_t count) {
      TouchPlanes(arrays.Span(begin, count), arrays.gradient() + begin);
    });
    const AdamWStep step = MakeAdamWStep(1e-5, 0.9, 0.999, 1e-8, 0.01, 1000, 1);
    const double adamw = rate([&](uint64_t begin, uint64_t count) {
      AdamWUpdate(arrays.Span(begin, count), arrays.gradient() + begin, true,
                  step);
    });
    worst = std::min(worst, adamw / bound);
    const nlohmann::json detail = {{"threads", threads},
                                   {"bound_gbps", bound},
                                   {"share_of_bound", adamw / bound}};
    all.push_back(detail);
    Print(absl::StrCat("cpu-adamw-t", threads), adamw, "GB/s", 0.95 * bound,
          detail);
  }
  Print("cpu-adamw", worst, "share of the bound", 0.95,
        {{"parameters", arrays.count()},
         {"bytes_per_parameter", kBytes},
         {"simd", AdamWTargetName()},
         {"nodes", host->nodes.size()},
         {"cpus", cpus.size()},
         {"by_threads", all}});
  return 0;
}

}  // namespace
}  // namespace slidedp::hostd

int main(int argc, char** argv) {
  slidedp::hostd::Options options;
  CLI::App app("CPU AdamW by threads, against the memory's bound");
  app.add_option("--parameters", options.parameters,
                 "Elements of the planes (14 bytes each)")
      ->check(CLI::Range(uint64_t{1} << 16, uint64_t{1} << 40));
  app.add_option("--repetitions", options.repetitions,
                 "Of each measurement; the fastest counts")
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads,
                 "Thread counts; without any 1, 2, 4... and all CPUs")
      ->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  return slidedp::hostd::Run(options);
}
