#include "hostd/ctl/job_file.h"

#include <google/protobuf/util/message_differencer.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/hostd_ctl/parse_job.h"

namespace slidedp::ctl {
namespace {

using ::google::protobuf::util::MessageDifferencer;
using ::slidedp::testing::kInvalid;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(JobFileTest, DefaultsAreThoseOfAHuggingFaceUser) {
  v1::JobSpec spec = DefaultJobSpec();
  EXPECT_EQ(spec.version(), 1);
  EXPECT_EQ(spec.ranks(), 1);
  EXPECT_EQ(spec.device(), v1::DEVICE_KIND_AUTO);
  EXPECT_EQ(spec.batch_size(), 8);
  EXPECT_EQ(spec.micro_batch_size(), 1);
  EXPECT_EQ(spec.optimizer().lr(), 5e-5);
  EXPECT_EQ(spec.optimizer().beta1(), 0.9);
  EXPECT_EQ(spec.optimizer().beta2(), 0.999);
  EXPECT_EQ(spec.optimizer().eps(), 1e-8);
  EXPECT_EQ(spec.optimizer().weight_decay(), 0);
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_LINEAR);
  EXPECT_EQ(spec.schedule().warmup_steps(), 0);
  EXPECT_EQ(spec.max_grad_norm(), 1.0);
  EXPECT_EQ(spec.seed(), 42);
  // Found later: from the model, the data and the file's name.
  EXPECT_EQ(spec.sequence_length(), 0);
  EXPECT_EQ(spec.steps(), 0);
  EXPECT_EQ(spec.epochs(), 0);
  EXPECT_EQ(spec.name(), "");
}

TEST(JobFileTest, AnEmptyMapIsTheDefaults) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse("{}"));
  EXPECT_TRUE(MessageDifferencer::Equals(spec, DefaultJobSpec()));
}

TEST(JobFileTest, PrintedDefaultsParseBackToTheDefaults) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(PrintDefaults()));
  v1::JobSpec expected = DefaultJobSpec();
  expected.set_model("/path/to/model");
  expected.add_sources()->set_path("/path/to/data.safetensors");
  expected.set_output("/path/to/output");
  expected.set_epochs(3);
  EXPECT_TRUE(MessageDifferencer::Equals(spec, expected)) << spec.DebugString();
}

TEST(JobFileTest, PrintedDefaultsNameEveryKey) {
  std::string text = PrintDefaults();
  for (const std::string& key : JobFileKeys()) {
    std::string last = key.substr(key.rfind('.') + 1);
    EXPECT_THAT(text, HasSubstr(absl::StrCat(last, ": "))) << key;
  }
}

TEST(JobFileTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(R"(
name: run-1.a_B
model: models/tiny
data: "data with space.safetensors"
output: ../out
ranks: 2
device: cpu
sequence_length: 256
packing: true
long_documents: truncate
batch_size: 16
micro_batch_size: 2
steps: 100
optimizer: {lr: 1e-4, beta1: 0.8, beta2: 0.95, eps: 1.0e-6, weight_decay: 0.1}
schedule:
  kind: cosine
  warmup_steps: 10
  min_lr_ratio: 0.1
max_grad_norm: 0.5
seed: 18446744073709551615
routes: {params: sharded, grads: gpu_sharded, reduce: bf16}
tuning:
  h2d_chunk_bytes: 1048576
  d2h_chunk_bytes: 524288
  window_slots: 3
  grad_slots: 4
  ring_chunks: 5
  head_chunk_tokens: 64
  compute_threads: 1
  update_threads: 7
launch: manual
)"));
  EXPECT_EQ(spec.name(), "run-1.a_B");
  EXPECT_EQ(spec.model(), "models/tiny");
  ASSERT_EQ(spec.sources_size(), 1);
  EXPECT_EQ(spec.sources(0).path(), "data with space.safetensors");
  EXPECT_EQ(spec.sources(0).weight(), 0);
  EXPECT_TRUE(spec.packing());
  EXPECT_EQ(spec.long_documents(), v1::LONG_DOCUMENTS_TRUNCATE);
  EXPECT_EQ(spec.output(), "../out");
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_EQ(spec.device(), v1::DEVICE_KIND_CPU);
  EXPECT_EQ(spec.sequence_length(), 256);
  EXPECT_EQ(spec.batch_size(), 16);
  EXPECT_EQ(spec.micro_batch_size(), 2);
  EXPECT_EQ(spec.steps(), 100);
  EXPECT_EQ(spec.epochs(), 0);
  EXPECT_EQ(spec.optimizer().lr(), 1e-4);
  EXPECT_EQ(spec.optimizer().beta1(), 0.8);
  EXPECT_EQ(spec.optimizer().beta2(), 0.95);
  EXPECT_EQ(spec.optimizer().eps(), 1e-6);
  EXPECT_EQ(spec.optimizer().weight_decay(), 0.1);
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_COSINE);
  EXPECT_EQ(spec.schedule().warmup_steps(), 10);
  EXPECT_EQ(spec.schedule().min_lr_ratio(), 0.1);
  EXPECT_EQ(spec.max_grad_norm(), 0.5);
  EXPECT_EQ(spec.seed(), 18446744073709551615u);
  EXPECT_EQ(spec.routes().params(), v1::PARAM_ROUTE_SHARDED);
  EXPECT_EQ(spec.routes().grads(), v1::GRAD_ROUTE_GPU_SHARDED);
  EXPECT_EQ(spec.routes().reduce(), v1::REDUCE_DTYPE_BF16);
  EXPECT_EQ(spec.tuning().h2d_chunk_bytes(), 1048576);
  EXPECT_EQ(spec.tuning().d2h_chunk_bytes(), 524288);
  EXPECT_EQ(spec.tuning().window_slots(), 3);
  EXPECT_EQ(spec.tuning().grad_slots(), 4);
  EXPECT_EQ(spec.tuning().ring_chunks(), 5);
  EXPECT_EQ(spec.tuning().head_chunk_tokens(), 64);
  EXPECT_EQ(spec.tuning().compute_threads(), 1);
  EXPECT_EQ(spec.tuning().update_threads(), 7);
  EXPECT_EQ(spec.launch(), v1::LAUNCH_KIND_MANUAL);
}

