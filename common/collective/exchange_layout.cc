#include "common/collective/exchange_layout.h"

#include "common/collective/exchange.h"

namespace slidedp::collective {

Exchange::Exchange(void* region, int world_size, size_t staging_bytes_per_rank)
    : region_(static_cast<char*>(region)),
      world_size_(world_size),
      buffer_bytes_(ExchangeBufferBytes(world_size, staging_bytes_per_rank)) {}

ExchangeHeader& Exchange::header() const {
  return *reinterpret_cast<ExchangeHeader*>(region_);
}

RankWords& Exchange::words(int rank) const {
  return reinterpret_cast<RankWords*>(region_ + sizeof(ExchangeHeader))[rank];
}

char* Exchange::staging(int rank, uint64_t buffer) const {
  return region_ + sizeof(ExchangeHeader) + world_size_ * sizeof(RankWords) +
         (static_cast<size_t>(rank) * 2 + buffer) * buffer_bytes_;
}

}  // namespace slidedp::collective
