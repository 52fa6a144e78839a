#include "hostd/ctl/job_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/status.h"
#include "hostd/ctl/job_fields.h"

namespace slidedp::ctl {
namespace {

// Where a value came from: a line of the file, or the command line.
struct Origin {
  absl::string_view file;

  absl::Status Error(absl::string_view key, int line, absl::string_view value,
                     const Problem& problem) const {
    if (line == 0) {
      return InvalidInput("--set", Printable(key, 80), value, problem.what,
                          problem.remedy);
    }
    return InvalidInput(file,
                        absl::StrCat(Printable(key, 80), " (line ", line, ")"),
                        value, problem.what, problem.remedy);
  }
};

const JobField* FindField(absl::string_view key) {
  for (const JobField& field : JobFields()) {
    if (field.key == key) return &field;
  }
  return nullptr;
}

// "optimizer" and the like: what stands before a dot in the table.
bool IsGroup(absl::string_view key) {
  std::string prefix = absl::StrCat(key, ".");
  return std::any_of(JobFields().begin(), JobFields().end(),
                     [&](const JobField& field) {
                       return field.key.compare(0, prefix.size(), prefix) == 0;
                     });
}

std::vector<std::string> KnownKeys() {
  std::vector<std::string> keys = JobFileKeys();
  std::vector<std::string> groups;
  for (const std::string& key : keys) {
    size_t dot = key.find('.');
    if (dot == std::string::npos) continue;
    std::string group = key.substr(0, dot);
    if (groups.empty() || groups.back() != group) groups.push_back(group);
  }
  keys.insert(keys.end(), groups.begin(), groups.end());
  return keys;
}

// The nearest known key: by the whole dotted key, else by its last part, so
// that `lr` at the top level leads to optimizer.lr.
Problem UnknownKey(absl::string_view key) {
  std::vector<std::string> keys = KnownKeys();
  std::vector<std::string> last_parts;
  for (const std::string& known : keys) {
    last_parts.push_back(known.substr(known.rfind('.') + 1));
  }
  std::vector<std::string> parts = absl::StrSplit(key, '.');
  for (size_t i = 0; i < keys.size(); ++i) {
    if (last_parts[i] == parts.back()) {
      return {"unknown key", absl::StrCat("did you mean ", keys[i], "?")};
    }
  }
  if (auto near = Nearest(key, keys)) {
    return {"unknown key", absl::StrCat("did you mean ", *near, "?")};
  }
  if (auto near = Nearest(parts.back(), last_parts)) {
    size_t i = std::find(last_parts.begin(), last_parts.end(), *near) -
               last_parts.begin();
    return {"unknown key", absl::StrCat("did you mean ", keys[i], "?")};
  }
  return {"unknown key",
          "`slidedpctl submit --print-defaults` shows the known ones"};
}

absl::Status ReadField(const JobField& field, const YamlNode& value, int line,
                       const Origin& origin, v1::JobSpec& spec) {
  if (auto problem = field.read(value, spec)) {
    return origin.Error(field.key, line, Describe(value), *problem);
  }
  return absl::OkStatus();
}

absl::Status ReadGroup(const std::string& group, const YamlNode& node, int line,
                       const Origin& origin, v1::JobSpec& spec) {
  // `schedule: cosine` is short for `schedule: {kind: cosine}`.
  if (group == "schedule" && node.kind == YamlNode::Kind::kScalar) {
    return ReadField(*FindField("schedule.kind"), node, line, origin, spec);
  }
  if (node.kind != YamlNode::Kind::kMap) {
    return origin.Error(
        group, line, Describe(node),
        {"not a group of keys",
         absl::StrCat("write its keys below it, e.g. `", group, ":` and `  ",
                      (std::find_if(JobFields().begin(), JobFields().end(),
                                    [&](const JobField& field) {
                                      return field.key.compare(
                                                 0, group.size() + 1,
                                                 group + ".") == 0;
                                    }))
                          ->key.substr(group.size() + 1),
                      ": ...`")});
  }
  for (const YamlMember& member : node.members) {
    std::string key = absl::StrCat(group, ".", member.key);
    const JobField* field = FindField(key);
    if (field == nullptr) {
      return origin.Error(key, member.line, "", UnknownKey(key));
    }
    SDP_RETURN_IF_ERROR(
        ReadField(*field, member.value, member.line, origin, spec));
  }
  return absl::OkStatus();
}

absl::Status ReadTree(const YamlNode& root, const Origin& origin,
                      v1::JobSpec& spec) {
  if (root.kind == YamlNode::Kind::kNull) {
    return InvalidInput(origin.file, "", "", "holds no job",
                        "start from `slidedpctl submit --print-defaults`");
  }
  if (root.kind != YamlNode::Kind::kMap) {
    return InvalidInput(origin.file, absl::StrCat("line ", root.line),
                        Describe(root), "not a job file",
                        "write `key: value`, one a line");
  }
  for (const YamlMember& member : root.members) {
    // A dotted key at the top level would be a second way to say the same.
    bool dotted = member.key.find('.') != std::string::npos;
    if (!dotted && IsGroup(member.key)) {
      SDP_RETURN_IF_ERROR(
          ReadGroup(member.key, member.value, member.line, origin, spec));
      continue;
    }
    const JobField* field = dotted ? nullptr : FindField(member.key);
    if (field == nullptr) {
      Problem problem = UnknownKey(member.key);
      if (dotted && FindField(member.key) != nullptr) {
        size_t dot = member.key.find('.');
        problem = {
            "a dotted key belongs on the command line (--set)",
            absl::StrCat("write `", member.key.substr(0, dot), ":` and `  ",
                         member.key.substr(dot + 1), ":` below it")};
      }
      return origin.Error(member.key, member.line, "", problem);
    }
    SDP_RETURN_IF_ERROR(
        ReadField(*field, member.value, member.line, origin, spec));
  }
  return absl::OkStatus();
}

// Which of the three say how long to train.
bool IsLength(absl::string_view key) {
  return key == "steps" || key == "epochs" || key == "max_tokens";
}

struct Setting {
  std::string key;
  std::string value;
};

absl::StatusOr<Setting> SplitSetting(const std::string& text) {
  size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return InvalidInput("--set", "", Printable(text, 80), "not key=value",
                        "write e.g. --set optimizer.lr=1e-4");
  }
  Setting setting{text.substr(0, equals), text.substr(equals + 1)};
  if (FindField(setting.key) == nullptr && !IsGroup(setting.key)) {
    return InvalidInput("--set", Printable(setting.key, 80), "",
                        UnknownKey(setting.key).what,
                        UnknownKey(setting.key).remedy);
  }
  return setting;
}

void ClearLines(YamlNode& node) {
  node.line = 0;
  for (YamlMember& member : node.members) {
    member.line = 0;
    ClearLines(member.value);
  }
  for (YamlNode& item : node.items) ClearLines(item);
}

absl::Status ApplySetting(const Setting& setting, v1::JobSpec& spec) {
  SDP_ASSIGN_OR_RETURN(
      YamlNode value,
      ParseYaml(setting.value, absl::StrCat("--set ", setting.key)));
  ClearLines(value);
  Origin origin{"--set"};
  const JobField* field = FindField(setting.key);
  if (field == nullptr) return ReadGroup(setting.key, value, 0, origin, spec);
  SDP_RETURN_IF_ERROR(ReadField(*field, value, 0, origin, spec));
  // The command line's choice of how long to train replaces the file's.
  const bool chosen =
      IsLength(setting.key) && value.kind != YamlNode::Kind::kNull;
  if (chosen && setting.key != "steps") spec.clear_steps();
  if (chosen && setting.key != "epochs") spec.clear_epochs();
  if (chosen && setting.key != "max_tokens") spec.clear_max_tokens();
  return absl::OkStatus();
}

}  // namespace

