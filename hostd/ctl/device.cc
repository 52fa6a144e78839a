#include "hostd/ctl/device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

absl::StatusOr<ChosenDevice> ChooseDevice(v1::DeviceKind asked, uint32_t ranks,
                                          absl::string_view file,
                                          const FindGpus& find_gpus) {
  ChosenDevice chosen;
  if (asked == v1::DEVICE_KIND_CPU) return chosen;
  const bool must = asked == v1::DEVICE_KIND_CUDA;
  auto refuse = [&](absl::string_view problem, absl::string_view remedy) {
    return InvalidInput(file, "device", Word(asked), problem, remedy);
  };
  absl::StatusOr<hostd::GpuFacts> facts =
      find_gpus ? find_gpus() : absl::NotFoundError("");
  if (absl::IsNotFound(facts.status())) {
    if (!must) return chosen;
    return refuse("this host shows no NVIDIA GPU (no /dev/nvidiactl)",
                  "use device: cpu, or a host or container with GPUs");
  }
  if (!facts.ok()) {
    return refuse(
        absl::StrCat("the GPUs can't be counted: ", facts.status().message()),
        must ? "install slidedp-worker beside slidedpctl" : "use device: cpu");
  }
  if (!facts->built) {
    if (must) {
      return refuse("this slidedp-worker is built without CUDA",
                    "install a build with it, or use device: cpu");
    }
    chosen.warning =
        "this host has NVIDIA GPUs, but this slidedp-worker is built without "
        "CUDA: the job computes on the CPU";
    return chosen;
  }
  if (!facts->problem.empty()) {
    return refuse(facts->problem,
                  "`nvidia-smi` shows whether the driver works; or use device: "
                  "cpu");
  }
  if (facts->gpus.empty()) {
    if (!must) return chosen;
    return refuse("no GPU is visible",
                  "look at CUDA_VISIBLE_DEVICES, or use device: cpu");
  }
  if (facts->gpus.size() < ranks) {
    return InvalidInput(
        file, "ranks", absl::StrCat(ranks),
        absl::StrCat("device ", Word(asked), " needs a GPU for each, ",
                     facts->gpus.size(),
                     facts->gpus.size() == 1 ? " is visible" : " are visible"),
        absl::StrCat("use at most ", facts->gpus.size(), ", or device: cpu"));
  }
  chosen.device = v1::DEVICE_KIND_CUDA;
  chosen.gpu_memory_bytes =
      std::min_element(facts->gpus.begin(), facts->gpus.end(),
                       [](const hostd::Gpu& a, const hostd::Gpu& b) {
                         return a.memory_bytes < b.memory_bytes;
                       })
          ->memory_bytes;
  return chosen;
}

}  // namespace slidedp::ctl
