// Memory policy of a mapped segment (mbind).
#pragma once

#include "common/shm/segment.h"
#include "hostd/store/placement.h"

namespace slidedp::hostd {

// Pages of the range that do not exist yet will come from the node while it has
// room, else from another one: a full node must cost speed, not the job.
// Failure is a warning for the same reason.
void BindToNode(const shm::Mapping& mapping, const PlacedRange& range,
                const Placement& placement);

}  // namespace slidedp::hostd