TEST(JobFileTest, DataMayBeAListWithWeightsOrWithout) {
  ASSERT_OK_AND_ASSIGN(
      v1::JobSpec spec,
      Parse("data: [{path: a, weight: 0.7}, {weight: 3e-1, path: b}]\n"));
  ASSERT_EQ(spec.sources_size(), 2);
  EXPECT_EQ(spec.sources(0).path(), "a");
  EXPECT_EQ(spec.sources(0).weight(), 0.7);
  EXPECT_EQ(spec.sources(1).path(), "b");
  EXPECT_EQ(spec.sources(1).weight(), 0.3);
  ASSERT_OK_AND_ASSIGN(spec, Parse("data: [a, {path: b}]\n", {"seed=3"}));
  ASSERT_EQ(spec.sources_size(), 2);
  EXPECT_EQ(spec.sources(1).path(), "b");
  EXPECT_EQ(spec.sources(1).weight(), 0);
  ASSERT_OK_AND_ASSIGN(spec, Parse("data: [a, b]\n", {"data=c"}));
  ASSERT_EQ(spec.sources_size(), 1);
  EXPECT_EQ(spec.sources(0).path(), "c");
}

TEST(JobFileTest, TrainingKeysAreRead) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(R"(
optimizer: {no_decay: ["*bias", "*norm*"]}
freeze: [model.embed_tokens.*, lm_head.weight]
schedule: {kind: wsd, warmup_ratio: 0.1, decay_steps: 20, decay: 1-sqrt}
max_skipped_steps: 0
loss_spike_sigma: 4.5
eval: {data: held-out.safetensors, every_steps: 50, max_sequences: 128}
early_stop: {patience: 3, min_delta: 0.01}
tensorboard: runs/a
)"));
  EXPECT_EQ(spec.optimizer().no_decay().patterns_size(), 2);
  EXPECT_EQ(spec.freeze_size(), 2);
  EXPECT_EQ(spec.freeze(1), "lm_head.weight");
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_WSD);
  EXPECT_EQ(spec.schedule().warmup_ratio(), 0.1);
  EXPECT_EQ(spec.schedule().decay_steps(), 20);
  EXPECT_EQ(spec.schedule().decay(), v1::DECAY_KIND_ONE_MINUS_SQRT);
  EXPECT_EQ(spec.max_skipped_steps(), 0);
  EXPECT_EQ(spec.loss_spike_sigma(), 4.5);
  EXPECT_EQ(spec.eval().data(), "held-out.safetensors");
  EXPECT_EQ(spec.eval().every_steps(), 50);
  EXPECT_EQ(spec.eval().max_sequences(), 128);
  EXPECT_EQ(spec.early_stop().patience(), 3);
  EXPECT_EQ(spec.early_stop().min_delta(), 0.01);
  EXPECT_EQ(spec.tensorboard(), "runs/a");
  // An empty list is not the default: everything decays.
  ASSERT_OK_AND_ASSIGN(spec, Parse("{}", {"optimizer.no_decay=[]"}));
  EXPECT_TRUE(spec.optimizer().has_no_decay());
}

TEST(JobFileTest, AScheduleMayBeOneWord) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse("schedule: constant\n"));
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_CONSTANT);
}

