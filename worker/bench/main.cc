// slidedp-bench-ops: what a device computes with alone, without daemon or host
// traffic.
#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "CLI/CLI.hpp"
#include "common/device/accelerator.h"
#include "worker/bench/commands.h"

namespace slidedp::bench {
namespace {

void AddCommon(CLI::App& app, Options& o) {
  app.add_option("--model", o.model, "Published shape, e.g. qwen3-8b");
  app.add_option("--layers", o.layers, "Instead of the shape's; 0: as it is")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--vocab", o.vocab, "Instead of the shape's; 0: as it is")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seq", o.sequence, "Tokens of a sequence")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--micro-batch-size", o.micro_batch_size, "Sequences at once")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--head-chunk-tokens", o.head_chunk_tokens,
                 "Tokens whose logits exist at once; 0: the plan's")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--device", o.machine.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--threads", o.machine.threads, "Of the CPU device")
      ->check(CLI::Range(1, 4096));
  app.add_option("--gpu-memory-limit", o.machine.gpu_memory_limit_gib,
                 "GiB; 0: the GPU's own")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--deterministic", o.machine.deterministic,
               "Bitwise repeatable ops");
  app.add_option("--samples", o.machine.samples,
                 "A figure is the median of so many")
      ->check(CLI::Range(1, 1000));
  app.add_option("--sample-seconds", o.machine.sample_seconds,
                 "Least time of a sample")
      ->check(CLI::Range(0.0, 60.0));
  app.add_option("--json", o.origin.json_file, "Append result lines here");
  app.add_option("--commit", o.origin.commit, "For the result lines");
  app.add_option("--machine", o.origin.machine, "For the result lines");
}

int Main(int argc, char** argv) {
  device::PrepareAcceleratorProcess();
  Options options;
  options.machine.threads =
      static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  options.origin.command = "slidedp-bench-ops";
  for (int i = 1; i < argc; ++i) {
    options.origin.command += std::string(" ") + argv[i];
  }
  CLI::App app(
      "Measures ops, layers, the loss head and whole steps of a "
      "published shape on one device, without daemon or host traffic.",
      "slidedp-bench-ops");
  app.require_subcommand(1);
  absl::Status (*run)(const Options&) = nullptr;
  auto add = [&](const char* name, const char* help,
                 absl::Status (*command)(const Options&)) {
    CLI::App* sub = app.add_subcommand(name, help);
    AddCommon(*sub, options);
    sub->callback([&run, command] { run = command; });
    return sub;
  };
  add("ops", "Every op alone", RunOps);
  add("layer", "A layer against its matrix products and attention", RunLayer);
  add("head", "Final norm, projection and cross-entropy", RunHead);
  CLI::App* step = add("step", "Whole steps, compute only", RunStep);
  step->add_option("--micro-batches", options.micro_batches, "Of a step")
      ->check(CLI::Range(1, 1 << 16));
  step->add_option("--steps", options.steps, "Measured")
      ->check(CLI::Range(1, 100000));
  step->add_option("--warmup", options.warmup, "Before them; at least 1")
      ->check(CLI::Range(0, 100000));
  step->add_flag("--recompute", options.recompute,
                 "Keep only the layers' inputs");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = run(options);
  if (!status.ok()) {
    std::fprintf(stderr, "slidedp-bench-ops: %s\n",
                 std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace slidedp::bench

int main(int argc, char** argv) { return slidedp::bench::Main(argc, argv); }
