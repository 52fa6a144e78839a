#include "common/checkpoint/manifest.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/crc32c.h"
#include "common/base/status.h"
#include "common/model/strict_json.h"
#include "nlohmann/json.hpp"

namespace slidedp::checkpoint {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "slidedp-checkpoint";
constexpr uint64_t kVersion = 1;
constexpr int kMaxDepth = 4;

absl::Status Bad(absl::string_view file, absl::string_view field,
                 absl::string_view value, absl::string_view problem) {
  return InvalidInput(file, field, value, problem,
                      "take another checkpoint; this one is damaged");
}

// Of the object without its checksum, as nlohmann writes it: keys in order.
uint32_t ChecksumOf(const json& object) {
  const std::string text = object.dump();
  return Crc32c(0, text.data(), text.size());
}

absl::StatusOr<uint64_t> Number(const json& object, const char* key,
                                absl::string_view file,
                                uint64_t most = UINT64_MAX) {
  auto it = object.find(key);
  if (it == object.end() || !it->is_number_unsigned() ||
      it->get<uint64_t>() > most) {
    return Bad(file, key, it == object.end() ? "" : model::Describe(*it),
               "not a whole number in its range");
  }
  return it->get<uint64_t>();
}

absl::StatusOr<Identity> Words(const json& object, const char* key,
                               absl::string_view file) {
  Identity identity;
  auto it = object.find(key);
  if (it == object.end() || !it->is_object()) {
    return Bad(file, key, "", "not an object");
  }
  for (const auto& [name, value] : it->items()) {
    if (!value.is_string()) {
      return Bad(file, absl::StrCat(key, ".", model::Printable(name)),
                 model::Describe(value), "not a string");
    }
    identity[name] = value.get<std::string>();
  }
  return identity;
}

absl::StatusOr<std::vector<FileEntry>> Files(const json& object,
                                             absl::string_view file) {
  auto it = object.find("files");
  if (it == object.end() || !it->is_array() || it->empty() ||
      it->size() > kMaxFiles) {
    return Bad(file, "files", "", "not a list of files");
  }
  std::vector<FileEntry> files;
  std::set<std::string> names;
  for (const json& each : *it) {
    auto name = each.is_object() ? each.find("name") : each.end();
    if (!each.is_object() || name == each.end() || !name->is_string()) {
      return Bad(file, "files", model::Describe(each), "not a file's entry");
    }
    FileEntry entry;
    entry.name = name->get<std::string>();
    const bool plain = !entry.name.empty() && entry.name.size() <= 255 &&
                       !absl::StrContains(entry.name, '/') &&
                       !absl::StrContains(entry.name, '\0') &&
                       entry.name != "." && entry.name != ".." &&
                       entry.name != kManifestFile;
    if (!plain || !names.insert(entry.name).second) {
      return Bad(file, "files", entry.name,
                 plain ? "listed twice" : "not the name of a file");
    }
    SDP_ASSIGN_OR_RETURN(entry.bytes, Number(each, "bytes", file, INT64_MAX));
    SDP_ASSIGN_OR_RETURN(uint64_t crc,
                         Number(each, "crc32c", file, UINT32_MAX));
    entry.crc32c = static_cast<uint32_t>(crc);
    files.push_back(std::move(entry));
  }
  return files;
}

json Optional(const std::optional<double>& value) {
  return value.has_value() ? json(*value) : json(nullptr);
}

json ToJson(const Memory& memory) {
  return {{"losses", memory.losses},
          {"skipped_in_a_row", memory.skipped_in_a_row},
          {"held_out",
           memory.held_out.empty() ? json::object() : json(memory.held_out)},
          {"best_loss", Optional(memory.best_loss)},
          {"best_step", memory.best_step},
          {"mark", Optional(memory.mark)},
          {"since_better", memory.since_better}};
}

absl::StatusOr<std::optional<double>> OptionalReal(const json& object,
                                                   const char* key,
                                                   absl::string_view file) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return std::optional<double>();
  if (it->is_number()) return std::optional(it->get<double>());
  return Bad(file, absl::StrCat("memory.", key), model::Describe(*it),
             "not a number");
}

// Checkpoints of the first releases have none.
absl::StatusOr<Memory> ReadMemory(const json& manifest,
                                  absl::string_view file) {
  Memory memory;
  const auto it = manifest.find("memory");
  if (it == manifest.end()) return memory;
  const json& object = *it;
  const auto losses = object.is_object() ? object.find("losses") : it->end();
  if (!object.is_object() || losses == object.end() || !losses->is_array() ||
      losses->size() > Memory::kMaxLosses) {
    return Bad(file, "memory.losses", "", "not a list of some losses");
  }
  for (const json& loss : *losses) {
    if (!loss.is_number()) {
      return Bad(file, "memory.losses", model::Describe(loss), "not a number");
    }
    memory.losses.push_back(loss.get<double>());
  }
  SDP_ASSIGN_OR_RETURN(memory.skipped_in_a_row,
                       Number(object, "skipped_in_a_row", file));
  SDP_ASSIGN_OR_RETURN(memory.held_out, Words(object, "held_out", file));
  SDP_ASSIGN_OR_RETURN(memory.best_loss,
                       OptionalReal(object, "best_loss", file));
  SDP_ASSIGN_OR_RETURN(memory.best_step, Number(object, "best_step", file));
  SDP_ASSIGN_OR_RETURN(memory.mark, OptionalReal(object, "mark", file));
  SDP_ASSIGN_OR_RETURN(memory.since_better,
                       Number(object, "since_better", file));
  return memory;
}

}  // namespace