TEST(JobFileTest, NullMaxGradNormMeansNoClipping) {
  for (const char* text :
       {"max_grad_norm: null\n", "max_grad_norm: ~\n", "max_grad_norm:\n"}) {
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(text));
    EXPECT_FALSE(spec.has_max_grad_norm()) << text;
  }
}

TEST(JobFileTest, UnknownKeysSuggestTheNearestKnownOne) {
  const std::pair<const char*, const char*> cases[] = {
      {"batchsize: 4\n", "did you mean batch_size?"},
      {"learning_rate: 4\n", "unknown key"},
      {"lr: 1e-4\n", "did you mean optimizer.lr?"},
      {"optimiser: {lr: 1}\n", "did you mean optimizer?"},
      {"optimizer: {betal: 0.9}\n", "did you mean optimizer.beta1?"},
      {"optimizer: {weight-decay: 0.9}\n",
       "did you mean optimizer.weight_decay?"},
      {"warmup_steps: 5\n", "did you mean schedule.warmup_steps?"},
      {"max_gradnorm: 1\n", "did you mean max_grad_norm?"},
      {"Model: x\n", "did you mean model?"},
      {"zzzzzzzzzzzzz: 1\n", "--print-defaults"},
      {"optimizer.lr: 1e-4\n", "write `optimizer:`"},
      {"version: 1\n", "unknown key"},
      {"model_config_json: x\n", "unknown key"},
  };
  for (const auto& [text, part] : cases) {
    EXPECT_THAT(Parse(text),
                StatusIs(kInvalid, AllOf(HasSubstr("job.yaml"),
                                         HasSubstr("line 1"), HasSubstr(part))))
        << text;
  }
}

struct BadValue {
  const char* text;
  const char* field;  // as the message names it
  const char* value;
};

