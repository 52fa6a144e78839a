// What the pipeline relies on: bits that do not depend on the number of
// threads, and ops that may come from several streams at once.
#include <thread>

#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

// Every op once, on a decoder layer with a head; all outputs, one after the
// other.
Floats AllOps(int threads, int64_t batch, int64_t sequence) {
  const AttentionShape s{batch, sequence, 3, 1, 16, 8};
  const int64_t t = s.tokens(), h = 40, n = 96, v = 77, q = 48;
  const int64_t qkv_dim = s.qkv_dim();
  OpsBench ops(threads);
  const auto ids = RandomIds(t, v, 1);
  const Bf16s table = RandomBf16s(v * h, 2), norm = RandomBf16s(h, 3, 1, 0.2);
  const Bf16s w_qkv = RandomBf16s(qkv_dim * h, 4, 0, 0.2);
  const Bf16s b_qkv = RandomBf16s(qkv_dim, 5);
  const Bf16s q_norm = RandomBf16s(16, 6, 1, 0.2);
  const Bf16s k_norm = RandomBf16s(16, 7, 1, 0.2);
  const Bf16s w_o = RandomBf16s(h * q, 8, 0, 0.2);
  const Bf16s w_gate_up = RandomBf16s(2 * n * h, 9, 0, 0.2);
  const Bf16s w_down = RandomBf16s(h * n, 10, 0, 0.2);
  const Floats inverse = {1.0f, 0.3f, 0.1f, 0.03f, 0.01f, 3e-3f, 1e-3f, 3e-4f};

  Floats x(t * h), a(t * h), rstd(t), qkv(t * qkv_dim), turned(qkv.size());
  Floats qk_rstd(t * 4), att(t * q), lse(t * 3), gate_up(t * 2 * n), act(t * n);
  Floats logits(t * v);
  double loss = 0, squares = 0;
  Stream& on = ops.stream();
  ops.Run(
      ops->EmbeddingForward(ids.data(), table.data(), t, h, v, x.data(), on));
  ops.Run(ops->RmsNormForward(x.data(), norm.data(), t, h, 1e-5, a.data(),
                              rstd.data(), on));
  ops.Run(ops->LinearForward(a.data(), w_qkv.data(), b_qkv.data(), t, h,
                             qkv_dim, nullptr, qkv.data(), on));
  ops.Run(ops->QkNormRopeForward(qkv.data(), q_norm.data(), k_norm.data(), 1e-6,
                                 inverse.data(), s, turned.data(),
                                 qk_rstd.data(), on));
  ops.Run(ops->AttentionForward(turned.data(), s, att.data(), lse.data(), on));
  ops.Run(ops->LinearForward(att.data(), w_o.data(), nullptr, t, q, h, x.data(),
                             x.data(), on));
  ops.Run(ops->LinearForward(x.data(), w_gate_up.data(), nullptr, t, h, 2 * n,
                             nullptr, gate_up.data(), on));
  ops.Run(ops->SwiGluForward(gate_up.data(), t, n, act.data(), on));
  ops.Run(ops->LinearForward(act.data(), w_down.data(), nullptr, t, n, h,
                             x.data(), x.data(), on));
  ops.Run(ops->LinearForward(x.data(), table.data(), nullptr, t, h, v, nullptr,
                             logits.data(), on));
  ops.Run(ops->CrossEntropy(logits.data(), ids.data(), t, v, 0.01f, &loss, on));

  Floats d_x(t * h), d_table(v * h, 0.0f), d_act(t * n), d_down(h * n, kNaN);
  Floats d_gate_up(gate_up.size()), d_norm(h, 0.0f), d_att(t * q);
  Floats normed(t * h);
  Floats d_qkv(qkv.size()), d_q(16, 0.0f), d_k(16, 0.0f);
  Floats d_w_qkv(qkv_dim * h, kNaN), d_b_qkv(qkv_dim, 0.0f);
  ops.Run(ops->LinearBackwardInput(logits.data(), table.data(), t, h, v, false,
                                   d_x.data(), on));
  ops.Run(ops->LinearBackwardWeight(x.data(), logits.data(), t, h, v,
                                    /*add=*/true, d_table.data(), nullptr, on));
  ops.Run(ops->LinearBackwardInput(d_x.data(), w_down.data(), t, n, h, false,
                                   d_act.data(), on));
  ops.Run(ops->LinearBackwardWeight(act.data(), d_x.data(), t, n, h,
                                    /*add=*/false, d_down.data(), nullptr, on));
  ops.Run(ops->SwiGluBackward(gate_up.data(), d_act.data(), t, n,
                              d_gate_up.data(), d_act.data(), on));
  ops.Run(ops->RmsNormBackward(x.data(), norm.data(), rstd.data(), d_x.data(),
                               t, h, false, a.data(), d_norm.data(),
                               normed.data(), on));
  ops.Run(ops->LinearBackwardInput(d_x.data(), w_o.data(), t, q, h, false,
                                   d_att.data(), on));
  ops.Run(ops->AttentionBackward(turned.data(), att.data(), lse.data(),
                                 d_att.data(), s, d_qkv.data(), on));
  ops.Run(ops->QkNormRopeBackward(qkv.data(), q_norm.data(), k_norm.data(),
                                  inverse.data(), s, qk_rstd.data(),
                                  d_qkv.data(), d_q.data(), d_k.data(), on));
  ops.Run(ops->LinearBackwardWeight(a.data(), d_qkv.data(), t, h, qkv_dim,
                                    /*add=*/false, d_w_qkv.data(),
                                    d_b_qkv.data(), on));
  ops.Run(ops->EmbeddingBackward(ids.data(), d_x.data(), t, h, v,
                                 d_table.data(), on));
  Bf16s drained(d_table.size());
  ops.Run(ops->CastToBf16(d_table.data(), d_table.size(), drained.data(), on));
  ops.Run(ops->SquaredNorm(drained.data(), drained.size(), &squares, on));

  Floats all;
  for (const Floats* part :
       {&normed,  &x,       &a,     &rstd,    &qkv,       &turned,
        &qk_rstd, &att,     &lse,   &gate_up, &act,       &logits,
        &d_x,     &d_table, &d_act, &d_down,  &d_gate_up, &d_norm,
        &d_att,   &d_qkv,   &d_q,   &d_k,     &d_w_qkv,   &d_b_qkv}) {
    all.insert(all.end(), part->begin(), part->end());
  }
  for (bf16 value : drained) all.push_back(Bf16ToFloat(value));
  for (const double value : {loss, squares}) {
    all.push_back(static_cast<float>(value));
    all.push_back(static_cast<float>(value - static_cast<float>(value)));
  }
  return all;
}

