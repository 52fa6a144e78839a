// What the memory gives for an update's bytes.
#pragma once

#include "common/base/bf16.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

// Values as in training.
void FillPlanes(const PlaneSpan& planes, bf16* gradient);

// STREAM's triad for AdamW's arrays: reads and writes hi, lo, m and v, reads
// the gradient, 26 bytes for each element, and computes next to nothing.
void TouchPlanes(const PlaneSpan& planes, const bf16* gradient);

}  // namespace slidedp::hostd
