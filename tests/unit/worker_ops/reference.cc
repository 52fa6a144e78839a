#include "tests/unit/worker_ops/reference.h"

#include <algorithm>
#include <cmath>

namespace slidedp::ops::reference {

Vec Linear(const Vec& x, const Vec& w, const Vec& bias, int64_t tokens,
           int64_t in, int64_t out) {
  Vec y(tokens * out, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0.0 : bias[o];
      for (int64_t i = 0; i < in; ++i) sum += x[t * in + i] * w[o * in + i];
      y[t * out + o] = sum;
    }
  }
  return y;
}

void LinearBackward(const Vec& x, const Vec& w, const Vec& d_y, int64_t tokens,
                    int64_t in, int64_t out, Vec& d_x, Vec& d_w, Vec& d_bias) {
  d_x.assign(tokens * in, 0.0);
  d_w.assign(out * in, 0.0);
  d_bias.assign(out, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t o = 0; o < out; ++o) {
      const double g = d_y[t * out + o];
      d_bias[o] += g;
      for (int64_t i = 0; i < in; ++i) {
        d_x[t * in + i] += g * w[o * in + i];
        d_w[o * in + i] += g * x[t * in + i];
      }
    }
  }
}

namespace {

double NormRow(const double* x, const double* w, int64_t n, double eps,
               double* out) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const double rstd = 1 / std::sqrt(squares / n + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd * w[i];
  return rstd;
}

// d_x is written, d_w added to. d out_j / d x_i =
// w_j (rstd [i = j] - x_j rstd^3 x_i / n).
void NormRowBackward(const double* x, const double* w, const double* d_out,
                     int64_t n, double eps, double* d_x, double* d_w) {
  double squares = 0, dot = 0;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const double rstd = 1 / std::sqrt(squares / n + eps);
  for (int64_t j = 0; j < n; ++j) {
    dot += d_out[j] * w[j] * x[j];
    d_w[j] += d_out[j] * x[j] * rstd;
  }
  for (int64_t i = 0; i < n; ++i) {
    d_x[i] = rstd * d_out[i] * w[i] - rstd * rstd * rstd * dot * x[i] / n;
  }
}

// The row of the micro-batch at which the document of row t begins.
int64_t FirstRow(const AttentionShape& shape, int64_t t) {
  const int32_t* first_row = shape.documents.first_row;
  return first_row == nullptr ? t / shape.sequence * shape.sequence
                              : first_row[t];
}

// `sign` -1 turns back.
void RotateHead(double* x, int64_t position, int64_t d, double sign,
                const std::vector<float>& inverse_frequencies) {
  for (int64_t i = 0; i < d / 2; ++i) {
    const double angle = static_cast<float>(position) * inverse_frequencies[i];
    const double c = std::cos(angle), s = sign * std::sin(angle);
    const double lo = x[i], hi = x[i + d / 2];
    x[i] = lo * c - hi * s;
    x[i + d / 2] = hi * c + lo * s;
  }
}

}  // namespace

Vec RmsNorm(const Vec& x, const Vec& w, int64_t tokens, int64_t hidden,
            double eps, Vec* rstd) {
  Vec out(x.size());
  for (int64_t t = 0; t < tokens; ++t) {
    const double r =
        NormRow(&x[t * hidden], w.data(), hidden, eps, &out[t * hidden]);
    if (rstd != nullptr) rstd->push_back(r);
  }
  return out;
}

void RmsNormBackward(const Vec& x, const Vec& w, const Vec& d_out,
                     int64_t tokens, int64_t hidden, double eps, Vec& d_x,
                     Vec& d_w) {
  d_x.assign(x.size(), 0.0);
  d_w.assign(hidden, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    NormRowBackward(&x[t * hidden], w.data(), &d_out[t * hidden], hidden, eps,
                    &d_x[t * hidden], d_w.data());
  }
}

Vec QkNormRope(const Vec& qkv, const Vec& q_norm, const Vec& k_norm, double eps,
               const std::vector<float>& inverse_frequencies,
               const AttentionShape& shape) {
  Vec out = qkv;
  const int64_t d = shape.head_dim;
  for (int64_t t = 0; t < shape.tokens(); ++t) {
    for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
      const int64_t at = t * shape.qkv_dim() + h * d;
      const Vec& w = h < shape.heads ? q_norm : k_norm;
      if (!w.empty()) NormRow(&qkv[at], w.data(), d, eps, &out[at]);
      RotateHead(&out[at], t - FirstRow(shape, t), d, 1, inverse_frequencies);
    }
  }
  return out;
}

void QkNormRopeBackward(const Vec& qkv, const Vec& q_norm, const Vec& k_norm,
                        double eps,
                        const std::vector<float>& inverse_frequencies,
                        const AttentionShape& shape, const Vec& d_out,
                        Vec& d_qkv, Vec& d_q_norm, Vec& d_k_norm) {
  const int64_t d = shape.head_dim;
  d_qkv = d_out;
  d_q_norm.assign(d, 0.0);
  d_k_norm.assign(d, 0.0);
  for (int64_t t = 0; t < shape.tokens(); ++t) {
    for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
      const int64_t at = t * shape.qkv_dim() + h * d;
      RotateHead(&d_qkv[at], t - FirstRow(shape, t), d, -1,
                 inverse_frequencies);
      const bool is_q = h < shape.heads;
      const Vec& w = is_q ? q_norm : k_norm;
      if (w.empty()) continue;
      const Vec d_normed(d_qkv.begin() + at, d_qkv.begin() + at + d);
      NormRowBackward(&qkv[at], w.data(), d_normed.data(), d, eps, &d_qkv[at],
                      is_q ? d_q_norm.data() : d_k_norm.data());
    }
  }
}