TEST(OpsThreadsTest, NumberOfThreadsChangesNoBit) {
  const Floats one = AllOps(1, 2, 63);
  for (const float value : one) ASSERT_TRUE(std::isfinite(value));
  EXPECT_EQ(AllOps(1, 2, 63), one) << "two runs";
  EXPECT_EQ(AllOps(3, 2, 63), one);
  EXPECT_EQ(AllOps(16, 2, 63), one);
}

TEST(OpsThreadsTest, MoreThreadsThanTheScratchHoldsStillRun) {
  EXPECT_EQ(AllOps(1000, 1, 1), AllOps(1, 1, 1));
}

TEST(OpsThreadsTest, StreamsShareOneOpsObject) {
  const auto device = device::NewCpuDevice({});
  const auto ops = NewCpuOps(2);
  const int64_t t = 40, in = 300, out = 400;
  const Floats x = RandomFloats(t * in, 1);
  const Bf16s w = RandomBf16s(out * in, 2);
  Floats y[3];
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    y[i].assign(t * out, 0.0f);
    callers.emplace_back([&, i] {
      const auto stream = device->NewStream("compute").value();
      for (int round = 0; round < 4; ++round) {
        ASSERT_TRUE(ops->LinearForward(x.data(), w.data(), nullptr, t, in, out,
                                       round > 0 ? y[i].data() : nullptr,
                                       y[i].data(), *stream)
                        .ok());
      }
      ASSERT_TRUE(device->Synchronize(*stream).ok());
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(y[0], y[1]);
  EXPECT_EQ(y[0], y[2]);
  const Vec want = reference::Linear(Wide(x), Wide(w), Vec(), t, in, out);
  Vec four;
  for (double value : want) four.push_back(4 * value);
  EXPECT_LT(RelativeError(y[0], four), kTolerance);
}

}  // namespace
}  // namespace slidedp::ops
