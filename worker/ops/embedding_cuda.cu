// A row of the table, which may lie in host memory, is read by the first token
// of its id; the others copy what that one has.
//
// The gradient needs the positions of each id. A stable radix sort of (id,
// position) gives them in ascending order; one row of blocks per id then adds
// them one by one, as a loop over tokens would.
#include <utility>

#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;

// firsts [vocab]: of each id the first token; on entry larger than any.
__global__ void __launch_bounds__(kThreads)
    FindFirsts(const int32_t* ids, int64_t tokens, int64_t vocab,
               int32_t* firsts) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= tokens) return;
  const int32_t id = ids[t];
  if (id < 0 || id >= vocab) __trap();
  atomicMin(firsts + id, static_cast<int32_t>(t));
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    GatherFirsts(const int32_t* ids, const int32_t* firsts, const bf16* table,
                 int64_t tokens, int64_t hidden, T* out) {
  const int64_t i =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= hidden) return;
  for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) {
    const int32_t id = ids[t];
    if (firsts[id] != t) continue;
    float v[N];
    Load(table + id * hidden + i, v);
    Store(v, out + t * hidden + i);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    CopyToOthers(const int32_t* ids, const int32_t* firsts, int64_t tokens,
                 int64_t hidden, T* out) {
  const int64_t i =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= hidden) return;
  for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) {
    const int64_t first = firsts[ids[t]];
    if (first == t) continue;
    float v[N];
    Load(out + first * hidden + i, v);
    Store(v, out + t * hidden + i);
  }
}

// One pass of the sort: by 8 bits of the id. A block has a thread for each
// value of them and goes over kChunk tokens in order, so it needs no atomics
// and is stable.
constexpr int kValues = 256;
constexpr int kBits = 8;
constexpr int64_t kChunk = 1024;

__device__ void LoadDigits(const int32_t* ids, int64_t first, int count,
                           int shift, uint8_t* digits) {
  for (int i = threadIdx.x; i < count; i += kValues) {
    digits[i] = static_cast<uint8_t>(ids[first + i] >> shift);
  }
  __syncthreads();
}

__device__ int ChunkSize(int64_t first, int64_t tokens) {
  return static_cast<int>(min(kChunk, tokens - first));
}

// counts [chunk][value]
__global__ void __launch_bounds__(kValues)
    CountDigits(const int32_t* ids, int64_t tokens, int shift,
                int32_t* counts) {
  __shared__ uint8_t digits[kChunk];
  const int64_t first = blockIdx.x * kChunk;
  const int count = ChunkSize(first, tokens);
  LoadDigits(ids, first, count, shift, digits);
  int32_t mine = 0;
  for (int i = 0; i < count; ++i) mine += digits[i] == threadIdx.x;
  counts[blockIdx.x * kValues + threadIdx.x] = mine;
}

// Counts become the place of a chunk's first token of a value: after all of
// smaller values, and those of the same value in chunks before.
__global__ void __launch_bounds__(kValues)
    PlaceChunks(int64_t chunks, int32_t* counts) {
  __shared__ int32_t totals[kValues];
  int32_t total = 0;
#pragma unroll 8
  for (int64_t i = 0; i < chunks; ++i) {
    total += counts[i * kValues + threadIdx.x];
  }
  totals[threadIdx.x] = total;
  __syncthreads();
  int32_t place = 0;
  for (unsigned value = 0; value < threadIdx.x; ++value) {
    place += totals[value];
  }
  for (int64_t i = 0; i < chunks; ++i) {
    int32_t& count = counts[i * kValues + threadIdx.x];
    const int32_t after = place + count;
    count = place;
    place = after;
  }
}

// positions null: those of the tokens themselves.
__global__ void __launch_bounds__(kValues)
    MoveTokens(const int32_t* ids, const int32_t* positions, int64_t tokens,
               int shift, const int32_t* places, int32_t* sorted_ids,
               int32_t* sorted_positions) {
  __shared__ uint8_t digits[kChunk];
  const int64_t first = blockIdx.x * kChunk;
  const int count = ChunkSize(first, tokens);
  LoadDigits(ids, first, count, shift, digits);
  int32_t place = places[blockIdx.x * kValues + threadIdx.x];
  for (int i = 0; i < count; ++i) {
    if (digits[i] != threadIdx.x) continue;
    const int64_t from = first + i;
    sorted_ids[place] = ids[from];
    sorted_positions[place] =
        positions == nullptr ? static_cast<int32_t>(from) : positions[from];
    ++place;
  }
}

