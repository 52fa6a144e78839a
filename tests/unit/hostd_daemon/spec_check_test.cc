#include "hostd/daemon/spec_check.h"

#include <cmath>
#include <functional>
#include <limits>

#include "tests/testing/status_matchers.h"
#include "tests/unit/hostd_daemon/sample_spec.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SpecCheckTest, SampleIsGood) {
  ASSERT_OK_AND_ASSIGN(CheckedSpec checked, CheckSpec(SampleSpec(), {4, 0}));
  EXPECT_EQ(checked.plan.ranks, 1);
  EXPECT_EQ(checked.plan.sequence_length, 16);
  EXPECT_FALSE(checked.layout.units.empty());
  EXPECT_EQ(checked.plan.device, policy::DeviceKind::kCpu);
}

TEST(SpecCheckTest, HostileFieldsAreNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  struct Case {
    const char* field;
    std::function<void(v1::JobSpec&)> spoil;
  };
  const Case cases[] = {
      {"version", [](auto& s) { s.set_version(0); }},
      {"version", [](auto& s) { s.set_version(2); }},
      {"name", [](auto& s) { s.clear_name(); }},
      {"name", [](auto& s) { s.set_name(std::string(129, 'x')); }},
      {"name", [](auto& s) { s.set_name("a\nb"); }},
      {"name", [](auto& s) { s.set_name("\x1b[31m"); }},
      {"name", [](auto& s) { s.set_name(std::string("a\0b", 3)); }},
      {"model", [](auto& s) { s.clear_model(); }},
      {"model", [](auto& s) { s.set_model("models/tiny"); }},
      {"model", [](auto& s) { s.set_model("/" + std::string(5000, 'x')); }},
      {"data", [](auto& s) { s.clear_sources(); }},
      {"data",
       [](auto& s) {
         for (int i = 0; i < 64; ++i) *s.add_sources() = s.sources(0);
       }},
      {"data[0].path", [](auto& s) { s.mutable_sources(0)->set_path("."); }},
      {"data[0].weight", [](auto& s) { s.mutable_sources(0)->set_weight(-1); }},
      {"data[0].weight",
       [](auto& s) { s.mutable_sources(0)->set_weight(std::nan("")); }},
      {"data[1].weight",
       [](auto& s) {
         *s.add_sources() = s.sources(0);
         s.mutable_sources(0)->set_weight(1);
       }},
      {"data[0].sequences",
       [](auto& s) { s.mutable_sources(0)->set_sequences(0); }},
      {"data[0].used_tokens",
       [](auto& s) { s.mutable_sources(0)->set_used_tokens(1601); }},
      {"data[0].valid_tokens",
       [](auto& s) { s.mutable_sources(0)->set_valid_tokens(0); }},
      {"dataset_sequences",
       [](auto& s) { s.mutable_sources(0)->set_sequences(99); }},
      {"long_documents",
       [](auto& s) {
         s.set_long_documents(static_cast<v1::LongDocuments>(9));
       }},
      {"max_tokens", [](auto& s) { s.set_max_tokens(~uint64_t{0}); }},
      {"documents_per_sequence",
       [](auto& s) { s.set_documents_per_sequence(1); }},
      {"documents_per_sequence", [](auto& s) { s.set_packing(true); }},
      {"documents_per_sequence",
       [](auto& s) {
         s.set_packing(true);
         s.set_documents_per_sequence(17);
       }},
      {"output", [](auto& s) { s.set_output(""); }},
      {"output", [](auto& s) { s.set_output("/a\tb"); }},
      {"output", [](auto& s) { s.set_output(s.model()); }},
      {"ranks", [](auto& s) { s.set_ranks(0); }},
      {"ranks", [](auto& s) { s.set_ranks(65); }},
      {"ranks", [](auto& s) { s.set_ranks(4294967295u); }},
      {"device", [](auto& s) { s.set_device(v1::DEVICE_KIND_AUTO); }},
      {"device", [](auto& s) { s.set_device(v1::DeviceKind(9)); }},
      {"launch", [](auto& s) { s.set_launch(v1::LaunchKind(-1)); }},
      {"sequence_length", [](auto& s) { s.set_sequence_length(0); }},
      {"sequence_length", [](auto& s) { s.set_sequence_length(1u << 30); }},
      {"batch_size", [](auto& s) { s.set_batch_size(0); }},
      {"batch_size", [](auto& s) { s.set_batch_size(~uint64_t{0}); }},
      {"micro_batch_size", [](auto& s) { s.set_micro_batch_size(0); }},
      {"micro_batch_size", [](auto& s) { s.set_micro_batch_size(5); }},
      {"steps", [](auto& s) { s.set_steps(0); }},
      {"steps", [](auto& s) { s.set_steps(~uint64_t{0}); }},
      {"epochs", [=](auto& s) { s.set_epochs(nan); }},
      {"epochs", [](auto& s) { s.set_epochs(-1); }},
      {"optimizer.lr", [](auto& s) { s.clear_optimizer(); }},
      {"optimizer.lr", [](auto& s) { s.mutable_optimizer()->set_lr(0); }},
      {"optimizer.lr", [=](auto& s) { s.mutable_optimizer()->set_lr(nan); }},
      {"optimizer.lr", [=](auto& s) { s.mutable_optimizer()->set_lr(inf); }},
      {"optimizer.lr", [](auto& s) { s.mutable_optimizer()->set_lr(-1e-3); }},
      {"beta1", [](auto& s) { s.mutable_optimizer()->set_beta1(1); }},
      {"beta1", [=](auto& s) { s.mutable_optimizer()->set_beta1(nan); }},
      {"beta2", [](auto& s) { s.mutable_optimizer()->set_beta2(-0.1); }},
      {"beta2", [](auto& s) { s.mutable_optimizer()->set_beta2(2); }},
      {"eps", [](auto& s) { s.mutable_optimizer()->set_eps(0); }},
      {"weight_decay",
       [](auto& s) { s.mutable_optimizer()->set_weight_decay(-1); }},
      {"weight_decay",
       [=](auto& s) { s.mutable_optimizer()->set_weight_decay(inf); }},
      {"schedule.kind",
       [](auto& s) { s.mutable_schedule()->set_kind(v1::ScheduleKind(7)); }},
      {"warmup_steps",
       [](auto& s) { s.mutable_schedule()->set_warmup_steps(~uint64_t{0}); }},
      {"min_lr_ratio",
       [](auto& s) { s.mutable_schedule()->set_min_lr_ratio(1.01); }},
      {"min_lr_ratio",
       [=](auto& s) { s.mutable_schedule()->set_min_lr_ratio(nan); }},
      {"warmup_ratio",
       [](auto& s) { s.mutable_schedule()->set_warmup_ratio(-0.1); }},
      {"schedule.decay",
       [](auto& s) { s.mutable_schedule()->set_decay(v1::DecayKind(9)); }},
      {"decay_steps",
       [](auto& s) { s.mutable_schedule()->set_kind(v1::SCHEDULE_KIND_WSD); }},
      {"decay_steps",
       [](auto& s) {
         s.mutable_schedule()->set_kind(v1::SCHEDULE_KIND_WSD);
         s.mutable_schedule()->set_decay_steps(2);
         s.mutable_schedule()->set_warmup_steps(2);
       }},
      {"freeze", [](auto& s) { s.add_freeze(""); }},
      {"freeze", [](auto& s) { s.add_freeze("a\nb"); }},
      {"freeze", [](auto& s) { s.add_freeze("layers.0.*"); }},
      {"freeze", [](auto& s) { s.add_freeze("*"); }},
      {"freeze",
       [](auto& s) {
         for (int i = 0; i < 65; ++i) s.add_freeze("*");
       }},
      {"no_decay",
       [](auto& s) {
         s.mutable_optimizer()->mutable_no_decay()->add_patterns("no such");
       }},
      {"max_skipped_steps",
       [](auto& s) { s.set_max_skipped_steps(~uint64_t{0}); }},
      {"loss_spike_sigma", [=](auto& s) { s.set_loss_spike_sigma(nan); }},
      {"early_stop.patience",
       [](auto& s) { s.mutable_early_stop()->set_patience(1); }},
      {"early_stop.min_delta",
       [=](auto& s) { s.mutable_early_stop()->set_min_delta(nan); }},
      {"eval.data", [](auto& s) { s.mutable_eval(); }},
      {"eval.dataset_tokens",
       [](auto& s) { s.mutable_eval()->set_data("/data/held-out"); }},
      {"tensorboard", [](auto& s) { s.set_tensorboard("runs"); }},
      {"max_grad_norm", [](auto& s) { s.set_max_grad_norm(0); }},
      {"max_grad_norm", [=](auto& s) { s.set_max_grad_norm(nan); }},
      {"max_grad_norm", [=](auto& s) { s.set_max_grad_norm(inf); }},
      {"routes.params",
       [](auto& s) { s.mutable_routes()->set_params(v1::ParamRoute(5)); }},
      {"routes.grads",
       [](auto& s) { s.mutable_routes()->set_grads(v1::GradRoute(-5)); }},
      {"routes.reduce",
       [](auto& s) { s.mutable_routes()->set_reduce(v1::ReduceDtype(5)); }},
      {"tuning.h2d_chunk_bytes",
       [](auto& s) { s.mutable_tuning()->set_h2d_chunk_bytes(100); }},
      {"tuning.d2h_chunk_bytes",
       [](auto& s) { s.mutable_tuning()->set_d2h_chunk_bytes(~uint64_t{0}); }},
      {"tuning.window_slots",
       [](auto& s) { s.mutable_tuning()->set_window_slots(4294967295u); }},
      {"tuning.ring_chunks",
       [](auto& s) { s.mutable_tuning()->set_ring_chunks(4294967295u); }},
      {"tuning.compute_threads",
       [](auto& s) { s.mutable_tuning()->set_compute_threads(5000); }},
      {"tuning.update_threads",
       [](auto& s) { s.mutable_tuning()->set_update_threads(5000); }},
      {"tuning.head_chunk_tokens",
       [](auto& s) { s.mutable_tuning()->set_head_chunk_tokens(4294967295u); }},
      {"dataset_sequences", [](auto& s) { s.set_dataset_sequences(0); }},
      {"dataset_sequences",
       [](auto& s) { s.set_dataset_sequences(~uint64_t{0}); }},
      {"dataset_tokens", [](auto& s) { s.set_dataset_tokens(0); }},
      {"dataset_valid_tokens", [](auto& s) { s.set_dataset_valid_tokens(0); }},
      {"dataset_valid_tokens",
       [](auto& s) { s.set_dataset_valid_tokens(s.dataset_tokens() + 1); }},
      {"model_config_json", [](auto& s) { s.clear_model_config_json(); }},
      {"model_config_json",
       [](auto& s) { s.set_model_config_json(std::string(2 << 20, ' ')); }},
      {"config.json", [](auto& s) { s.set_model_config_json("{"); }},
      {"config.json", [](auto& s) { s.set_model_config_json("[]"); }},
      {"config.json",
       [](auto& s) { s.set_model_config_json(std::string(100000, '[')); }},
      {"config.json", [](auto& s) { s.set_model_config_json("\xff\xfe"); }},
  };
  for (const Case& c : cases) {
    v1::JobSpec spec = SampleSpec();
    c.spoil(spec);
    absl::StatusOr<CheckedSpec> checked = CheckSpec(spec, {4, 0});
    ASSERT_FALSE(checked.ok()) << c.field << ": " << spec.ShortDebugString();
    EXPECT_THAT(checked.status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr(c.field)));
  }
}