namespace {

// Softmax weights of one query over all keys of its sequence; 0 where masked.
Vec Weights(const Vec& qkv, const AttentionShape& shape, int64_t b,
            int64_t head, int64_t query, double* lse) {
  const int64_t d = shape.head_dim, width = shape.qkv_dim();
  const int64_t kv = shape.heads + head / (shape.heads / shape.kv_heads);
  const int64_t row = (b * shape.sequence + query) * width + head * d;
  Vec p(shape.sequence, 0.0);
  double max = -INFINITY, sum = 0;
  const int64_t first =
      FirstRow(shape, b * shape.sequence + query) - b * shape.sequence;
  const auto seen = [&](int64_t key) {
    return key >= first && key <= query &&
           (shape.window == 0 || key > query - shape.window);
  };
  for (int64_t key = 0; key < shape.sequence; ++key) {
    if (!seen(key)) continue;
    for (int64_t i = 0; i < d; ++i) {
      p[key] +=
          qkv[row + i] * qkv[(b * shape.sequence + key) * width + kv * d + i];
    }
    p[key] /= std::sqrt(static_cast<double>(d));
    max = std::max(max, p[key]);
  }
  for (int64_t key = 0; key < shape.sequence; ++key) {
    p[key] = seen(key) ? std::exp(p[key] - max) : 0.0;
    sum += p[key];
  }
  for (double& value : p) value /= sum;
  if (lse != nullptr) *lse = max + std::log(sum);
  return p;
}

}  // namespace

Vec Attention(const Vec& qkv, const AttentionShape& shape, Vec* lse) {
  const int64_t d = shape.head_dim, width = shape.qkv_dim();
  const int64_t s = shape.sequence;
  Vec out(shape.tokens() * shape.heads * d, 0.0);
  if (lse != nullptr) lse->assign(shape.tokens() * shape.heads, 0.0);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t v =
          shape.heads + shape.kv_heads + h / (shape.heads / shape.kv_heads);
      for (int64_t query = 0; query < s; ++query) {
        double row_lse;
        const Vec p = Weights(qkv, shape, b, h, query, &row_lse);
        if (lse != nullptr) (*lse)[(b * shape.heads + h) * s + query] = row_lse;
        double* row = &out[((b * s + query) * shape.heads + h) * d];
        for (int64_t key = 0; key <= query; ++key) {
          for (int64_t i = 0; i < d; ++i) {
            row[i] += p[key] * qkv[(b * s + key) * width + v * d + i];
          }
        }
      }
    }
  }
  return out;
}

Vec AttentionBackward(const Vec& qkv, const AttentionShape& shape,
                      const Vec& d_out) {
  const int64_t d = shape.head_dim, width = shape.qkv_dim();
  const int64_t s = shape.sequence;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  Vec d_qkv(qkv.size(), 0.0);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t kv = h / (shape.heads / shape.kv_heads);
      const int64_t q_at = h * d, k_at = (shape.heads + kv) * d;
      const int64_t v_at = (shape.heads + shape.kv_heads + kv) * d;
      for (int64_t query = 0; query < s; ++query) {
        const Vec p = Weights(qkv, shape, b, h, query, nullptr);
        const int64_t q_row = (b * s + query) * width + q_at;
        const double* g = &d_out[((b * s + query) * shape.heads + h) * d];
        Vec d_p(s, 0.0);
        double mean = 0;
        for (int64_t key = 0; key <= query; ++key) {
          const int64_t row = (b * s + key) * width;
          for (int64_t i = 0; i < d; ++i) {
            d_p[key] += g[i] * qkv[row + v_at + i];
            d_qkv[row + v_at + i] += p[key] * g[i];
          }
          mean += p[key] * d_p[key];
        }
        for (int64_t key = 0; key <= query; ++key) {
          const int64_t row = (b * s + key) * width;
          const double d_score = p[key] * (d_p[key] - mean) * scale;
          for (int64_t i = 0; i < d; ++i) {
            d_qkv[q_row + i] += d_score * qkv[row + k_at + i];
            d_qkv[row + k_at + i] += d_score * qkv[q_row + i];
          }
        }
      }
    }
  }
  return d_qkv;
}

Vec SwiGlu(const Vec& gate_up, int64_t tokens, int64_t inner) {
  Vec out(tokens * inner);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < inner; ++i) {
      const double g = gate_up[t * 2 * inner + i];
      out[t * inner + i] =
          g / (1 + std::exp(-g)) * gate_up[t * 2 * inner + inner + i];
    }
  }
  return out;
}

Vec SwiGluBackward(const Vec& gate_up, const Vec& d_out, int64_t tokens,
                   int64_t inner) {
  Vec d(gate_up.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t at = t * 2 * inner + i;
      const double g = gate_up[at], u = gate_up[at + inner];
      const double s = 1 / (1 + std::exp(-g)), dy = d_out[t * inner + i];
      d[at] = dy * u * (s + g * s * (1 - s));
      d[at + inner] = dy * g * s;
    }
  }
  return d;
}

double CrossEntropy(const Vec& logits, const std::vector<int32_t>& labels,
                    int64_t vocab, double scale, Vec* gradient) {
  double loss = 0;
  if (gradient != nullptr) gradient->assign(logits.size(), 0.0);
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] < 0) continue;
    const double* row = &logits[t * vocab];
    const double max = *std::max_element(row, row + vocab);
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(row[i] - max);
    loss += max + std::log(sum) - row[labels[t]];
    if (gradient == nullptr) continue;
    for (int64_t i = 0; i < vocab; ++i) {
      (*gradient)[t * vocab + i] =
          (std::exp(row[i] - max) / sum - (i == labels[t])) * scale;
    }
  }
  return loss;
}

}  // namespace slidedp::ops::reference
