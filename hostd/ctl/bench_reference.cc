#include "hostd/ctl/bench_reference.h"

#include <sys/wait.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/ctl/bench_process.h"

namespace slidedp::ctl {
namespace {

constexpr uint64_t kMaxLineBytes = 16 << 20;

}  // namespace

absl::StatusOr<Json> RunReference(const std::string& program,
                                  const std::string& folder,
                                  const BenchOptions& options,
                                  const std::string& device,
                                  uint64_t micro_batches,
                                  Interrupt& interrupt) {
  const std::string results = absl::StrCat(folder, "/reference.jsonl");
  const std::string log = absl::StrCat(folder, "/reference.log");
  std::vector<std::string> argv = {
      program,
      "step",
      "--model",
      options.model,
      "--layers",
      absl::StrCat(options.layers),
      "--vocab",
      absl::StrCat(options.vocab),
      "--seq",
      absl::StrCat(options.sequence_length),
      "--micro-batch-size",
      absl::StrCat(options.micro_batch_size),
      "--micro-batches",
      absl::StrCat(micro_batches),
      "--steps",
      absl::StrCat(options.steps),
      "--warmup",
      absl::StrCat(options.warmup),
      "--device",
      device,
      "--json",
      results,
  };
  if (options.recompute) argv.push_back("--recompute");
  if (options.gpu_memory_limit_gib > 0) {
    argv.push_back("--gpu-memory-limit");
    argv.push_back(absl::StrCat(options.gpu_memory_limit_gib));
  }
  SDP_ASSIGN_OR_RETURN(ChildProcess child, ChildProcess::Start(argv, log));
  SDP_ASSIGN_OR_RETURN(const int status, child.Wait(interrupt));
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return absl::InternalError(absl::StrCat(
        "the compute-only reference failed (", program, "):\n", LogTail(log)));
  }
  SDP_ASSIGN_OR_RETURN(const std::string text,
                       ReadFile(results, kMaxLineBytes));
  Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object() || !line.contains("value") ||
      !line.contains("detail")) {
    return absl::InternalError(
        absl::StrCat(program, " wrote no result: ", text));
  }
  return line;
}

}  // namespace slidedp::ctl