TEST(SpecCheckTest, UnknownFieldsAreRefusedAtEveryDepth) {
  for (auto* message :
       std::initializer_list<google::protobuf::Message* (*)(v1::JobSpec&)>{
           [](v1::JobSpec& s) -> google::protobuf::Message* { return &s; },
           [](v1::JobSpec& s) -> google::protobuf::Message* {
             return s.mutable_optimizer();
           },
           [](v1::JobSpec& s) -> google::protobuf::Message* {
             return s.mutable_tuning();
           }}) {
    v1::JobSpec spec = SampleSpec();
    google::protobuf::Message* target = message(spec);
    target->GetReflection()->MutableUnknownFields(target)->AddVarint(4000, 1);
    EXPECT_THAT(CheckSpec(spec, {4, 0}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("does not know")));
  }
}

TEST(SpecCheckTest, ScheduleThatWouldFillMemoryIsRefused) {
  testing::TinyModelOptions model;
  model.vocab = 1 << 20;
  model.hidden = 4096;
  model.heads = 32;
  model.head_dim = 128;
  v1::JobSpec spec = SampleSpec(model);
  spec.mutable_tuning()->set_d2h_chunk_bytes(128);
  EXPECT_THAT(CheckSpec(spec, {4, 0}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tuning.d2h_chunk_bytes")));
  spec.mutable_tuning()->clear_d2h_chunk_bytes();
  EXPECT_OK(CheckSpec(spec, {4, 0}));
}

TEST(SpecCheckTest, DaemonsUpdateThreadsHoldWhereTheSpecIsOpen) {
  v1::JobSpec spec = SampleSpec();
  EXPECT_EQ(CheckSpec(spec, {8, 3})->plan.update_threads, 3);
  spec.mutable_tuning()->set_update_threads(2);
  EXPECT_EQ(CheckSpec(spec, {8, 3})->plan.update_threads, 2);
}

TEST(FallbackTest, OpenRoutesFallBackToFullAndCpu) {
  v1::JobSpec spec = SampleSpec();
  spec.set_ranks(2);
  ASSERT_OK_AND_ASSIGN(CheckedSpec checked, CheckSpec(spec, {4, 0}));
  ASSERT_OK_AND_ASSIGN(policy::Plan plan, FallbackPlan(checked, checked.plan));
  EXPECT_EQ(plan.decoder.params, policy::ParamRoute::kFull);
  EXPECT_EQ(plan.decoder.grads, policy::GradRoute::kCpu);
  // A second refusal has no answer.
  EXPECT_THAT(FallbackPlan(checked, plan),
              StatusIs(absl::StatusCode::kNotFound));
}

TEST(FallbackTest, RoutesThatTheUserFixedStay) {
  v1::JobSpec spec = SampleSpec();
  spec.set_ranks(2);
  spec.mutable_routes()->set_params(v1::PARAM_ROUTE_SHARDED);
  ASSERT_OK_AND_ASSIGN(CheckedSpec half, CheckSpec(spec, {4, 0}));
  ASSERT_OK_AND_ASSIGN(policy::Plan plan, FallbackPlan(half, half.plan));
  EXPECT_EQ(plan.decoder.params, policy::ParamRoute::kSharded);
  EXPECT_EQ(plan.decoder.grads, policy::GradRoute::kCpu);
  spec.mutable_routes()->set_grads(v1::GRAD_ROUTE_GPU_ROOT);
  ASSERT_OK_AND_ASSIGN(CheckedSpec fixed, CheckSpec(spec, {4, 0}));
  EXPECT_THAT(FallbackPlan(fixed, fixed.plan),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("fixes")));
}

}  // namespace
}  // namespace slidedp::hostd
