// A job spec that passes every check, for tests to spoil.
#pragma once

#include "proto/job.pb.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::testing {

inline v1::JobSpec SampleSpec(const TinyModelOptions& model = {}) {
  v1::JobSpec spec;
  spec.set_version(1);
  spec.set_name("sample");
  spec.set_model("/models/tiny");
  v1::DataSource& source = *spec.add_sources();
  source.set_path("/data/tokens.safetensors");
  source.set_sequences(100);
  source.set_tokens(1600);
  source.set_used_tokens(1600);
  source.set_valid_tokens(1500);
  spec.set_output("/out/sample");
  spec.set_ranks(1);
  spec.set_device(v1::DEVICE_KIND_CPU);
  spec.set_sequence_length(16);
  spec.set_batch_size(4);
  spec.set_micro_batch_size(2);
  spec.set_steps(3);
  spec.mutable_optimizer()->set_lr(1e-3);
  spec.mutable_optimizer()->set_beta1(0.9);
  spec.mutable_optimizer()->set_beta2(0.999);
  spec.mutable_optimizer()->set_eps(1e-8);
  spec.mutable_schedule()->set_kind(v1::SCHEDULE_KIND_CONSTANT);
  spec.set_max_grad_norm(1.0);
  spec.set_launch(v1::LAUNCH_KIND_MANUAL);
  spec.set_model_config_json(TinyConfigJson(model));
  spec.set_dataset_sequences(100);
  spec.set_dataset_tokens(1600);
  spec.set_dataset_valid_tokens(1500);
  return spec;
}

}  // namespace slidedp::testing
