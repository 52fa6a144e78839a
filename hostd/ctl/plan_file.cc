#include "hostd/ctl/plan_file.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/ctl/job_fields.h"
#include "hostd/ctl/layer_choice.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

// Keys of a plan file that are keys of a job file's tuning, in their order.
constexpr const char* kTuningKeys[] = {
    "h2d_chunk_bytes",   "d2h_chunk_bytes", "window_slots", "grad_slots",
    "stage_slots",       "own_chunks",      "ring_chunks",  "compute_threads",
    "head_chunk_tokens", "update_threads"};
constexpr const char* kKinds[] = {"embedding", "decoder", "head"};

struct Layer {
  int line = 0;  // 0: not given
  uint8_t keep = 0;
  uint16_t offload_permille = 0;
};

class Reader {
 public:
  Reader(absl::string_view file, int64_t layers, v1::JobSpec& spec)
      : file_(file), layers_(layers), spec_(spec) {}

  absl::Status Read(const YamlNode& root) {
    if (root.kind != YamlNode::Kind::kMap) {
      return Error("", root,
                   {"not a plan file", "start from `slidedpctl plan`"});
    }
    for (const YamlMember& member : root.members) {
      SDP_RETURN_IF_ERROR(ReadMember(member));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Error(const std::string& key, const YamlNode& node,
                     const Problem& problem) const {
    return InvalidInput(
        file_, absl::StrCat(Printable(key, 80), " (line ", node.line, ")"),
        Describe(node), problem.what, problem.remedy);
  }
  absl::Status Unknown(const std::string& key, const YamlMember& member,
                       const std::vector<std::string>& known) const {
    const std::optional<std::string> nearest = Nearest(member.key, known);
    YamlNode at = member.value;
    at.line = member.line;
    return Error(
        key, at,
        {"unknown key", nearest.has_value()
                            ? absl::StrCat("did you mean ", *nearest, "?")
                            : "`slidedpctl plan` prints all of them"});
  }

  absl::Status ReadMember(const YamlMember& member) {
    if (member.key == "api_version") return absl::OkStatus();
    if (member.key == "layers") return ReadLayers(member.value);
    if (member.key == "routes") return ReadRoutes(member.value);
    std::vector<std::string> known = {"layers", "routes"};
    known.insert(known.end(), std::begin(kTuningKeys), std::end(kTuningKeys));
    if (std::find(known.begin(), known.end(), member.key) == known.end()) {
      return Unknown(member.key, member, known);
    }
    return ReadField(absl::StrCat("tuning.", member.key), member.key,
                     member.value);
  }

  // As the job file's field, unless the job has chosen.
  absl::Status ReadField(const std::string& field, const std::string& key,
                         const YamlNode& node) {
    const auto& fields = JobFields();
    const auto found =
        std::find_if(fields.begin(), fields.end(),
                     [&](const JobField& f) { return f.key == field; });
    v1::JobSpec read;
    if (auto problem = found->read(node, read))
      return Error(key, node, *problem);
    read.mutable_tuning()->MergeFrom(spec_.tuning());
    *spec_.mutable_tuning() = std::move(*read.mutable_tuning());
    return absl::OkStatus();
  }

  absl::Status ReadRoutes(const YamlNode& node) {
    if (node.kind != YamlNode::Kind::kMap) {
      return Error(
          "routes", node,
          {"not a group", "write embedding, decoder and head below it"});
    }
    for (const YamlMember& kind : node.members) {
      const std::string key = absl::StrCat("routes.", kind.key);
      if (std::find(std::begin(kKinds), std::end(kKinds), kind.key) ==
          std::end(kKinds)) {
        return Unknown(key, kind, {std::begin(kKinds), std::end(kKinds)});
      }
      if (kind.value.kind != YamlNode::Kind::kMap) {
        return Error(key, kind.value,
                     {"not a group",
                      "write {params: ..., grads: ..., "
                      "reduce: ...}"});
      }
      for (const YamlMember& route : kind.value.members) {
        SDP_RETURN_IF_ERROR(ReadRoute(kind.key, route));
      }
    }
    return absl::OkStatus();
  }

  // The job's own `routes` come first.
  absl::Status ReadRoute(const std::string& kind, const YamlMember& route) {
    const std::string key = absl::StrCat("routes.", kind, ".", route.key);
    const auto& fields = JobFields();
    const auto found =
        std::find_if(fields.begin(), fields.end(), [&](const JobField& f) {
          return f.key == absl::StrCat("routes.", route.key);
        });
    if (found == fields.end()) {
      return Unknown(key, route, {"params", "grads", "reduce"});
    }
    v1::JobSpec read;
    if (auto problem = found->read(route.value, read)) {
      return Error(key, route.value, *problem);
    }
    v1::Tuning& tuning = *spec_.mutable_tuning();
    v1::Routes& routes = kind == "embedding"
                             ? *tuning.mutable_embedding_routes()
                         : kind == "decoder" ? *tuning.mutable_decoder_routes()
                                             : *tuning.mutable_head_routes();
    routes.MergeFrom(read.routes());
    routes.MergeFrom(spec_.routes());
    return absl::OkStatus();
  }

  absl::Status ReadLayers(const YamlNode& node) {
    if (node.kind != YamlNode::Kind::kMap) {
      return Error("layers", node,
                   {"not a group", "write e.g. `0-11: {keep: none}` below it"});
    }
    const v1::Tuning& tuning = spec_.tuning();
    if (tuning.has_kept_layers() || tuning.keep_mask() != 0 ||
        !tuning.keep().empty() || tuning.offload_permille_size() > 0) {
      return Error("layers", node,
                   {"the job says already what layers keep",
                    "leave out either these or tuning.kept_layers, keep_mask, "
                    "keep and offload"});
    }
    std::vector<Layer> layers(layers_);
    for (const YamlMember& member : node.members) {
      SDP_RETURN_IF_ERROR(ReadRange(member, layers));
    }
    for (int64_t l = 0; l < layers_; ++l) {
      if (layers[l].line != 0) continue;
      return Error("layers", node,
                   {absl::StrCat("does not say what layer ", l, " keeps"),
                    absl::StrCat("name every layer from 0 to ", layers_ - 1)});
    }
    for (const Layer& layer : layers) {
      spec_.mutable_tuning()->mutable_keep()->push_back(
          static_cast<char>(layer.keep));
      spec_.mutable_tuning()->add_offload_permille(layer.offload_permille);
    }
    return absl::OkStatus();
  }

  absl::Status ReadRange(const YamlMember& member, std::vector<Layer>& layers) {
    const std::string key = absl::StrCat("layers.", member.key);
    YamlNode at = member.value;
    at.line = member.line;
    const size_t dash = member.key.find('-');
    const std::string from = member.key.substr(0, dash);
    const std::string to =
        dash == std::string::npos ? from : member.key.substr(dash + 1);
    int64_t first = 0, last = 0;
    if (!absl::SimpleAtoi(from, &first) || !absl::SimpleAtoi(to, &last) ||
        first < 0 || last < first || last >= layers_) {
      return Error(
          key, at,
          {absl::StrCat("not layers of this model, which has ", layers_),
           absl::StrCat("write a number or a range within 0-", layers_ - 1)});
    }
    if (member.value.kind != YamlNode::Kind::kMap) {
      return Error(key, at, {"not a group", "write {keep: ..., offload: ...}"});
    }
    Layer layer;
    layer.line = member.line;
    for (const YamlMember& choice : member.value.members) {
      const std::string name = absl::StrCat(key, ".", choice.key);
      std::optional<Problem> problem;
      if (choice.key == "keep") {
        problem = ReadKeepMask(choice.value, layer.keep);
      } else if (choice.key == "offload") {
        problem = ReadOffload(choice.value, layer.offload_permille);
      } else {
        return Unknown(name, choice, {"keep", "offload"});
      }
      if (problem) return Error(name, choice.value, *problem);
    }
    for (int64_t l = first; l <= last; ++l) {
      if (layers[l].line != 0) {
        return Error(key, at,
                     {absl::StrCat("line ", layers[l].line,
                                   " says already what layer ", l, " keeps"),
                      "name each layer once"});
      }
      layers[l] = layer;
    }
    return absl::OkStatus();
  }

  const absl::string_view file_;
  const int64_t layers_;
  v1::JobSpec& spec_;
};

Json JsonRoutesOf(const policy::Routes& routes) {
  return Json{{"params", std::string(policy::Name(routes.params))},
              {"grads", std::string(policy::Name(routes.grads))},
              {"reduce", std::string(policy::Name(routes.reduce))}};
}

// Layers that do alike, as ranges.
Json JsonLayers(const policy::Plan& plan) {
  Json json = Json::object();
  const size_t layers = plan.keep.size();
  for (size_t first = 0, end; first < layers; first = end) {
    const auto alike = [&](size_t l) {
      return plan.keep[l] == plan.keep[first] &&
             plan.offload_permille[l] == plan.offload_permille[first];
    };
    for (end = first + 1; end < layers && alike(end);) ++end;
    const std::string range = end == first + 1
                                  ? absl::StrCat(first)
                                  : absl::StrCat(first, "-", end - 1);
    json[range] = Json{{"keep", JsonKeep(plan.keep[first])},
                       {"offload", plan.offload_permille[first] / 1000.0}};
  }
  return json;
}

}  // namespace

absl::Status ReadPlanFile(absl::string_view text, absl::string_view file,
                          int64_t layers, v1::JobSpec& spec) {
  SDP_ASSIGN_OR_RETURN(const YamlNode root, ParseYaml(text, file));
  return Reader(file, layers, spec).Read(root);
}

absl::Status ApplyPlanFile(int64_t layers, v1::JobSpec& spec) {
  if (spec.plan().empty()) return absl::OkStatus();
  const std::string file = spec.plan();
  absl::StatusOr<std::string> text = ReadFile(file, kMaxYamlBytes);
  if (!text.ok()) return Annotate(text.status(), "plan");
  return ReadPlanFile(*text, file, layers, spec);
}

Json JsonPlanFile(const policy::Plan& plan) {
  Json json = JsonDocument();
  json["routes"] = Json{{"embedding", JsonRoutesOf(plan.embedding)},
                        {"decoder", JsonRoutesOf(plan.decoder)},
                        {"head", JsonRoutesOf(plan.head)}};
  json["h2d_chunk_bytes"] = plan.h2d_chunk_bytes;
  json["d2h_chunk_bytes"] = plan.d2h_chunk_bytes;
  json["head_chunk_tokens"] = plan.head_chunk_tokens;
  json["window_slots"] = plan.window_slots;
  json["grad_slots"] = plan.grad_slots;
  json["stage_slots"] = plan.stage_slots;
  json["own_chunks"] = plan.own_chunks;
  json["ring_chunks"] = plan.ring_chunks;
  json["compute_threads"] = plan.compute_threads;
  json["update_threads"] = plan.update_threads;
  json["layers"] = JsonLayers(plan);
  return json;
}

void PrintPlanFile(const policy::Plan& plan, const std::string& title,
                   std::ostream& out) {
  const Json json = JsonPlanFile(plan);
  // Flow style, without quotes: no word of a plan needs them.
  const auto flow = [](const Json& value) {
    std::string text;
    for (const char c : value.dump()) {
      if (c == '"') continue;
      text += c;
      if (c == ':' || c == ',') text += ' ';
    }
    return text;
  };
  out << "# " << title << "\n";
  for (const auto& [key, value] : json.items()) {
    if (key == "api_version") continue;
    if (!value.is_object()) {
      out << key << ": " << flow(value) << "\n";
      continue;
    }
    out << key << ":\n";
    for (const auto& [name, group] : value.items()) {
      out << "  " << name << ": " << flow(group) << "\n";
    }
  }
}

}  // namespace slidedp::ctl
