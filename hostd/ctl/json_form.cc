#include "hostd/ctl/json_form.h"

#include <cmath>
#include <ctime>

#include "absl/strings/str_format.h"
#include "common/base/units.h"

namespace slidedp::ctl {

Json JsonDocument() { return Json{{"api_version", "1"}}; }

std::string ToText(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false,
                   Json::error_handler_t::replace);
}

Json JsonTime(int64_t unix_us) {
  if (unix_us <= 0) return nullptr;
  time_t seconds = static_cast<time_t>(unix_us / 1'000'000);
  std::tm utc = {};
  if (gmtime_r(&seconds, &utc) == nullptr) return nullptr;
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%06dZ",
                         utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                         utc.tm_hour, utc.tm_min, utc.tm_sec,
                         static_cast<int>(unix_us % 1'000'000));
}

Json JsonReal(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json JsonJob(const v1::JobInfo& info) {
  bool has_steps = info.step() > 0;
  return Json{
      {"id", info.id()},
      {"name", info.name()},
      {"uid", info.uid()},
      {"user", info.user()},
      {"state", Word(info.state())},
      {"reason", info.reason()},
      {"step", info.step()},
      {"steps", info.steps()},
      {"ranks", info.ranks()},
      {"submitted", JsonTime(info.submitted_us())},
      {"started", JsonTime(info.started_us())},
      {"ended", JsonTime(info.ended_us())},
      {"host_bytes", info.host_bytes()},
      {"steps_per_second", JsonReal(info.steps_per_second())},
      {"tokens_per_second", JsonReal(info.tokens_per_second())},
      {"last_loss", has_steps ? JsonReal(info.last_loss()) : Json(nullptr)},
      {"client_id", info.client_id()},
      {"host_pss_peak_bytes", info.host_pss_peak_bytes()},
      {"device_peak_bytes", info.device_peak_bytes()},
      {"eval_loss",
       info.has_eval_loss() ? JsonReal(info.eval_loss()) : Json(nullptr)},
      {"best_eval_loss", info.has_best_eval_loss()
                             ? JsonReal(info.best_eval_loss())
                             : Json(nullptr)},
      {"best_eval_step",
       info.has_best_eval_loss() ? Json(info.best_eval_step()) : Json(nullptr)},
      {"loaded_bytes", info.loaded_bytes()},
      {"load_bytes", info.load_bytes()},
      {"mfu", info.has_mfu() ? JsonReal(info.mfu()) : Json(nullptr)},
      {"attempts", info.progress().attempts()},
      {"retries_used", info.progress().retries_used()},
      {"first_step", info.progress().first_step()},
      {"checkpoint",
       {{"path", info.progress().checkpoint_path()},
        {"step", info.progress().checkpoint_step()},
        {"ended", info.progress().checkpoints_ended()},
        {"under_way", info.progress().checkpointing()},
        {"failures_in_a_row", info.progress().failures_in_a_row()},
        {"last_failure", info.progress().last_failure()}}},
  };
}

Json JsonStep(const v1::StepRecord& step) {
  return Json{
      {"step", step.step()},
      {"loss", JsonReal(step.loss())},
      {"grad_norm", JsonReal(step.grad_norm())},
      {"clip_coefficient", JsonReal(step.clip_coefficient())},
      {"lr", JsonReal(step.lr())},
      {"valid_tokens", step.valid_tokens()},
      {"tokens", step.tokens()},
      {"seconds", JsonReal(step.seconds())},
      {"skipped", step.skipped()},
      {"skip_reason", step.skip_reason()},
      {"deliver_ns", step.deliver_ns()},
      {"compute_ns", step.compute_ns()},
      {"reduce_ns", step.reduce_ns()},
      {"drain_ns", step.drain_ns()},
      {"stall_ns", step.stall_ns()},
      {"offload_ns", step.offload_ns()},
      {"offload_wait_ns", step.offload_wait_ns()},
      {"update_ns", step.update_ns()},
      {"end_ns", step.end_ns()},
      {"tokens_per_second", JsonReal(step.tokens_per_second())},
      {"mfu", step.has_mfu() ? JsonReal(step.mfu()) : Json(nullptr)},
      {"loss_spike", step.loss_spike()},
      {"host_pss_bytes", step.host_pss_bytes()},
      {"device_bytes", step.device_bytes()},
  };
}

Json JsonEval(const v1::EvalRecord& eval) {
  return Json{
      {"step", eval.step()},
      {"loss", JsonReal(eval.loss())},
      {"valid_tokens", eval.valid_tokens()},
      {"sequences", eval.sequences()},
      {"seconds", JsonReal(eval.seconds())},
      {"best", eval.best()},
  };
}

namespace {

Json JsonRoutes(const v1::Routes& routes) {
  return Json{{"params", Word(routes.params())},
              {"grads", Word(routes.grads())},
              {"reduce", Word(routes.reduce())}};
}

Json JsonSources(const v1::JobSpec& spec) {
  Json sources = Json::array();
  for (const v1::DataSource& source : spec.sources()) {
    sources.push_back(Json{
        {"path", source.path()},
        {"weight", source.weight() > 0 ? Json(source.weight()) : Json(nullptr)},
        {"sequences", source.sequences()},
        {"tokens", source.tokens()},
        {"used_tokens", source.used_tokens()},
        {"valid_tokens", source.valid_tokens()},
        {"crc32c", source.crc32c()}});
  }
  return sources;
}

Json JsonTexts(const google::protobuf::RepeatedPtrField<std::string>& texts) {
  return Json(std::vector<std::string>(texts.begin(), texts.end()));
}

Json JsonEvaluation(const v1::Evaluation& eval) {
  return Json{
      {"data", eval.data()},
      {"every_steps",
       eval.every_steps() > 0 ? Json(eval.every_steps()) : Json(nullptr)},
      {"max_sequences", eval.max_sequences()},
      {"dataset",
       {{"sequences", eval.dataset_sequences()},
        {"tokens", eval.dataset_tokens()},
        {"valid_tokens", eval.dataset_valid_tokens()},
        {"crc32c", eval.dataset_crc32c()}}},
  };
}

}  // namespace

Json JsonSpec(const v1::JobSpec& spec) {
  const v1::Tuning& tuning = spec.tuning();
  return Json{
      {"name", spec.name()},
      {"model", spec.model()},
      {"data", JsonSources(spec)},
      {"packing", spec.packing()},
      {"long_documents", spec.long_documents() == v1::LONG_DOCUMENTS_TRUNCATE
                             ? "truncate"
                             : "split"},
      {"output", spec.output()},
      {"plan", spec.plan().empty() ? Json(nullptr) : Json(spec.plan())},
      {"ranks", spec.ranks()},
      {"device", Word(spec.device())},
      {"sequence_length", spec.sequence_length()},
      {"batch_size", spec.batch_size()},
      {"micro_batch_size", spec.micro_batch_size()},
      {"steps", spec.steps()},
      {"epochs", spec.epochs() > 0 ? Json(spec.epochs()) : Json(nullptr)},
      {"max_tokens",
       spec.max_tokens() > 0 ? Json(spec.max_tokens()) : Json(nullptr)},
      {"optimizer",
       {{"lr", spec.optimizer().lr()},
        {"beta1", spec.optimizer().beta1()},
        {"beta2", spec.optimizer().beta2()},
        {"eps", spec.optimizer().eps()},
        {"weight_decay", spec.optimizer().weight_decay()},
        {"no_decay", spec.optimizer().has_no_decay()
                         ? JsonTexts(spec.optimizer().no_decay().patterns())
                         : Json(nullptr)}}},
      {"freeze", JsonTexts(spec.freeze())},
      {"schedule",
       {{"kind", Word(spec.schedule().kind())},
        {"warmup_steps", spec.schedule().warmup_steps()},
        {"warmup_ratio", spec.schedule().warmup_ratio()},
        {"min_lr_ratio", spec.schedule().min_lr_ratio()},
        {"decay_steps", spec.schedule().decay_steps()},
        {"decay", Word(spec.schedule().decay())}}},
      {"max_grad_norm",
       spec.has_max_grad_norm() ? Json(spec.max_grad_norm()) : Json(nullptr)},
      {"max_skipped_steps", spec.max_skipped_steps()},
      {"loss_spike_sigma", spec.loss_spike_sigma()},
      {"eval", spec.has_eval() ? JsonEvaluation(spec.eval()) : Json(nullptr)},
      {"early_stop",
       {{"patience", spec.early_stop().patience()},
        {"min_delta", spec.early_stop().min_delta()}}},
      {"tensorboard",
       spec.tensorboard().empty() ? Json(nullptr) : Json(spec.tensorboard())},
      {"seed", spec.seed()},
      {"routes", JsonRoutes(spec.routes())},
      {"tuning",
       {{"h2d_chunk_bytes", tuning.h2d_chunk_bytes()},
        {"d2h_chunk_bytes", tuning.d2h_chunk_bytes()},
        {"window_slots", tuning.window_slots()},
        {"grad_slots", tuning.grad_slots()},
        {"own_chunks", tuning.own_chunks()},
        {"ring_chunks", tuning.ring_chunks()},
        {"head_chunk_tokens", tuning.head_chunk_tokens()},
        {"compute_threads", tuning.compute_threads()},
        {"update_threads", tuning.update_threads()},
        {"kept_layers",
         tuning.has_kept_layers() ? Json(tuning.kept_layers()) : Json("auto")},
        {"keep_mask", tuning.keep_mask()},
        {"keep", Json(std::vector<uint8_t>(tuning.keep().begin(),
                                           tuning.keep().end()))},
        {"offload_permille",
         Json(std::vector<uint32_t>(tuning.offload_permille().begin(),
                                    tuning.offload_permille().end()))},
        {"stage_slots", tuning.stage_slots()},
        {"embedding_routes", JsonRoutes(tuning.embedding_routes())},
        {"decoder_routes", JsonRoutes(tuning.decoder_routes())},
        {"head_routes", JsonRoutes(tuning.head_routes())},
        {"gpu_memory_limit_gib",
         static_cast<double>(tuning.gpu_memory_limit_bytes()) / kGiB}}},
      {"compute_dtype",
       spec.compute_dtype() == v1::COMPUTE_DTYPE_FP32 ? "fp32" : "bf16"},
      {"deterministic", spec.deterministic()},
      {"update", Word(spec.update_mode())},
      {"random_weights_seed", spec.has_random_weights_seed()
                                  ? Json(spec.random_weights_seed())
                                  : Json(nullptr)},
      {"checkpoint",
       {{"folder", spec.checkpoint().folder()},
        {"every_steps", spec.checkpoint().every_steps()},
        {"every_minutes", spec.checkpoint().every_minutes()},
        {"keep", spec.checkpoint().keep()}}},
      {"resume", spec.resume().empty() ? "none" : spec.resume()},
      {"retries", spec.retries()},
      {"launch", Word(spec.launch())},
      {"dataset",
       {{"sequences", spec.dataset_sequences()},
        {"tokens", spec.dataset_tokens()},
        {"valid_tokens", spec.dataset_valid_tokens()}}},
  };
}

Json JsonPlan(const v1::Plan& plan) {
  return Json{
      {"ranks", plan.ranks()},
      {"device", Word(plan.device())},
      {"embedding", JsonRoutes(plan.embedding())},
      {"decoder", JsonRoutes(plan.decoder())},
      {"head", JsonRoutes(plan.head())},
      {"update_mode", Word(plan.update_mode())},
      {"sequence_length", plan.sequence_length()},
      {"micro_batch_size", plan.micro_batch_size()},
      {"micro_batches", plan.micro_batches()},
      {"documents_per_sequence", plan.documents_per_sequence()},
      {"h2d_chunk_bytes", plan.h2d_chunk_bytes()},
      {"d2h_chunk_bytes", plan.d2h_chunk_bytes()},
      {"window_slots", plan.window_slots()},
      {"grad_slots", plan.grad_slots()},
      {"own_chunks", plan.own_chunks()},
      {"ring_chunks", plan.ring_chunks()},
      {"head_chunk_tokens", plan.head_chunk_tokens()},
      {"compute_threads", plan.compute_threads()},
      {"update_threads", plan.update_threads()},
      {"keep",
       Json(std::vector<uint8_t>(plan.keep().begin(), plan.keep().end()))},
      {"offload_permille",
       Json(std::vector<uint32_t>(plan.offload_permille().begin(),
                                  plan.offload_permille().end()))},
      {"stage_slots", plan.stage_slots()},
      {"compute_dtype",
       plan.compute_dtype() == v1::COMPUTE_DTYPE_FP32 ? "fp32" : "bf16"},
      {"deterministic", plan.deterministic()},
      {"gpu_memory_limit_bytes", plan.gpu_memory_limit_bytes()},
  };
}

Json JsonBytes(const std::vector<policy::NamedBytes>& parts) {
  Json json = Json::object();
  for (const policy::NamedBytes& part : parts) json[part.name] = part.bytes;
  return json;
}

}  // namespace slidedp::ctl