v1::JobSpec DefaultJobSpec() {
  v1::JobSpec spec;
  spec.set_version(1);
  spec.set_ranks(1);
  spec.set_device(v1::DEVICE_KIND_AUTO);
  spec.set_batch_size(8);
  spec.set_micro_batch_size(1);
  spec.mutable_optimizer()->set_lr(5e-5);
  spec.mutable_optimizer()->set_beta1(0.9);
  spec.mutable_optimizer()->set_beta2(0.999);
  spec.mutable_optimizer()->set_eps(1e-8);
  spec.mutable_optimizer()->set_weight_decay(0);
  spec.mutable_schedule()->set_kind(v1::SCHEDULE_KIND_LINEAR);
  spec.set_max_grad_norm(1.0);
  spec.set_max_skipped_steps(10);
  spec.set_loss_spike_sigma(6);
  spec.mutable_eval();
  spec.mutable_early_stop();
  spec.set_seed(42);
  spec.mutable_routes();
  spec.mutable_tuning();
  spec.set_launch(v1::LAUNCH_KIND_DAEMON);
  spec.mutable_checkpoint()->set_keep(2);
  spec.set_retries(kRetriesByDefault);
  return spec;
}

absl::StatusOr<v1::JobSpec> ParseJobFile(absl::string_view text,
                                         absl::string_view file,
                                         const std::vector<std::string>& sets) {
  v1::JobSpec spec = DefaultJobSpec();
  SDP_ASSIGN_OR_RETURN(YamlNode root, ParseYaml(text, file));
  SDP_RETURN_IF_ERROR(ReadTree(root, Origin{file}, spec));
  const int lengths_in_file =
      (spec.steps() > 0) + (spec.epochs() > 0) + (spec.max_tokens() > 0);
  bool settled = false;
  for (const std::string& text_of_setting : sets) {
    SDP_ASSIGN_OR_RETURN(Setting setting, SplitSetting(text_of_setting));
    SDP_RETURN_IF_ERROR(ApplySetting(setting, spec));
    settled = settled || IsLength(setting.key);
  }
  if (lengths_in_file > 1 && !settled) {
    const char* key = spec.steps() > 0 ? "steps" : "max_tokens";
    const YamlNode* node = root.Find(key);
    return Origin{file}.Error(
        key, node->line, Describe(*node),
        {absl::StrCat("given together with ",
                      spec.epochs() > 0 ? "epochs" : "max_tokens"),
         "keep one of them"});
  }
  return spec;
}

