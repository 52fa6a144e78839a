#include "policy/peak_rates.h"

#include "absl/strings/match.h"

namespace slidedp::policy {
namespace {

struct Peak {
  absl::string_view name;
  double tflops;
};

// The first whose name is part of the description counts.
constexpr Peak kPeaks[] = {
    {"H100 PCIe", 756},      {"H100 NVL", 835},   {"H100", 989.4},
    {"GH200", 989.4},        {"H200", 989.4},     {"H800", 989.4},
    {"A100", 312},           {"A800", 312},       {"A40", 149.7},
    {"L40S", 362},           {"L40", 181},        {"RTX A6000", 154.8},
    {"RTX 6000 Ada", 364.2}, {"RTX 5090", 209.5}, {"RTX 4090 D", 0},
    {"RTX 4090", 165.2},     {"RTX 3090 Ti", 80}, {"RTX 3090", 71},
};

}  // namespace

double PeakBf16FlopsPerSecond(absl::string_view description) {
  for (const Peak& peak : kPeaks) {
    if (absl::StrContains(description, peak.name)) return peak.tflops * 1e12;
  }
  return 0;
}

}  // namespace slidedp::policy
