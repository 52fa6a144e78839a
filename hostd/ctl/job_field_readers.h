// How the values of a job file's keys are read: what job_fields.cc, their
// table, is made of. Private to it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hostd/ctl/job_fields.h"
#include "hostd/ctl/layer_choice.h"
#include "worker/data/mixture.h"

namespace slidedp::ctl {

using Read =
    std::function<std::optional<Problem>(const YamlNode&, v1::JobSpec&)>;

inline constexpr size_t kMaxNameBytes = 64;
inline constexpr size_t kMaxPathBytes = 4096;
inline constexpr size_t kMaxSources = 64;
inline constexpr size_t kMaxPatterns = 64;
inline constexpr size_t kMaxPatternBytes = 256;

#define SDP_SET(call) [](v1::JobSpec& spec, auto value) { spec.call(value); }
#define SDP_SET_IN(group, call) \
  [](v1::JobSpec& spec, auto value) { spec.mutable_##group()->call(value); }

inline bool IsNull(const YamlNode& node) {
  return node.kind == YamlNode::Kind::kNull;
}
inline bool IsAuto(const YamlNode& node) {
  return IsNull(node) ||
         (node.kind == YamlNode::Kind::kScalar && node.text == "auto");
}

// `null_is_unset`: null leaves the field to a default found later.
template <typename Set>
Read Integer(uint64_t low, uint64_t high, const std::string& example, Set set,
             bool null_is_unset = false) {
  return
      [=](const YamlNode& node, v1::JobSpec& spec) -> std::optional<Problem> {
        if (null_is_unset && IsNull(node)) {
          set(spec, 0);
          return std::nullopt;
        }
        uint64_t value = 0;
        if (auto problem = ReadInteger(node, low, high, example, value)) {
          return problem;
        }
        set(spec, value);
        return std::nullopt;
      };
}

template <typename Set>
Read Real(RealRange range, const std::string& example, Set set) {
  return
      [=](const YamlNode& node, v1::JobSpec& spec) -> std::optional<Problem> {
        double value = 0;
        if (auto problem = ReadReal(node, range, example, value))
          return problem;
        set(spec, value);
        return std::nullopt;
      };
}

// `words` and the enum's values stand in the same order.
template <typename Enum, typename Set>
Read Word(std::vector<std::pair<std::string, Enum>> choices, Set set) {
  std::vector<std::string> words;
  for (const auto& choice : choices) words.push_back(choice.first);
  return
      [=](const YamlNode& node, v1::JobSpec& spec) -> std::optional<Problem> {
        size_t index = 0;
        if (auto problem = ReadWord(node, words, index)) return problem;
        set(spec, choices[index].second);
        return std::nullopt;
      };
}

inline std::optional<Problem> ReadPath(const YamlNode& node,
                                       std::string& path) {
  if (auto problem = ReadText(node, kMaxPathBytes, path)) return problem;
  if (path[0] == '~') {
    return Problem{"~ is not expanded in a job file", "write the folder out"};
  }
  return std::nullopt;
}

template <typename Set>
Read Path(Set set) {
  return
      [=](const YamlNode& node, v1::JobSpec& spec) -> std::optional<Problem> {
        std::string path;
        if (auto problem = ReadPath(node, path)) return problem;
        set(spec, std::move(path));
        return std::nullopt;
      };
}

// An entry of `data`: a path, or {path, weight}.
inline std::optional<Problem> ReadSource(const YamlNode& node,
                                         v1::DataSource& source) {
  const YamlNode* path = &node;
  if (node.kind == YamlNode::Kind::kMap) {
    for (const YamlMember& member : node.members) {
      if (member.key != "path" && member.key != "weight") {
        return Problem{absl::StrCat("unknown key ", Printable(member.key, 80)),
                       "a data set has path and weight"};
      }
    }
    path = node.Find("path");
    if (path == nullptr) {
      return Problem{"has no path", "write {path: FILE, weight: NUMBER}"};
    }
    if (const YamlNode* weight = node.Find("weight"); weight != nullptr) {
      double value = 0;
      if (auto problem =
              ReadReal(*weight, {data::kLeastWeight, data::kLargestWeight},
                       "0.5", value)) {
        return Problem{
            absl::StrCat("weight ", Describe(*weight), ": ", problem->what),
            problem->remedy};
      }
      source.set_weight(value);
    }
  }
  return ReadPath(*path, *source.mutable_path());
}

inline std::optional<Problem> ReadSources(const YamlNode& node,
                                          v1::JobSpec& spec) {
  spec.clear_sources();
  if (node.kind != YamlNode::Kind::kSequence) {
    return ReadSource(node, *spec.add_sources());
  }
  if (node.items.empty() || node.items.size() > kMaxSources) {
    return Problem{absl::StrCat("names ", node.items.size(), " data sets"),
                   absl::StrCat("name 1 to ", kMaxSources)};
  }
  for (size_t i = 0; i < node.items.size(); ++i) {
    v1::DataSource& source = *spec.add_sources();
    if (auto problem = ReadSource(node.items[i], source)) {
      problem->what = absl::StrCat("entry ", i + 1, ": ", problem->what);
      return problem;
    }
    if ((source.weight() > 0) != (spec.sources(0).weight() > 0)) {
      return Problem{
          absl::StrCat("entry ", i + 1,
                       ": a weight is given for some of the "
                       "data sets only"),
          "give all of them a weight, or none: they are then joined"};
    }
  }
  return std::nullopt;
}

inline std::optional<Problem> ReadName(const YamlNode& node,
                                       v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.clear_name();
    return std::nullopt;
  }
  std::string name;
  if (auto problem = ReadText(node, kMaxNameBytes, name)) return problem;
  for (char c : name) {
    bool fits = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    if (!fits) {
      return Problem{"holds a character that a job name may not have",
                     "use letters, digits, '.', '_' and '-'"};
    }
  }
  spec.set_name(std::move(name));
  return std::nullopt;
}

inline std::optional<Problem> ReadMaxGradNorm(const YamlNode& node,
                                              v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.clear_max_grad_norm();
    return std::nullopt;
  }
  double value = 0;
  if (auto problem = ReadReal(node, {0, 1e30, true}, "1.0", value)) {
    problem->remedy += ", or null for no clipping";
    return problem;
  }
  spec.set_max_grad_norm(value);
  return std::nullopt;
}

