// slidedp-bench-host: host memory and links with one unit of 800 M parameters.
#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "CLI/CLI.hpp"
#include "common/device/accelerator.h"
#include "tests/bench/host_bench.h"

namespace slidedp::bench {
namespace {

int Main(int argc, char** argv) {
  device::PrepareAcceleratorProcess();
  const int cpus =
      static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  HostOptions o;
  o.contending_threads = std::max(1, cpus / 2);
  o.origin.command = "slidedp-bench-host";
  for (int i = 1; i < argc; ++i) {
    o.origin.command += std::string(" ") + argv[i];
  }
  CLI::App app(
      "Delivery of one layer from shared memory to devices, alone and beside "
      "its update.",
      "slidedp-bench-host");
  app.add_option("--hidden", o.unit.hidden, "Of the layer")
      ->check(CLI::Range(1024, 65536));
  app.add_option("--intermediate", o.unit.intermediate, "Of the layer")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--contending-threads", o.contending_threads,
                 "Of the update beside deliveries")
      ->check(CLI::Range(1, 4096));
  app.add_option("--chunk-bytes", o.chunk_bytes, "Of a copy")
      ->check(CLI::PositiveNumber);
  app.add_option("--gpus", o.gpus, "Deliveries at once")
      ->check(CLI::Range(1, 64));
  app.add_option("--repeats", o.repeats, "A figure is the median of so many")
      ->check(CLI::Range(1, 1000));
  app.add_option("--device", o.machine.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--json", o.origin.json_file, "Append result lines here");
  app.add_option("--commit", o.origin.commit, "For the result lines");
  app.add_option("--machine", o.origin.machine, "For the result lines");
  CLI11_PARSE(app, argc, argv);
  const auto run = [&]() -> absl::Status {
    absl::StatusOr<std::unique_ptr<HostUnit>> unit =
        HostUnit::Create(o.unit, cpus);
    if (!unit.ok()) return unit.status();
    return BenchDelivery(o, **unit);
  };
  if (const absl::Status status = run(); !status.ok()) {
    std::fprintf(stderr, "slidedp-bench-host: %s\n",
                 std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace slidedp::bench

int main(int argc, char** argv) { return slidedp::bench::Main(argc, argv); }
