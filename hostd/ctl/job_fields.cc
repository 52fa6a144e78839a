#include "hostd/ctl/job_fields.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "hostd/ctl/job_field_readers.h"

namespace slidedp::ctl {
namespace {

constexpr uint64_t kMaxRanks = 64;
constexpr uint64_t kMaxSequenceLength = uint64_t{1} << 20;
constexpr uint64_t kMaxBatch = uint64_t{1} << 20;
constexpr uint64_t kMaxSteps = 1'000'000'000;
constexpr uint64_t kMaxTokens = uint64_t{1} << 48;
constexpr uint64_t kMaxChunkBytes = uint64_t{1} << 34;
constexpr uint64_t kMaxThreads = 4096;
constexpr uint64_t kMaxEvalSequences = uint64_t{1} << 40;

std::vector<JobField> MakeFields() {
  constexpr uint64_t kAny64 = std::numeric_limits<uint64_t>::max();
  return {
      {"name", "null", "null: the job file's name", ReadName},
      {"model", "/path/to/model", "Hugging Face model folder; required",
       Path(SDP_SET(set_model))},
      {"data", "/path/to/data.safetensors",
       "dataset made by slidedp-prepare, or a list of {path, weight}; required",
       ReadSources},
      {"output", "/path/to/output",
       "folder for the trained model: absent or empty; may be left out with "
       "random_weights_seed only",
       Path(SDP_SET(set_output))},
      {"plan", "null", "plan file, as slidedpctl plan prints; null: none",
       ReadPlan},
      {"ranks", "1", "workers, one device each",
       Integer(1, kMaxRanks, "2", SDP_SET(set_ranks))},
      {"device", "auto", "auto, cpu, cuda",
       Word<v1::DeviceKind>({{"auto", v1::DEVICE_KIND_AUTO},
                             {"cpu", v1::DEVICE_KIND_CPU},
                             {"cuda", v1::DEVICE_KIND_CUDA}},
                            SDP_SET(set_device))},
      {"sequence_length", "null",
       "tokens; null: 1024, or the model's longest if that is less",
       Integer(2, kMaxSequenceLength, "1024", SDP_SET(set_sequence_length),
               true)},
      {"packing", "false",
       "true: several documents share a sequence, apart from each other",
       Word<bool>({{"false", false}, {"true", true}}, SDP_SET(set_packing))},
      {"long_documents", "split", "longer than a sequence: split, truncate",
       Word<v1::LongDocuments>({{"split", v1::LONG_DOCUMENTS_SPLIT},
                                {"truncate", v1::LONG_DOCUMENTS_TRUNCATE}},
                               SDP_SET(set_long_documents))},
      {"batch_size", "8", "sequences a step, all ranks together",
       Integer(1, kMaxBatch, "8", SDP_SET(set_batch_size))},
      {"micro_batch_size", "1", "sequences that a rank computes at once",
       Integer(1, kMaxBatch, "1", SDP_SET(set_micro_batch_size))},
      {"steps", "null", "optimizer steps; this, epochs or max_tokens",
       Integer(1, kMaxSteps, "100", SDP_SET(set_steps), true)},
      {"epochs", "3", "passes over the data", ReadEpochs},
      {"max_tokens", "null", "the last step reaches it, padding not counted",
       Integer(1, kMaxTokens, "1000000000", SDP_SET(set_max_tokens), true)},
      {"optimizer.lr", "5e-5", "peak learning rate",
       Real({0, 10, true}, "5e-5", SDP_SET_IN(optimizer, set_lr))},
      {"optimizer.beta1", "0.9", "",
       Real({0, 1, false, true}, "0.9", SDP_SET_IN(optimizer, set_beta1))},
      {"optimizer.beta2", "0.999", "",
       Real({0, 1, false, true}, "0.999", SDP_SET_IN(optimizer, set_beta2))},
      {"optimizer.eps", "1e-8", "",
       Real({1e-30, 1}, "1e-8", SDP_SET_IN(optimizer, set_eps))},
      {"optimizer.weight_decay", "0.0", "not applied to norms and biases",
       Real({0, 10}, "0.01", SDP_SET_IN(optimizer, set_weight_decay))},
      {"optimizer.no_decay", "null",
       "tensors without decay, e.g. [\"*bias\", \"*norm*\"]; null: norms and "
       "biases",
       ReadNoDecay},
      {"freeze", "[]",
       "tensors that are not trained, e.g. [\"model.embed_tokens.*\"]; by name "
       "in the model's files, * any text, ? any character",
       ReadFreeze},
      {"schedule.kind", "linear",
       "linear, constant, cosine, wsd (warm-up, stable, decay)",
       Word<v1::ScheduleKind>({{"linear", v1::SCHEDULE_KIND_LINEAR},
                               {"constant", v1::SCHEDULE_KIND_CONSTANT},
                               {"cosine", v1::SCHEDULE_KIND_COSINE},
                               {"wsd", v1::SCHEDULE_KIND_WSD}},
                              SDP_SET_IN(schedule, set_kind))},
      {"schedule.warmup_steps", "0", "",
       Integer(0, kMaxSteps, "100", SDP_SET_IN(schedule, set_warmup_steps))},
      {"schedule.warmup_ratio", "0.0", "of the job's steps, instead",
       Real({0, 1}, "0.03", SDP_SET_IN(schedule, set_warmup_ratio))},
      {"schedule.min_lr_ratio", "0.0", "cosine and wsd only: floor / peak",
       Real({0, 1}, "0.1", SDP_SET_IN(schedule, set_min_lr_ratio))},
      {"schedule.decay_steps", "null",
       "wsd only: the last steps; null: a tenth of the job's",
       Integer(1, kMaxSteps, "100", SDP_SET_IN(schedule, set_decay_steps),
               true)},
      {"schedule.decay", "cosine", "wsd only: cosine, linear, 1-sqrt",
       Word<v1::DecayKind>({{"cosine", v1::DECAY_KIND_COSINE},
                            {"linear", v1::DECAY_KIND_LINEAR},
                            {"1-sqrt", v1::DECAY_KIND_ONE_MINUS_SQRT}},
                           SDP_SET_IN(schedule, set_decay))},
      {"max_grad_norm", "1.0", "null: no clipping, updates during backward",
       ReadMaxGradNorm},
      {"max_skipped_steps", "10",
       "in a row, for a loss or gradient that is not finite; one more ends the "
       "job; 0: no limit",
       Integer(0, kMaxSteps, "10", SDP_SET(set_max_skipped_steps))},
      {"loss_spike_sigma", "6.0",
       "report a loss so many deviations above the mean of the 64 before; 0: "
       "never",
       Real({0, 1e6}, "6.0", SDP_SET(set_loss_spike_sigma))},
      {"eval.data", "null",
       "dataset whose loss is taken before, during and after; null: none",
       PathOrNull([](v1::JobSpec& spec, std::string path) {
         spec.mutable_eval()->set_data(std::move(path));
       })},
      {"eval.every_steps", "null",
       "null: before the first step and after the last only",
       Integer(1, kMaxSteps, "100", SDP_SET_IN(eval, set_every_steps), true)},
      {"eval.max_sequences", "null", "the first so many; null: all",
       Integer(1, kMaxEvalSequences, "256", SDP_SET_IN(eval, set_max_sequences),
               true)},
      {"early_stop.patience", "0",
       "evaluations in a row without a lower loss that end the job; 0: off",
       Integer(0, kMaxSteps, "3", SDP_SET_IN(early_stop, set_patience))},
      {"early_stop.min_delta", "0.0", "how much lower is lower",
       Real({0, 1e6}, "0.01", SDP_SET_IN(early_stop, set_min_delta))},
      {"tensorboard", "null",
       "folder for TensorBoard's event files, written as you; null: none",
       PathOrNull([](v1::JobSpec& spec, std::string path) {
         spec.set_tensorboard(std::move(path));
       })},
      {"seed", "42", "of the order of the data",
       Integer(0, kAny64, "42", SDP_SET(set_seed))},
      {"routes.params", "auto", "auto, full, sharded",
       Word<v1::ParamRoute>({{"auto", v1::PARAM_ROUTE_UNSPECIFIED},
                             {"full", v1::PARAM_ROUTE_FULL},
                             {"sharded", v1::PARAM_ROUTE_SHARDED}},
                            SDP_SET_IN(routes, set_params))},
      {"routes.grads", "auto", "auto, gpu_root, gpu_sharded, cpu",
       Word<v1::GradRoute>({{"auto", v1::GRAD_ROUTE_UNSPECIFIED},
                            {"gpu_root", v1::GRAD_ROUTE_GPU_ROOT},
                            {"gpu_sharded", v1::GRAD_ROUTE_GPU_SHARDED},
                            {"cpu", v1::GRAD_ROUTE_CPU}},
                           SDP_SET_IN(routes, set_grads))},
      {"routes.reduce", "auto", "auto, fp32, bf16",
       Word<v1::ReduceDtype>({{"auto", v1::REDUCE_DTYPE_UNSPECIFIED},
                              {"fp32", v1::REDUCE_DTYPE_FP32},
                              {"bf16", v1::REDUCE_DTYPE_BF16}},
                             SDP_SET_IN(routes, set_reduce))},
      {"tuning.h2d_chunk_bytes", "0", "0: policy chooses, here and below",
       Integer(0, kMaxChunkBytes, "4194304",
               SDP_SET_IN(tuning, set_h2d_chunk_bytes))},
      {"tuning.d2h_chunk_bytes", "0", "",
       Integer(0, kMaxChunkBytes, "4194304",
               SDP_SET_IN(tuning, set_d2h_chunk_bytes))},
      {"tuning.window_slots", "0", "decoder layers held on the device",
       Integer(0, 65536, "2", SDP_SET_IN(tuning, set_window_slots))},
      {"tuning.grad_slots", "0", "layer gradients held on the device",
       Integer(0, 65536, "2", SDP_SET_IN(tuning, set_grad_slots))},
      {"tuning.own_chunks", "0",
       "without clipping: gradient chunks that may wait for the next forward",
       Integer(0, uint64_t{1} << 30, "64", SDP_SET_IN(tuning, set_own_chunks))},
      {"tuning.ring_chunks", "0", "gradient ring per rank, without clipping",
       Integer(0, uint64_t{1} << 30, "16",
               SDP_SET_IN(tuning, set_ring_chunks))},
      {"tuning.head_chunk_tokens", "0", "tokens whose logits exist at once",
       Integer(0, kMaxSequenceLength, "256",
               SDP_SET_IN(tuning, set_head_chunk_tokens))},
      {"tuning.compute_threads", "0", "of each CPU rank",
       Integer(0, kMaxThreads, "2", SDP_SET_IN(tuning, set_compute_threads))},
      {"tuning.update_threads", "0", "of the daemon, for this job",
       Integer(0, kMaxThreads, "2", SDP_SET_IN(tuning, set_update_threads))},
      {"tuning.kept_layers", "auto",
       "last layers that recompute nothing; auto: what memory allows",
       ReadKeptLayers},
      {"tuning.keep_mask", "0", "segments that the other layers keep",
       Integer(0, 127, "0", SDP_SET_IN(tuning, set_keep_mask))},
      {"tuning.keep", "auto",
       "instead of both, what every layer keeps: none, selective, full, or "
       "segments, e.g. [qkv, attention]",
       ReadKeep},
      {"tuning.offload", "auto",
       "share of what every layer keeps that waits in host memory, 0 to 1",
       ReadOffloaded},
      {"tuning.stage_slots", "0",
       "micro-batches on their way to or from the host",
       Integer(0, 1024, "2", SDP_SET_IN(tuning, set_stage_slots))},
      {"tuning.gpu_memory_limit_gib", "0", "0: the GPU's own",
       Real({0, 65536}, "24",
            [](v1::JobSpec& spec, double gib) {
              spec.mutable_tuning()->set_gpu_memory_limit_bytes(
                  static_cast<uint64_t>(gib * 1073741824.0));
            })},
      {"compute_dtype", "bf16",
       "bf16, fp32 (comparisons; a CPU rank always takes fp32)",
       Word<v1::ComputeDtype>(
           {{"bf16", v1::COMPUTE_DTYPE_BF16}, {"fp32", v1::COMPUTE_DTYPE_FP32}},
           SDP_SET(set_compute_dtype))},
      {"deterministic", "false", "bitwise repeatable on a GPU; slower",
       Word<bool>({{"false", false}, {"true", true}},
                  SDP_SET(set_deterministic))},
      {"update", "auto", "auto, eager, deferred, speculative",
       Word<v1::UpdateMode>({{"auto", v1::UPDATE_MODE_UNSPECIFIED},
                             {"eager", v1::UPDATE_MODE_EAGER},
                             {"deferred", v1::UPDATE_MODE_DEFERRED},
                             {"speculative", v1::UPDATE_MODE_SPECULATIVE}},
                            SDP_SET(set_update_mode))},
      {"random_weights_seed", "null",
       "train from weights made of this seed; model needs only config.json",
       ReadRandomWeightsSeed},
      {"checkpoint.folder", "null", "null: output, with .checkpoints added",
       ReadCheckpointFolder},
      {"checkpoint.every_steps", "0", "save so often; 0: not by steps",
       Integer(0, kMaxSteps, "500", SDP_SET_IN(checkpoint, set_every_steps))},
      {"checkpoint.every_minutes", "0", "save so often; 0: not by time",
       Real({0, 1e6}, "30", SDP_SET_IN(checkpoint, set_every_minutes))},
      {"checkpoint.keep", "2", "the newest so many stay",
       Integer(1, 1000, "2", SDP_SET_IN(checkpoint, set_keep))},
      {"resume", "none", "none, auto (the newest good one), or its folder",
       ReadResume},
      {"retries", "null",
       "restarts after lost workers or daemons; null: 2 if it saves by steps "
       "or "
       "time, else 0",
       ReadRetries},
      {"launch", "daemon",
       "daemon, manual (you start slidedp-worker --job ID --rank R)",
       Word<v1::LaunchKind>({{"daemon", v1::LAUNCH_KIND_DAEMON},
                             {"manual", v1::LAUNCH_KIND_MANUAL}},
                            SDP_SET(set_launch))},
  };
}

#undef SDP_SET
#undef SDP_SET_IN

}  // namespace

const std::vector<JobField>& JobFields() {
  static const std::vector<JobField> fields = MakeFields();
  return fields;
}

}  // namespace slidedp::ctl