const FileEntry* Manifest::Find(absl::string_view name) const {
  for (const FileEntry& entry : files) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

std::string ToJson(const Manifest& manifest) {
  json files = json::array();
  for (const FileEntry& entry : manifest.files) {
    files.push_back({{"name", entry.name},
                     {"bytes", entry.bytes},
                     {"crc32c", entry.crc32c}});
  }
  json object = {{"format", kFormat},
                 {"version", kVersion},
                 {"step", manifest.step},
                 {"updates", manifest.updates},
                 {"clip_history", manifest.clip_history},
                 {"layout_hash", manifest.layout_hash},
                 {"sampler", manifest.sampler},
                 {"training", manifest.training},
                 {"memory", ToJson(manifest.memory)},
                 {"source_dtypes", manifest.source_dtypes},
                 {"files", files}};
  // Empty maps are objects, too.
  for (const char* key : {"sampler", "training", "source_dtypes"}) {
    if (object[key].is_null()) object[key] = json::object();
  }
  const uint32_t checksum = ChecksumOf(object);
  std::string text = object.dump();
  text.pop_back();
  absl::StrAppend(&text, ",\"checksum\":", checksum, "}\n");
  return text;
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view file) {
  SDP_ASSIGN_OR_RETURN(json object,
                       model::ParseStrictJson(text, file, kMaxDepth));
  if (!object.is_object() || object.value("format", json()) != kFormat) {
    return Bad(file, "format", "", "not a checkpoint's manifest");
  }
  SDP_ASSIGN_OR_RETURN(uint64_t version, Number(object, "version", file));
  if (version != kVersion) {
    return InvalidInput(file, "version", absl::StrCat(version),
                        absl::StrCat("this release reads version ", kVersion),
                        "use the release that wrote it");
  }
  SDP_ASSIGN_OR_RETURN(uint64_t checksum,
                       Number(object, "checksum", file, UINT32_MAX));
  object.erase("checksum");
  if (ChecksumOf(object) != checksum) {
    return Bad(file, "checksum", absl::StrCat(checksum),
               absl::StrCat("its text gives ", ChecksumOf(object)));
  }
  Manifest manifest;
  SDP_ASSIGN_OR_RETURN(manifest.step, Number(object, "step", file));
  SDP_ASSIGN_OR_RETURN(manifest.updates,
                       Number(object, "updates", file, manifest.step));
  SDP_ASSIGN_OR_RETURN(manifest.clip_history,
                       Number(object, "clip_history", file));
  SDP_ASSIGN_OR_RETURN(manifest.layout_hash,
                       Number(object, "layout_hash", file));
  SDP_ASSIGN_OR_RETURN(manifest.sampler, Words(object, "sampler", file));
  SDP_ASSIGN_OR_RETURN(manifest.training, Words(object, "training", file));
  SDP_ASSIGN_OR_RETURN(manifest.memory, ReadMemory(object, file));
  SDP_ASSIGN_OR_RETURN(manifest.source_dtypes,
                       Words(object, "source_dtypes", file));
  SDP_ASSIGN_OR_RETURN(manifest.files, Files(object, file));
  return manifest;
}

std::vector<std::string> Differences(const Identity& was, const Identity& is) {
  std::vector<std::string> differences;
  auto find = [](const Identity& identity, const std::string& key) {
    auto it = identity.find(key);
    return it == identity.end() ? std::string("nothing")
                                : model::Printable(it->second);
  };
  Identity keys = was;
  keys.insert(is.begin(), is.end());
  for (const auto& [key, ignored] : keys) {
    const std::string before = find(was, key), now = find(is, key);
    if (before == now) continue;
    differences.push_back(
        absl::StrCat(model::Printable(key), " was ", before, ", is ", now));
  }
  return differences;
}

absl::Status CheckFits(const Manifest& manifest, absl::string_view file,
                       uint64_t layout_hash, const Identity& sampler,
                       uint64_t steps) {
  if (manifest.layout_hash != layout_hash) {
    return InvalidInput(file, "layout_hash", absl::StrCat(manifest.layout_hash),
                        absl::StrCat("the job's model has ", layout_hash),
                        "resume with the model that the checkpoint is of");
  }
  const std::vector<std::string> differences =
      Differences(manifest.sampler, sampler);
  if (!differences.empty()) {
    return InvalidInput(file, "sampler", "", absl::StrJoin(differences, "; "),
                        "resume with the data, batch and seed that the "
                        "checkpoint was made with");
  }
  if (manifest.step > steps) {
    return InvalidInput(file, "step", absl::StrCat(manifest.step),
                        absl::StrCat("the job has only ", steps, " steps"),
                        "ask for more steps, or take an earlier checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace slidedp::checkpoint
