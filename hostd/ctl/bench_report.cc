#include "hostd/ctl/bench_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/units.h"

namespace slidedp::ctl {
namespace {

// The seconds of each measured step. Steps overlap (an update runs under the
// next forward pass), so a step takes from the end of the one before to its
// own; the very first has no such end.
std::vector<double> StepSeconds(const BenchRun& run) {
  std::vector<double> seconds;
  for (size_t i = run.warmup; i < run.records.size(); ++i) {
    const v1::StepRecord& record = run.records[i];
    seconds.push_back(i == 0
                          ? record.seconds()
                          : static_cast<double>(record.end_ns() -
                                                run.records[i - 1].end_ns()) *
                                1e-9);
  }
  return seconds;
}

Json Distribution(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return Json{{"median", Median(values)},
              {"min", *least},
              {"max", *most},
              {"all", values}};
}

double MedianSeconds(const BenchRun& run,
                     int64_t (v1::StepRecord::*time_ns)() const) {
  std::vector<double> seconds;
  for (size_t i = run.warmup; i < run.records.size(); ++i) {
    seconds.push_back(static_cast<double>((run.records[i].*time_ns)()) * 1e-9);
  }
  return Median(std::move(seconds));
}

Json JsonLanes(const BenchRun& run) {
  using R = v1::StepRecord;
  return Json{{"deliver", MedianSeconds(run, &R::deliver_ns)},
              {"compute", MedianSeconds(run, &R::compute_ns)},
              {"reduce", MedianSeconds(run, &R::reduce_ns)},
              {"drain", MedianSeconds(run, &R::drain_ns)},
              {"update", MedianSeconds(run, &R::update_ns)},
              {"offload", MedianSeconds(run, &R::offload_ns)}};
}

void AddTraining(const BenchRun& run, double flops, Json& json) {
  const std::vector<double> seconds = StepSeconds(run);
  const double step = Median(seconds);
  const auto tokens =
      static_cast<double>(run.spec.batch_size() * run.spec.sequence_length());
  const auto ranks = static_cast<double>(run.spec.ranks());
  json["step_seconds"] = Distribution(seconds);
  json["tokens_per_second"] = tokens / step;
  json["model_tflops_per_gpu"] = flops / step / ranks * 1e-12;
  json["device_peak_bytes"] = run.info.device_peak_bytes();
  json["host_pss_peak_bytes"] = run.info.host_pss_peak_bytes();
  json["host_segment_bytes"] = run.info.host_bytes();
  json["host_gib_per_billion_parameters"] =
      static_cast<double>(run.info.host_pss_peak_bytes()) / kGiB /
      (static_cast<double>(run.parameters) * 1e-9);
  json["lane_busy_seconds"] = JsonLanes(run);
  const double compute = json["lane_busy_seconds"]["compute"].get<double>();
  const double stall = MedianSeconds(run, &v1::StepRecord::stall_ns);
  // What other lanes cost the step: compute waiting within it (parameters,
  // gradient slots, activations), that for activations alone, and all of it
  // that compute does not fill.
  json["exposed_seconds"] = Json{
      {"compute_stall", stall},
      {"offload_wait", MedianSeconds(run, &v1::StepRecord::offload_wait_ns)},
      {"not_compute", step - compute}};
  json["first_loss"] = JsonReal(run.records.front().loss());
  json["last_loss"] = JsonReal(run.records.back().loss());
  uint64_t skipped = 0, clipped = 0;
  for (const v1::StepRecord& record : run.records) {
    skipped += record.skipped();
    clipped += record.clip_coefficient() < 1;
  }
  json["steps_skipped"] = skipped;
  json["steps_clipped"] = clipped;
  json["plan"] = JsonPlan(run.plan);
  if (run.reference.has_value()) {
    const double alone =
        run.reference->at("detail").at("step_seconds").at("median");
    json["excess_over_reference"] = step / alone - 1;
  }
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

absl::StatusOr<Json> JsonBench(const BenchRun& run) {
  const v1::JobSpec& spec = run.spec;
  const double tokens =
      static_cast<double>(spec.batch_size() * spec.sequence_length());
  const model::StepFlops flops = model::ModelFlops(
      run.config, tokens, static_cast<double>(spec.sequence_length()));
  Json json = JsonDocument();
  json["model"] = run.model;
  json["layers"] = run.config.layers;
  json["vocab"] = run.config.vocab;
  json["parameters"] = run.parameters;
  json["device"] = Word(spec.device());
  json["ranks"] = spec.ranks();
  json["sequence_length"] = spec.sequence_length();
  json["micro_batch_size"] = spec.micro_batch_size();
  json["batch_size"] = spec.batch_size();
  json["tokens_per_step"] = spec.batch_size() * spec.sequence_length();
  json["steps"] = spec.steps() - run.warmup;
  json["warmup"] = run.warmup;
  json["token_distribution"] = "zipf";
  json["model_flops_per_step"] = Json{{"dense", flops.dense},
                                      {"head", flops.head},
                                      {"attention", flops.attention},
                                      {"total", flops.total()}};
  json["command"] = run.command;
  if (run.info.id() != 0) {
    if (run.records.size() != spec.steps() || spec.steps() <= run.warmup) {
      return absl::InternalError(absl::StrCat("the daemon reported ",
                                              run.records.size(), " of ",
                                              spec.steps(), " steps"));
    }
    AddTraining(run, flops.total(), json);
  }
  if (run.reference.has_value()) json["reference"] = *run.reference;
  return json;
}

void PrintBench(const Json& bench, std::ostream& out) {
  auto line = [&out](const char* name, const std::string& text) {
    out << absl::StreamFormat("%-26s%s\n", name, text);
  };
  line("model", absl::StrFormat("%s, %d layers, %.3f B parameters",
                                bench["model"].get<std::string>(),
                                bench["layers"].get<int64_t>(),
                                bench["parameters"].get<double>() * 1e-9));
  line("work",
       absl::StrFormat("%d ranks, %d x %d tokens a step, micro-batches of %d",
                       bench["ranks"].get<int64_t>(),
                       bench["batch_size"].get<int64_t>(),
                       bench["sequence_length"].get<int64_t>(),
                       bench["micro_batch_size"].get<int64_t>()));
  if (bench.contains("step_seconds")) {
    const Json& step = bench["step_seconds"];
    line("step time",
         absl::StrFormat("%.4f s (%.4f to %.4f)", step["median"].get<double>(),
                         step["min"].get<double>(), step["max"].get<double>()));
    line("tokens/s",
         absl::StrFormat("%.0f", bench["tokens_per_second"].get<double>()));
    line("model TFLOP/s per GPU",
         absl::StrFormat("%.2f", bench["model_tflops_per_gpu"].get<double>()));
    line("device memory, peak",
         FormatBytes(bench["device_peak_bytes"].get<uint64_t>()));
    line("host memory (PSS), peak",
         absl::StrFormat(
             "%s, %.2f GiB per billion parameters",
             FormatBytes(bench["host_pss_peak_bytes"].get<uint64_t>()),
             bench["host_gib_per_billion_parameters"].get<double>()));
    for (const auto& [lane, busy] : bench["lane_busy_seconds"].items()) {
      line(absl::StrCat("busy: ", lane).c_str(),
           absl::StrFormat("%.4f s", busy.get<double>()));
    }
    const Json& exposed = bench["exposed_seconds"];
    line("compute waits in the step",
         absl::StrFormat("%.4f s", exposed["compute_stall"].get<double>()));
    line("step without compute",
         absl::StrFormat("%.4f s", exposed["not_compute"].get<double>()));
    line("loss", absl::StrCat("first ", ToText(bench["first_loss"]), ", last ",
                              ToText(bench["last_loss"])));
  }
  if (bench.contains("reference")) {
    const Json& reference = bench["reference"];
    line("compute only",
         absl::StrFormat(
             "%.4f s, %.2f model TFLOP/s",
             reference["detail"]["step_seconds"]["median"].get<double>(),
             reference["value"].get<double>()));
  }
  if (bench.contains("excess_over_reference")) {
    line("excess over it",
         absl::StrFormat("%.2f %%",
                         100 * bench["excess_over_reference"].get<double>()));
  }
}

}  // namespace slidedp::ctl
