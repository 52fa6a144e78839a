// Linked into every GPU test: what a worker's main does first.
#include "common/device/accelerator.h"

namespace slidedp::device {
namespace {

const bool prepared = [] {
  PrepareAcceleratorProcess();
  return true;
}();

}  // namespace
}  // namespace slidedp::device
