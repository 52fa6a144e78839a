// slidedpctl show: everything the daemon knows about one job.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/clock.h"
#include "common/base/units.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/table.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

constexpr size_t kMaxTextBytes = 4096;

Json JsonShow(const v1::GetReply& reply) {
  Json json = JsonDocument();
  json["job"] = JsonJob(reply.info());
  json["spec"] = JsonSpec(reply.spec());
  json["plan"] = reply.has_plan() ? JsonPlan(reply.plan()) : Json(nullptr);
  json["host_bytes"] = Json::object();
  for (const v1::NamedBytes& part : reply.host_bytes()) {
    json["host_bytes"][part.name()] = part.bytes();
  }
  json["events"] = Json::array();
  for (const v1::JobEvent& event : reply.events()) {
    json["events"].push_back(Json{{"time", JsonTime(event.time_us())},
                                  {"state", Word(event.state())},
                                  {"text", event.text()}});
  }
  json["last_step"] =
      reply.has_last_step() ? JsonStep(reply.last_step()) : Json(nullptr);
  json["log_folder"] = reply.log_folder();
  return json;
}

class Lines {
 public:
  explicit Lines(std::ostream& out) : out_(out) {}
  void Add(const char* name, const std::string& value) {
    if (value.empty()) return;
    std::string padded = name;
    padded.resize(14, ' ');
    out_ << padded << Printable(value, kMaxTextBytes) << "\n";
  }

 private:
  std::ostream& out_;
};

std::string RoutesText(const v1::Routes& routes) {
  return absl::StrCat(Word(routes.params()), "/", Word(routes.grads()), "/",
                      Word(routes.reduce()));
}

void PrintStep(const v1::StepRecord& step, Lines& lines) {
  auto ms = [](int64_t ns) { return static_cast<double>(ns) / 1e6; };
  lines.Add(
      "last step",
      absl::StrFormat("%d: loss %.6f, gradient norm %.4g, clip %.4g, "
                      "lr %.4g, %.3f s",
                      step.step(), step.loss(), step.grad_norm(),
                      step.clip_coefficient(), step.lr(), step.seconds()));
  if (step.skipped()) lines.Add("  skipped", step.skip_reason());
  if (step.tokens_per_second() > 0) {
    lines.Add("  speed",
              absl::StrFormat("%.0f tokens/s%s", step.tokens_per_second(),
                              step.has_mfu() ? absl::StrFormat(", MFU %.1f%%",
                                                               100 * step.mfu())
                                             : ""));
  }
  lines.Add("  lanes",
            absl::StrFormat(
                "deliver %.1f ms, compute %.1f, stall %.1f, "
                "reduce %.1f, drain %.1f, update %.1f, offload %.1f",
                ms(step.deliver_ns()), ms(step.compute_ns()),
                ms(step.stall_ns()), ms(step.reduce_ns()), ms(step.drain_ns()),
                ms(step.update_ns()), ms(step.offload_ns())));
}