inline std::optional<Problem> ReadKeptLayers(const YamlNode& node,
                                             v1::JobSpec& spec) {
  if (IsAuto(node)) {
    spec.mutable_tuning()->clear_kept_layers();
    return std::nullopt;
  }
  uint64_t value = 0;
  if (auto problem = ReadInteger(node, 0, 65536, "8", value)) return problem;
  spec.mutable_tuning()->set_kept_layers(static_cast<uint32_t>(value));
  return std::nullopt;
}

inline std::optional<Problem> ReadKeep(const YamlNode& node,
                                       v1::JobSpec& spec) {
  spec.mutable_tuning()->clear_keep();
  if (IsAuto(node)) return std::nullopt;
  uint8_t mask = 0;
  if (auto problem = ReadKeepMask(node, mask)) return problem;
  spec.mutable_tuning()->set_keep(std::string(1, static_cast<char>(mask)));
  return std::nullopt;
}

inline std::optional<Problem> ReadOffloaded(const YamlNode& node,
                                            v1::JobSpec& spec) {
  spec.mutable_tuning()->clear_offload_permille();
  if (IsAuto(node)) return std::nullopt;
  uint16_t permille = 0;
  if (auto problem = ReadOffload(node, permille)) return problem;
  spec.mutable_tuning()->add_offload_permille(permille);
  return std::nullopt;
}

