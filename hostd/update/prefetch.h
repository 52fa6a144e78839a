// Asking for the planes before they are needed.
#pragma once

#include <cstdint>

#include "common/base/bf16.h"
#include "hostd/store/host_state.h"
#include "hwy/base.h"
#include "hwy/cache_control.h"

namespace slidedp::hostd {

// How many elements ahead: the arithmetic of few elements fills the processor's
// window, so that it would ask too late, and what it guesses by itself ends
// with each page.
inline constexpr uint64_t kAheadElements = 512;

// Element i + kAheadElements; a prefetch past the end does nothing. Always
// inline: g++ takes a function that only prefetches for one without effect.
HWY_INLINE void PrefetchPlanes(const PlaneSpan& planes, uint64_t i) {
  hwy::Prefetch(planes.hi + i + kAheadElements);
  hwy::Prefetch(planes.lo + i + kAheadElements);
  hwy::Prefetch(planes.m + i + kAheadElements);
  hwy::Prefetch(planes.v + i + kAheadElements);
}

template <typename T>
HWY_INLINE void PrefetchGradient(const T* gradient, uint64_t i) {
  hwy::Prefetch(gradient + i + kAheadElements);
}

}  // namespace slidedp::hostd