void PrintShow(const v1::GetReply& reply, std::ostream& out) {
  const v1::JobInfo& info = reply.info();
  const v1::JobSpec& spec = reply.spec();
  Lines lines(out);
  lines.Add("id", absl::StrCat(info.id()));
  lines.Add("name", info.name());
  lines.Add("user", absl::StrCat(info.user(), " (uid ", info.uid(), ")"));
  lines.Add("state", Word(info.state()));
  lines.Add("reason", info.reason());
  lines.Add("step", absl::StrCat(info.step(), " of ", info.steps()));
  lines.Add("submitted", LocalTimeText(info.submitted_us()));
  lines.Add("started", LocalTimeText(info.started_us()));
  lines.Add("ended", LocalTimeText(info.ended_us()));
  lines.Add("elapsed", ElapsedText(info, UnixMicros()));
  lines.Add("eta", EtaText(info));
  const v1::JobProgress& progress = info.progress();
  if (progress.attempts() > 1) {
    lines.Add("attempt",
              absl::StrCat(progress.attempts(), ", from step ",
                           progress.first_step(), "; ", progress.retries_used(),
                           " of ", spec.retries(), " retries used"));
  }
  if (progress.checkpointing()) lines.Add("saving", "a checkpoint");
  if (!progress.checkpoint_path().empty()) {
    lines.Add("saved", absl::StrCat("step ", progress.checkpoint_step(), " in ",
                                    progress.checkpoint_path()));
  }
  lines.Add("model", spec.model());
  for (const v1::DataSource& source : spec.sources()) {
    lines.Add(
        "data",
        absl::StrCat(source.path(), " (", source.sequences(), " sequences of ",
                     spec.sequence_length(), spec.packing() ? ", packed" : "",
                     source.weight() > 0
                         ? absl::StrCat(", weight ", source.weight())
                         : std::string(),
                     ")"));
  }
  lines.Add("output", spec.output());
  lines.Add("batch", absl::StrCat(spec.batch_size(), " sequences, micro-batch ",
                                  spec.micro_batch_size(), ", ", spec.ranks(),
                                  spec.ranks() == 1 ? " rank" : " ranks"));
  lines.Add("optimizer",
            absl::StrFormat("AdamW lr %g, betas %g %g, eps %g, decay %g; %s, "
                            "%d steps of warm-up",
                            spec.optimizer().lr(), spec.optimizer().beta1(),
                            spec.optimizer().beta2(), spec.optimizer().eps(),
                            spec.optimizer().weight_decay(),
                            Word(spec.schedule().kind()),
                            spec.schedule().warmup_steps()));
  if (spec.freeze_size() > 0) {
    lines.Add("frozen", absl::StrJoin(spec.freeze(), ", "));
  }
  if (spec.has_eval()) {
    lines.Add("evaluation",
              absl::StrCat(spec.eval().data(), ", ",
                           spec.eval().max_sequences(), " sequences"));
  }
  if (info.has_best_eval_loss()) {
    lines.Add("  loss", absl::StrFormat("%.6f; the best %.6f, after step %d",
                                        info.eval_loss(), info.best_eval_loss(),
                                        info.best_eval_step()));
  }
  lines.Add("clipping",
            spec.has_max_grad_norm()
                ? absl::StrFormat("max_grad_norm %g", spec.max_grad_norm())
                : std::string("none"));
  if (reply.has_plan()) {
    const v1::Plan& plan = reply.plan();
    lines.Add("plan",
              absl::StrCat(Word(plan.device()), ", ", Word(plan.update_mode()),
                           ", routes ", RoutesText(plan.decoder()), ", window ",
                           plan.window_slots(), ", ", plan.micro_batches(),
                           " micro-batches a rank"));
  }
  if (reply.has_last_step()) PrintStep(reply.last_step(), lines);
  lines.Add("logs", reply.log_folder());
  uint64_t total = 0;
  for (const v1::NamedBytes& part : reply.host_bytes()) {
    lines.Add(absl::StrCat("  ", part.name()).c_str(),
              absl::StrCat(FormatBytes(part.bytes()), " (", part.bytes(), ")"));
    total += part.bytes();
  }
  if (total > 0) {
    lines.Add("host memory",
              absl::StrCat(FormatBytes(total), " (", total, ")"));
  }
  for (const v1::JobEvent& event : reply.events()) {
    out << LocalTimeText(event.time_us()) << "  " << Word(event.state());
    if (!event.text().empty()) {
      out << ": " << Printable(event.text(), kMaxTextBytes);
    }
    out << "\n";
  }
}

}  // namespace

ExitCode Show(const Context& context, uint64_t id) {
  ControlClient client(context.socket);
  absl::StatusOr<v1::GetReply> reply = client.Get(id);
  if (!reply.ok()) return context.FailCall(reply.status());
  if (context.json()) {
    context.out() << ToText(JsonShow(*reply)) << "\n";
  } else if (context.output == Output::kName) {
    context.out() << reply->info().id() << "\n";
  } else {
    PrintShow(*reply, context.out());
  }
  return kExitOk;
}

}  // namespace slidedp::ctl