inline std::optional<Problem> ReadPlan(const YamlNode& node,
                                       v1::JobSpec& spec) {
  if (!IsNull(node)) return Path(SDP_SET(set_plan))(node, spec);
  spec.clear_plan();
  return std::nullopt;
}

inline std::optional<Problem> ReadRandomWeightsSeed(const YamlNode& node,
                                                    v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.clear_random_weights_seed();
    return std::nullopt;
  }
  uint64_t value = 0;
  if (auto problem = ReadInteger(node, 0, std::numeric_limits<uint64_t>::max(),
                                 "1", value)) {
    return problem;
  }
  spec.set_random_weights_seed(value);
  return std::nullopt;
}

// A list of patterns for tensors' names.
inline std::optional<Problem> ReadPatterns(
    const YamlNode& node,
    google::protobuf::RepeatedPtrField<std::string>& out) {
  out.Clear();
  if (node.kind != YamlNode::Kind::kSequence) {
    return Problem{"not a list of patterns",
                   "write e.g. [model.embed_tokens.*, model.layers.0.*]"};
  }
  if (node.items.size() > kMaxPatterns) {
    return Problem{absl::StrCat(node.items.size(), " patterns are too many"),
                   absl::StrCat("give at most ", kMaxPatterns)};
  }
  for (const YamlNode& item : node.items) {
    std::string pattern;
    if (auto problem = ReadText(item, kMaxPatternBytes, pattern)) {
      return problem;
    }
    *out.Add() = std::move(pattern);
  }
  return std::nullopt;
}

inline std::optional<Problem> ReadNoDecay(const YamlNode& node,
                                          v1::JobSpec& spec) {
  spec.mutable_optimizer()->clear_no_decay();
  if (IsNull(node)) return std::nullopt;
  return ReadPatterns(
      node, *spec.mutable_optimizer()->mutable_no_decay()->mutable_patterns());
}

inline std::optional<Problem> ReadFreeze(const YamlNode& node,
                                         v1::JobSpec& spec) {
  return ReadPatterns(node, *spec.mutable_freeze());
}

// Absent with null.
template <typename Set>
Read PathOrNull(Set set) {
  return
      [=](const YamlNode& node, v1::JobSpec& spec) -> std::optional<Problem> {
        if (!IsNull(node)) return Path(set)(node, spec);
        set(spec, std::string());
        return std::nullopt;
      };
}

inline std::optional<Problem> ReadCheckpointFolder(const YamlNode& node,
                                                   v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.mutable_checkpoint()->clear_folder();
    return std::nullopt;
  }
  return Path([](v1::JobSpec& s, std::string path) {
    s.mutable_checkpoint()->set_folder(std::move(path));
  })(node, spec);
}

inline std::optional<Problem> ReadResume(const YamlNode& node,
                                         v1::JobSpec& spec) {
  if (IsNull(node) ||
      (node.kind == YamlNode::Kind::kScalar && node.text == "none")) {
    spec.clear_resume();
    return std::nullopt;
  }
  return Path([](v1::JobSpec& s, std::string path) {
    s.set_resume(std::move(path));
  })(node, spec);
}

inline std::optional<Problem> ReadRetries(const YamlNode& node,
                                          v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.set_retries(kRetriesByDefault);
    return std::nullopt;
  }
  uint64_t value = 0;
  if (auto problem = ReadInteger(node, 0, 1000, "2", value)) return problem;
  spec.set_retries(static_cast<uint32_t>(value));
  return std::nullopt;
}

inline std::optional<Problem> ReadEpochs(const YamlNode& node,
                                         v1::JobSpec& spec) {
  if (IsNull(node)) {
    spec.clear_epochs();
    return std::nullopt;
  }
  double value = 0;
  if (auto problem = ReadReal(node, {0, 1e6, true}, "3", value)) return problem;
  spec.set_epochs(value);
  return std::nullopt;
}

}  // namespace slidedp::ctl
