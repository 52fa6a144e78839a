#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <utility>

#include "common/base/check.h"
#include "common/trace/trace.h"

namespace slidedp::trace {
namespace {

// A span in atomic words, so that a reader may look at a slot that is being
// overwritten and throw the result away.
constexpr size_t kWords = 6;
using Packed = std::array<uint64_t, kWords>;

Packed Pack(const Span& span) {
  return {reinterpret_cast<uint64_t>(span.name),
          span.step,
          static_cast<uint64_t>(span.begin_ns),
          static_cast<uint64_t>(span.end_ns),
          static_cast<uint64_t>(static_cast<uint32_t>(span.unit)) << 32 |
              static_cast<uint32_t>(span.chunk),
          static_cast<uint64_t>(span.lane)};
}

Span Unpack(const Packed& words) {
  Span span;
  span.name = reinterpret_cast<const char*>(words[0]);
  span.step = words[1];
  span.begin_ns = static_cast<int64_t>(words[2]);
  span.end_ns = static_cast<int64_t>(words[3]);
  span.unit = static_cast<int32_t>(words[4] >> 32);
  span.chunk = static_cast<int32_t>(words[4] & 0xffffffffu);
  span.lane = static_cast<Lane>(words[5]);
  return span;
}

// `sequence` of a slot: 0 never written; 2n+1 span number n is being written;
// 2n+2 it is there. Words are stored with release and loaded with acquire: who
// sees a word of a later span sees that span's sequence too.
struct Slot {
  std::atomic<uint64_t> sequence{0};
  std::array<std::atomic<uint64_t>, kWords> words{};
};

}  // namespace

struct Recorder::Ring {
  explicit Ring(size_t capacity) : slots(capacity) {}
  std::atomic<uint64_t> next{0};
  std::vector<Slot> slots;
};

Recorder::Recorder(size_t capacity) {
  SDP_CHECK(std::has_single_bit(capacity),
            "the capacity of a trace must be a power of two");
  ring_ = std::make_unique<Ring>(capacity);
}

Recorder::~Recorder() = default;

void Recorder::Add(const Span& span) {
  const uint64_t number = ring_->next.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = ring_->slots[number & (ring_->slots.size() - 1)];
  uint64_t sequence = slot.sequence.load(std::memory_order_relaxed);
  // A thread that was held up for a whole turn of the ring gives way: to a
  // later span, or to the one that it is itself still writing.
  if (sequence % 2 != 0 || sequence > 2 * number ||
      !slot.sequence.compare_exchange_strong(sequence, 2 * number + 1,
                                             std::memory_order_acq_rel)) {
    return;
  }
  const Packed packed = Pack(span);
  for (size_t i = 0; i < kWords; ++i) {
    slot.words[i].store(packed[i], std::memory_order_release);
  }
  slot.sequence.store(2 * number + 2, std::memory_order_release);
}

std::vector<Span> Recorder::Snapshot() const {
  std::vector<std::pair<uint64_t, Span>> found;
  found.reserve(ring_->slots.size());
  // From the oldest on: in order, unless something is added meanwhile.
  const uint64_t oldest = ring_->next.load(std::memory_order_acquire);
  for (size_t i = 0; i < ring_->slots.size(); ++i) {
    const Slot& slot = ring_->slots[(oldest + i) & (ring_->slots.size() - 1)];
    const uint64_t before = slot.sequence.load(std::memory_order_acquire);
    if (before == 0 || before % 2 != 0) continue;
    Packed packed;
    for (size_t w = 0; w < kWords; ++w) {
      packed[w] = slot.words[w].load(std::memory_order_acquire);
    }
    if (slot.sequence.load(std::memory_order_relaxed) != before) continue;
    found.emplace_back(before, Unpack(packed));
  }
  const auto earlier = [](const auto& a, const auto& b) {
    return a.first < b.first;
  };
  if (!std::is_sorted(found.begin(), found.end(), earlier)) {
    std::sort(found.begin(), found.end(), earlier);
  }
  std::vector<Span> spans;
  spans.reserve(found.size());
  for (auto& [sequence, span] : found) spans.push_back(span);
  return spans;
}

}  // namespace slidedp::trace
