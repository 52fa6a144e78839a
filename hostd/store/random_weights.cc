#include "hostd/store/random_weights.h"

#include <bit>
#include <cmath>

#include "common/base/status.h"
#include "hostd/store/pieces.h"
#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

using model::Role;

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr uint64_t kIncrement = 0x9e3779b97f4a7c15u;

uint64_t TensorKey(uint64_t seed, absl::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  return Mix(Mix(seed + kIncrement) + hash);
}

// Natural logarithm of a normal positive x; relative error below 1e-6.
inline float Log(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  // x = 2^exponent * mantissa, mantissa in [sqrt(1/2), sqrt(2)).
  const uint32_t shifted = bits - 0x3f3504f3u;
  const auto exponent = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float mantissa =
      std::bit_cast<float>((shifted & 0x007fffffu) + 0x3f3504f3u);
  // ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
  const float s = (mantissa - 1.0f) / (mantissa + 1.0f);
  const float s2 = s * s;
  const float series =
      s2 * (0.33333334f + s2 * (0.2f + s2 * (0.14285715f + s2 * 0.11111111f)));
  return exponent * 0.6931472f + 2.0f * (s + s * series);
}

// The value that a standard normal exceeds with probability p / 2, p in
// (0, 1): sqrt(2) erfinv(1 - p), by the single precision polynomials of
// M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011).
inline float TailQuantile(float p) {
  const float w = -Log(p * (2.0f - p));
  const float a = w - 2.5f;
  float center = 2.81022636e-08f;
  center = 3.43273939e-07f + center * a;
  center = -3.5233877e-06f + center * a;
  center = -4.39150654e-06f + center * a;
  center = 0.00021858087f + center * a;
  center = -0.00125372503f + center * a;
  center = -0.00417768164f + center * a;
  center = 0.246640727f + center * a;
  center = 1.50140941f + center * a;
  const float b = std::sqrt(w) - 3.0f;
  float tail = -0.000200214257f;
  tail = 0.000100950558f + tail * b;
  tail = 0.00134934322f + tail * b;
  tail = -0.00367342844f + tail * b;
  tail = 0.00573950773f + tail * b;
  tail = -0.0076224613f + tail * b;
  tail = 0.00943887047f + tail * b;
  tail = 1.00167406f + tail * b;
  tail = 2.83297682f + tail * b;
  return 1.41421356f * ((w < 5.0f ? center : tail) * (1.0f - p));
}

bool IsNorm(Role role) {
  return role == Role::kInputNorm || role == Role::kQNorm ||
         role == Role::kKNorm || role == Role::kPostNorm ||
         role == Role::kFinalNorm;
}

bool IsBias(Role role) {
  return role == Role::kQBias || role == Role::kKBias || role == Role::kVBias;
}

}  // namespace

void RandomNormals(uint64_t seed, absl::string_view tensor_name, uint64_t first,
                   uint64_t count, float* out) {
  const uint64_t key = TensorKey(seed, tensor_name);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t bits = Mix(key + (first + i) * kIncrement);
    // 31 bits as the middles of 2^31 intervals of (0, 1).
    const float p =
        (static_cast<float>(static_cast<int32_t>(bits >> 33)) + 0.5f) *
        0x1p-31f;
    const float magnitude = TailQuantile(p);
    const auto sign = static_cast<uint32_t>(bits) << 31;
    out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) ^ sign);
  }
}

absl::Status FillRandomParameters(uint64_t seed, int threads, HostState& state,
                                  const std::atomic<bool>* stop) {
  std::vector<PlacedTensor> tensors;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    for (const model::Tensor& tensor : state.layout().units[u].tensors) {
      tensors.push_back({static_cast<int>(u), &tensor, {nullptr, nullptr}});
    }
  }
  return ForEachPiece(
      tensors, threads, stop,
      [&](size_t index, uint64_t first, uint64_t count, float* values) {
        const PlacedTensor& placed = tensors[index];
        const model::Tensor& tensor = *placed.tensor;
        const PlaneSpan planes =
            state.planes(placed.unit, tensor.offset + first, count);
        if (IsBias(tensor.role)) return absl::OkStatus();  // planes are zero
        if (IsNorm(tensor.role)) {
          for (uint64_t i = 0; i < count; ++i) {
            SplitFloat(1.0f, planes.hi[i], planes.lo[i]);
          }
          return absl::OkStatus();
        }
        RandomNormals(seed, tensor.name, first, count, values);
        for (uint64_t i = 0; i < count; ++i) {
          SplitFloat(values[i] * kRandomWeightDeviation, planes.hi[i],
                     planes.lo[i]);
        }
        return absl::OkStatus();
      });
}

}  // namespace slidedp::hostd
