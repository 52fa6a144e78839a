// The mathematics of ops.h in float64, as plain loops: what every test of an
// implementation compares with. Sums are naive and in order.
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/bf16.h"
#include "worker/ops/ops.h"

namespace slidedp::ops::reference {

using Vec = std::vector<double>;

Vec Linear(const Vec& x, const Vec& w, const Vec& bias, int64_t tokens,
           int64_t in, int64_t out);
void LinearBackward(const Vec& x, const Vec& w, const Vec& d_y, int64_t tokens,
                    int64_t in, int64_t out, Vec& d_x, Vec& d_w, Vec& d_bias);

Vec RmsNorm(const Vec& x, const Vec& w, int64_t tokens, int64_t hidden,
            double eps, Vec* rstd = nullptr);
void RmsNormBackward(const Vec& x, const Vec& w, const Vec& d_out,
                     int64_t tokens, int64_t hidden, double eps, Vec& d_x,
                     Vec& d_w);

// Documents of a shape are in host memory here.

// Empty norm weights: no norm. The angle is a float32 product, as the contract
// says; its cosine and sine are float64.
Vec QkNormRope(const Vec& qkv, const Vec& q_norm, const Vec& k_norm, double eps,
               const std::vector<float>& inverse_frequencies,
               const AttentionShape& shape);
void QkNormRopeBackward(const Vec& qkv, const Vec& q_norm, const Vec& k_norm,
                        double eps,
                        const std::vector<float>& inverse_frequencies,
                        const AttentionShape& shape, const Vec& d_out,
                        Vec& d_qkv, Vec& d_q_norm, Vec& d_k_norm);

Vec Attention(const Vec& qkv, const AttentionShape& shape, Vec* lse = nullptr);
Vec AttentionBackward(const Vec& qkv, const AttentionShape& shape,
                      const Vec& d_out);

Vec SwiGlu(const Vec& gate_up, int64_t tokens, int64_t inner);
Vec SwiGluBackward(const Vec& gate_up, const Vec& d_out, int64_t tokens,
                   int64_t inner);

// Sum of token losses; `gradient`, if any, of loss * scale.
double CrossEntropy(const Vec& logits, const std::vector<int32_t>& labels,
                    int64_t vocab, double scale, Vec* gradient = nullptr);

}  // namespace slidedp::ops::reference