// ids ascend; positions ascend within an id. The block that is given the first
// of an id adds them all.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    AddRows(const int32_t* ids, const int32_t* positions, const T* d_out,
            int64_t tokens, int64_t hidden, int64_t vocab, float* d_table) {
  const int64_t i =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= hidden) return;
  for (int64_t first = blockIdx.y; first < tokens; first += gridDim.y) {
    const int32_t id = ids[first];
    if (id < 0 || id >= vocab) __trap();
    if (first > 0 && ids[first - 1] == id) continue;
    int64_t end = first + 1;
    while (end < tokens && ids[end] == id) ++end;
    float sum[N];
    Load(d_table + id * hidden + i, sum);
#pragma unroll 4
    for (int64_t n = first; n < end; ++n) {
      float v[N];
      Load(d_out + positions[n] * hidden + i, v);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v[j];
    }
    Store(sum, d_table + id * hidden + i);
  }
}

int64_t Chunks(int64_t tokens) { return CeilDiv(tokens, kChunk); }

}  // namespace

template <typename T>
cudaError_t LaunchEmbeddingForward(const int32_t* ids, const bf16* table,
                                   int64_t tokens, int64_t hidden,
                                   int64_t vocab, int32_t* firsts, T* out,
                                   cudaStream_t stream) {
  // A token's number has 31 bits at most: 0x7f7f7f7f rows fit no GPU.
  const cudaError_t error =
      cudaMemsetAsync(firsts, 0x7f, vocab * sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  FindFirsts<<<static_cast<unsigned>(CeilDiv(tokens, kThreads)), kThreads, 0,
               stream>>>(ids, tokens, vocab, firsts);
  constexpr int kN = kVector<T>;
  if (IsVector(kN, hidden, {table, out})) {
    const dim3 grid = RowGrid(tokens, hidden / kN, kThreads);
    GatherFirsts<T, kN><<<grid, kThreads, 0, stream>>>(ids, firsts, table,
                                                       tokens, hidden, out);
    CopyToOthers<T, kN>
        <<<grid, kThreads, 0, stream>>>(ids, firsts, tokens, hidden, out);
  } else {
    const dim3 grid = RowGrid(tokens, hidden, kThreads);
    GatherFirsts<T, 1><<<grid, kThreads, 0, stream>>>(ids, firsts, table,
                                                      tokens, hidden, out);
    CopyToOthers<T, 1>
        <<<grid, kThreads, 0, stream>>>(ids, firsts, tokens, hidden, out);
  }
  return cudaGetLastError();
}

// ids and positions, twice; places.
size_t EmbeddingBackwardScratchBytes(int64_t tokens) {
  return (4 * tokens + Chunks(tokens) * kValues) * sizeof(int32_t);
}

template <typename T>
cudaError_t LaunchEmbeddingBackward(const int32_t* ids, const T* d_out,
                                    int64_t tokens, int64_t hidden,
                                    int64_t vocab, void* scratch,
                                    float* d_table, cudaStream_t stream) {
  auto* sorted_ids = static_cast<int32_t*>(scratch);
  int32_t* sorted = sorted_ids + tokens;
  int32_t* other_ids = sorted + tokens;
  int32_t* other = other_ids + tokens;
  int32_t* places = other + tokens;
  const int32_t* positions = nullptr;
  const auto chunks = static_cast<unsigned>(Chunks(tokens));
  for (int shift = 0; shift == 0 || vocab - 1 >= int64_t{1} << shift;
       shift += kBits) {
    CountDigits<<<chunks, kValues, 0, stream>>>(ids, tokens, shift, places);
    PlaceChunks<<<1, kValues, 0, stream>>>(chunks, places);
    MoveTokens<<<chunks, kValues, 0, stream>>>(ids, positions, tokens, shift,
                                               places, sorted_ids, sorted);
    ids = sorted_ids;
    positions = sorted;
    std::swap(sorted_ids, other_ids);
    std::swap(sorted, other);
  }
  constexpr int kN = kVector<T>;
  if (IsVector(kN, hidden, {d_out, d_table})) {
    AddRows<T, kN>
        <<<RowGrid(tokens, hidden / kN, kThreads), kThreads, 0, stream>>>(
            ids, positions, d_out, tokens, hidden, vocab, d_table);
  } else {
    AddRows<T, 1><<<RowGrid(tokens, hidden, kThreads), kThreads, 0, stream>>>(
        ids, positions, d_out, tokens, hidden, vocab, d_table);
  }
  return cudaGetLastError();
}

template cudaError_t LaunchEmbeddingForward(const int32_t*, const bf16*,
                                            int64_t, int64_t, int64_t, int32_t*,
                                            float*, cudaStream_t);
template cudaError_t LaunchEmbeddingForward(const int32_t*, const bf16*,
                                            int64_t, int64_t, int64_t, int32_t*,
                                            bf16*, cudaStream_t);
template cudaError_t LaunchEmbeddingBackward(const int32_t*, const float*,
                                             int64_t, int64_t, int64_t, void*,
                                             float*, cudaStream_t);
template cudaError_t LaunchEmbeddingBackward(const int32_t*, const bf16*,
                                             int64_t, int64_t, int64_t, void*,
                                             float*, cudaStream_t);

}  // namespace slidedp::ops