TEST(JobFileTest, AWrongValueIsNamedWithFileFieldLineAndRemedy) {
  const BadValue cases[] = {
      {"x: 1", "x", ""},
      {"ranks: two", "ranks", "two"},
      {"ranks: 0", "ranks", "0"},
      {"ranks: -1", "ranks", "-1"},
      {"ranks: 65", "ranks", "65"},
      {"ranks: 1.5", "ranks", "1.5"},
      {"ranks: 1e1", "ranks", "1e1"},
      {"ranks: 0x2", "ranks", "0x2"},
      {"ranks: '2'", "ranks", "2"},
      {"ranks: [2]", "ranks", "[...]"},
      {"ranks: {n: 2}", "ranks", "{...}"},
      {"ranks:", "ranks", "null"},
      {"ranks: 99999999999999999999", "ranks", "99999999999999999999"},
      {"ranks: 1 2", "ranks", "1 2"},
      {"batch_size: true", "batch_size", "true"},
      {"batch_size: 1_000", "batch_size", "1_000"},
      {"micro_batch_size: 0", "micro_batch_size", "0"},
      {"sequence_length: 1", "sequence_length", "1"},
      {"steps: 0", "steps", "0"},
      {"steps: all", "steps", "all"},
      {"epochs: 0", "epochs", "0"},
      {"epochs: -1", "epochs", "-1"},
      {"epochs: nan", "epochs", "nan"},
      {"epochs: .inf", "epochs", ".inf"},
      {"epochs: 1e400", "epochs", "1e400"},
      {"optimizer: {lr: fast}", "optimizer.lr", "fast"},
      {"optimizer: {lr: -1e-5}", "optimizer.lr", "-1e-5"},
      {"optimizer: {lr: 0}", "optimizer.lr", "0"},
      {"optimizer: {lr: '1e-5'}", "optimizer.lr", "1e-5"},
      {"optimizer: {lr: 1e-5x}", "optimizer.lr", "1e-5x"},
      {"optimizer: {lr: infinity}", "optimizer.lr", "infinity"},
      {"optimizer: {lr: 0x1p-3}", "optimizer.lr", "0x1p-3"},
      {"optimizer: {lr: }", "optimizer.lr", "null"},
      {"optimizer: {beta1: 1}", "optimizer.beta1", "1"},
      {"optimizer: {beta2: 1.5}", "optimizer.beta2", "1.5"},
      {"optimizer: {eps: 0}", "optimizer.eps", "0"},
      {"optimizer: {weight_decay: -0.1}", "optimizer.weight_decay", "-0.1"},
      {"optimizer: 5", "optimizer", "5"},
      {"optimizer: [lr, 5]", "optimizer", "[...]"},
      {"optimizer:", "optimizer", "null"},
      {"schedule: {kind: step}", "schedule.kind", "step"},
      {"schedule: polynomial", "schedule.kind", "polynomial"},
      {"schedule: [linear]", "schedule", "[...]"},
      {"schedule: {min_lr_ratio: 2}", "schedule.min_lr_ratio", "2"},
      {"schedule: {warmup_steps: -1}", "schedule.warmup_steps", "-1"},
      {"schedule: {warmup_ratio: 1.5}", "schedule.warmup_ratio", "1.5"},
      {"schedule: {decay: step}", "schedule.decay", "step"},
      {"schedule: {decay_steps: 0}", "schedule.decay_steps", "0"},
      {"freeze: model.*", "freeze", "model.*"},
      {"freeze: [[a]]", "freeze", "[...]"},
      {"optimizer: {no_decay: bias}", "optimizer.no_decay", "bias"},
      {"max_skipped_steps: -1", "max_skipped_steps", "-1"},
      {"loss_spike_sigma: x", "loss_spike_sigma", "x"},
      {"eval: {every_steps: 0}", "eval.every_steps", "0"},
      {"eval: {max_sequences: 0}", "eval.max_sequences", "0"},
      {"eval: held-out.safetensors", "eval", "held-out.safetensors"},
      {"early_stop: {min_delta: -1}", "early_stop.min_delta", "-1"},
      {"tensorboard: ~/runs", "tensorboard", "~/runs"},
      {"max_grad_norm: 0", "max_grad_norm", "0"},
      {"max_grad_norm: none", "max_grad_norm", "none"},
      {"max_grad_norm: -1", "max_grad_norm", "-1"},
      {"seed: -1", "seed", "-1"},
      {"seed: 18446744073709551616", "seed", "18446744073709551616"},
      {"device: gpu", "device", "gpu"},
      {"device: CPU", "device", "CPU"},
      {"device: ", "device", "null"},
      {"launch: slurm", "launch", "slurm"},
      {"routes: {params: half}", "routes.params", "half"},
      {"routes: {grads: gpu}", "routes.grads", "gpu"},
      {"routes: {reduce: fp64}", "routes.reduce", "fp64"},
      {"tuning: {window_slots: -2}", "tuning.window_slots", "-2"},
      {"tuning: {h2d_chunk_bytes: 4MiB}", "tuning.h2d_chunk_bytes", "4MiB"},
      {"data: []", "data", "0 data sets"},
      {"data: {weight: 1}", "data", "has no path"},
      {"data: [{path: a, wieght: 1}]", "data", "entry 1: unknown key wieght"},
      {"data: [{path: a, weight: 1}, b]", "data", "entry 2: a weight"},
      {"data: [{path: a, weight: 0}]", "data", "entry 1: weight 0"},
      {"data: [{path: a, weight: .inf}]", "data", "entry 1: weight .inf"},
      {"data: [[a]]", "data", "[...]"},
      {"data: [~/a]", "data", "entry 1: ~"},
      {"packing: 1", "packing", "1"},
      {"long_documents: drop", "long_documents", "drop"},
      {"max_tokens: 0", "max_tokens", "0"},
      {"max_tokens: 1e9", "max_tokens", "1e9"},
      {"model: ", "model", "null"},
      {"model: ''", "model", ""},
      {"model: [a]", "model", "[...]"},
      {"model: ~/model", "model", "~/model"},
      {"name: a/b", "name", "a/b"},
      {"name: 'a b'", "name", "a b"},
      {"name: ''", "name", ""},
  };
  for (const BadValue& bad : cases) {
    auto spec = ParseJobFile(absl::StrCat("# one\n# two\n", bad.text, "\n"),
                             "dir/job.yaml", {});
    EXPECT_THAT(spec, StatusIs(kInvalid,
                               AllOf(HasSubstr("dir/job.yaml: "),
                                     HasSubstr(bad.field), HasSubstr("line 3"),
                                     HasSubstr(bad.value), HasSubstr("; "))))
        << bad.text;
  }
}

TEST(JobFileTest, StepsAndEpochsExcludeEachOther) {
  EXPECT_THAT(Parse("epochs: 2\nsteps: 10\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("steps (line 2)"),
                                       HasSubstr("epochs"))));
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse("epochs: 2\nsteps: null\n"));
  EXPECT_EQ(spec.epochs(), 2);
  EXPECT_EQ(spec.steps(), 0);
}

TEST(JobFileTest, MaxTokensExcludesStepsAndEpochs) {
  EXPECT_THAT(Parse("max_tokens: 5\nsteps: 10\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("steps (line 2)"),
                                       HasSubstr("max_tokens"))));
  EXPECT_THAT(Parse("max_tokens: 5\nepochs: 10\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("max_tokens (line 1)"),
                                       HasSubstr("epochs"))));
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                       Parse("epochs: 2\n", {"max_tokens=7"}));
  EXPECT_EQ(spec.max_tokens(), 7);
  EXPECT_EQ(spec.epochs(), 0);
  ASSERT_OK_AND_ASSIGN(spec, Parse("max_tokens: 2\n", {"steps=3"}));
  EXPECT_EQ(spec.max_tokens(), 0);
  EXPECT_EQ(spec.steps(), 3);
}

}  // namespace
}  // namespace slidedp::ctl
