#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/model/source.h"

namespace slidedp::model {
namespace {

// Collects problems; the same one in many layers is told once, with the layers'
// ranges: "model.layers.{0-27}.self_attn.q_proj.bias: missing".
class Problems {
 public:
  void Add(const Unit& unit, absl::string_view name, std::string problem) {
    std::string prefix = absl::StrCat("model.layers.", unit.layer, ".");
    std::string tail(unit.layer >= 0 ? name.substr(prefix.size()) : name);
    std::string key = absl::StrCat(tail, "\n", problem);
    auto [it, is_new] = index_.try_emplace(std::move(key), rows_.size());
    if (is_new) rows_.push_back(Row{std::move(tail), std::move(problem), {}});
    if (unit.layer >= 0) rows_[it->second].layers.push_back(unit.layer);
  }

  bool empty() const { return rows_.empty(); }

  std::string Text() const {
    return absl::StrJoin(rows_, "; ", [](std::string* out, const Row& row) {
      if (!row.layers.empty()) {
        absl::StrAppend(out, "model.layers.", Ranges(row.layers), ".");
      }
      absl::StrAppend(out, row.tail, ": ", row.problem);
    });
  }

 private:
  struct Row {
    std::string tail, problem;
    std::vector<int64_t> layers;  // ascending
  };

  static std::string Ranges(const std::vector<int64_t>& layers) {
    if (layers.size() == 1) return absl::StrCat(layers[0]);
    std::vector<std::string> parts;
    for (size_t i = 0; i < layers.size();) {
      size_t j = i + 1;
      while (j < layers.size() && layers[j] == layers[j - 1] + 1) ++j;
      parts.push_back(j - i == 1 ? absl::StrCat(layers[i])
                                 : absl::StrCat(layers[i], "-", layers[j - 1]));
      i = j;
    }
    return absl::StrCat("{", absl::StrJoin(parts, ","), "}");
  }

  std::vector<Row> rows_;
  absl::flat_hash_map<std::string, size_t> index_;
};

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

void CheckEntry(const Unit& unit, absl::string_view name,
                const std::vector<int64_t>& shape, const TensorEntry& entry,
                Problems& problems) {
  if (entry.shape != shape) {
    problems.Add(unit, name,
                 absl::StrCat("shape ", ShapeText(entry.shape), ", expected ",
                              ShapeText(shape)));
  }
  if (entry.dtype != DType::kBf16 && entry.dtype != DType::kF16 &&
      entry.dtype != DType::kF32) {
    problems.Add(unit, name,
                 absl::StrCat("dtype ", DTypeName(entry.dtype),
                              ", expected BF16, F16 or F32"));
  }
}

}  // namespace

absl::Status ValidateSource(const StateLayout& layout,
                            const TensorSource& source) {
  Problems problems;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      const TensorEntry* entry = source.Find(tensor.name).entry;
      if (entry == nullptr) {
        problems.Add(unit, tensor.name, "missing");
      } else {
        CheckEntry(unit, tensor.name, tensor.shape, *entry, problems);
      }
    }
  }
  if (layout.tied()) {
    const Unit& unit = layout.units[layout.embedding_unit()];
    const TensorEntry* entry = source.Find(kHeadName).entry;
    if (entry != nullptr) {
      CheckEntry(unit, kHeadName, unit.tensor(Role::kEmbedding).shape, *entry,
                 problems);
    }
  }
  if (problems.empty()) return absl::OkStatus();
  std::string files = "no file";
  if (!source.files().empty()) files = source.files().front().name;
  if (source.files().size() > 1) files += " and the other shards";
  return absl::InvalidArgumentError(absl::StrCat(
      files, ": tensors do not fit config.json: ", problems.Text()));
}

}  // namespace slidedp::model
