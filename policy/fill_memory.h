// What the layers keep, offload, and how many slots the window has: the part of
// a plan that follows from a device's memory.
#pragma once

#include "absl/status/status.h"
#include "common/model/layout.h"
#include "policy/plan.h"

namespace slidedp::policy {

// Takes plan.keep, offload_permille, window_slots, grad_slots and
// head_chunk_tokens from problem's choices and, where it leaves the choice,
// from problem.device_memory_bytes. `plan` is complete but for the first two.
//
// In this order: inputs of the first layers are offloaded, then the window and
// what else costs time to be without is made smaller, as far as it takes for
// everything to fit. What is left goes to activations (each layer kept saves a
// forward pass of it), whole layers from the last one on, then cheaper masks
// before them; then to the window (a slot saves a delivery, which costs no time
// while it hides).
absl::Status FillMemory(const Problem& problem,
                        const model::StateLayout& layout, Plan& plan);

}  // namespace slidedp::policy
