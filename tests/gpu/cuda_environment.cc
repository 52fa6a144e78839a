// Linked into every GPU test: what a worker's main does first.
#include "common/device/cuda_device.h"

namespace slidedp::device {
namespace {

const bool prepared = [] {
  PrepareCudaProcess();
  return true;
}();

}  // namespace
}  // namespace slidedp::device