absl::Status CheckSets(const std::vector<std::string>& sets) {
  for (const std::string& text : sets) {
    SDP_RETURN_IF_ERROR(SplitSetting(text).status());
  }
  return absl::OkStatus();
}

std::vector<std::string> JobFileKeys() {
  std::vector<std::string> keys;
  for (const JobField& field : JobFields()) keys.push_back(field.key);
  return keys;
}

std::string PrintDefaults() {
  std::string out =
      "# A job for `slidedpctl submit`. Everything but model, data and output\n"
      "# may be left out. Relative paths start at the folder in which submit\n"
      "# is run.\n";
  std::string group;
  for (const JobField& field : JobFields()) {
    size_t dot = field.key.find('.');
    std::string name = field.key;
    std::string indent;
    if (dot == std::string::npos) {
      group.clear();
    } else {
      if (field.key.substr(0, dot) != group) {
        group = field.key.substr(0, dot);
        absl::StrAppend(&out, group, ":\n");
      }
      name = field.key.substr(dot + 1);
      indent = "  ";
    }
    std::string line = absl::StrCat(indent, name, ": ", field.initial);
    if (!field.help.empty()) {
      if (line.size() < 28) line.resize(28, ' ');
      absl::StrAppend(&line, "  # ", field.help);
    }
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace slidedp::ctl
