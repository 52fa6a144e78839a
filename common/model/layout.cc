#include "common/model/layout.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/units.h"

namespace slidedp::model {
namespace {

// Elements; 256 bytes of BF16. GEMM operands and vector loops start there.
constexpr uint64_t kGroupAlignment = 128;

bool Decays(Role role) {
  switch (role) {
    case Role::kInputNorm:
    case Role::kQBias:
    case Role::kKBias:
    case Role::kVBias:
    case Role::kQNorm:
    case Role::kKNorm:
    case Role::kPostNorm:
    case Role::kFinalNorm:
      return false;
    case Role::kEmbedding:
    case Role::kQ:
    case Role::kK:
    case Role::kV:
    case Role::kO:
    case Role::kGate:
    case Role::kUp:
    case Role::kDown:
    case Role::kHead:
      return true;
  }
  SDP_CHECK(false, "unknown role");
}

struct Member {
  Role role;
  absl::string_view name;
  std::vector<int64_t> shape;
};

// Appends tensors group by group; offsets follow from the order of calls.
class UnitBuilder {
 public:
  UnitBuilder(UnitKind kind, int64_t layer, std::string prefix)
      : prefix_(std::move(prefix)) {
    unit_.kind = kind;
    unit_.layer = layer;
  }

  void Group(std::initializer_list<Member> members) {
    end_ = AlignUp(end_, kGroupAlignment);
    for (const Member& member : members) {
      uint64_t count = 1;
      for (int64_t extent : member.shape) {
        count *= static_cast<uint64_t>(extent);
      }
      unit_.tensors.push_back(Tensor{absl::StrCat(prefix_, member.name),
                                     member.role, member.shape, end_, count,
                                     Decays(member.role), /*frozen=*/false});
      end_ += count;
    }
  }

  Unit Finish(uint64_t plane_offset) {
    unit_.count = AlignUp(end_, kGroupAlignment);
    unit_.plane_offset = plane_offset;
    return std::move(unit_);
  }

 private:
  std::string prefix_;
  Unit unit_;
  uint64_t end_ = 0;
};

UnitBuilder DecoderUnit(const ModelConfig& c, int64_t layer) {
  UnitBuilder unit(UnitKind::kDecoder, layer,
                   absl::StrCat("model.layers.", layer, "."));
  int64_t h = c.hidden, q = c.q_dim(), kv = c.kv_dim(), f = c.intermediate;
  unit.Group({{Role::kInputNorm, "input_layernorm.weight", {h}}});
  unit.Group({{Role::kQ, "self_attn.q_proj.weight", {q, h}},
              {Role::kK, "self_attn.k_proj.weight", {kv, h}},
              {Role::kV, "self_attn.v_proj.weight", {kv, h}}});
  if (c.qkv_bias) {
    unit.Group({{Role::kQBias, "self_attn.q_proj.bias", {q}},
                {Role::kKBias, "self_attn.k_proj.bias", {kv}},
                {Role::kVBias, "self_attn.v_proj.bias", {kv}}});
  }
  if (c.qk_norm) {
    unit.Group({{Role::kQNorm, "self_attn.q_norm.weight", {c.head_dim}}});
    unit.Group({{Role::kKNorm, "self_attn.k_norm.weight", {c.head_dim}}});
  }
  unit.Group({{Role::kO, "self_attn.o_proj.weight", {h, q}}});
  unit.Group({{Role::kPostNorm, "post_attention_layernorm.weight", {h}}});
  unit.Group({{Role::kGate, "mlp.gate_proj.weight", {f, h}},
              {Role::kUp, "mlp.up_proj.weight", {f, h}}});
  unit.Group({{Role::kDown, "mlp.down_proj.weight", {h, f}}});
  return unit;
}

// 64-bit FNV-1a over explicit bytes: the same on every host and compiler.
class Fnv1a {
 public:
  void Add(uint64_t value) {
    for (int i = 0; i < 8; ++i) Byte(static_cast<uint8_t>(value >> (8 * i)));
  }
  void Add(absl::string_view text) {
    Add(static_cast<uint64_t>(text.size()));
    for (char c : text) Byte(static_cast<uint8_t>(c));
  }
  uint64_t value() const { return hash_; }

 private:
  void Byte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3u; }
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace

absl::string_view UnitKindName(UnitKind kind) {
  switch (kind) {
    case UnitKind::kEmbedding:
      return "embedding";
    case UnitKind::kDecoder:
      return "decoder";
    case UnitKind::kHead:
      return "head";
  }
  SDP_CHECK(false, "unknown unit kind");
}

const Tensor& Unit::tensor(Role role) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.role == role) return tensor;
  }
  SDP_CHECK(false, absl::StrCat("no tensor of role ", static_cast<int>(role),
                                " in a ", UnitKindName(kind), " unit"));
}

bool Unit::has(Role role) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.role == role) return true;
  }
  return false;
}

bool Unit::frozen() const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const Tensor& tensor) { return tensor.frozen; });
}

int StateLayout::lowest_trained_layer() const {
  if (!units[embedding_unit()].tensor(Role::kEmbedding).frozen) return 0;
  int layer = 0;
  for (const Unit& unit : units) {
    if (unit.kind != UnitKind::kDecoder) continue;
    if (!unit.frozen()) break;
    ++layer;
  }
  return layer;
}

int StateLayout::head_unit() const {
  return units.back().kind == UnitKind::kHead
             ? static_cast<int>(units.size()) - 1
             : 0;
}

uint64_t HashOf(const StateLayout& layout) {
  Fnv1a hash;
  hash.Add(static_cast<uint64_t>(layout.units.size()));
  for (const Unit& unit : layout.units) {
    hash.Add(static_cast<uint64_t>(unit.kind));
    hash.Add(static_cast<uint64_t>(unit.layer));
    hash.Add(unit.count);
    hash.Add(unit.plane_offset);
    hash.Add(static_cast<uint64_t>(unit.tensors.size()));
    for (const Tensor& tensor : unit.tensors) {
      hash.Add(tensor.name);
      hash.Add(static_cast<uint64_t>(tensor.role));
      hash.Add(static_cast<uint64_t>(tensor.shape.size()));
      for (int64_t extent : tensor.shape) {
        hash.Add(static_cast<uint64_t>(extent));
      }
      hash.Add(tensor.offset);
      hash.Add(tensor.count);
      hash.Add(static_cast<uint64_t>(tensor.decay) |
               static_cast<uint64_t>(tensor.frozen) << 1);
    }
  }
  hash.Add(layout.plane_elements);
  hash.Add(layout.parameters);
  return hash.value();
}

StateLayout MakeStateLayout(const ModelConfig& config) {
  StateLayout layout;
  uint64_t end = 0;
  auto append = [&](UnitBuilder builder) {
    layout.units.push_back(builder.Finish(AlignUp(end, kUnitAlignment)));
    end = layout.units.back().plane_offset + layout.units.back().count;
  };

  int64_t h = config.hidden;
  UnitBuilder embedding(UnitKind::kEmbedding, -1, "");
  embedding.Group(
      {{Role::kEmbedding, "model.embed_tokens.weight", {config.vocab, h}}});
  Member final_norm{Role::kFinalNorm, "model.norm.weight", {h}};
  if (config.tied) embedding.Group({final_norm});
  append(std::move(embedding));

  for (int64_t layer = 0; layer < config.layers; ++layer) {
    append(DecoderUnit(config, layer));
  }
  if (!config.tied) {
    UnitBuilder head(UnitKind::kHead, -1, "");
    head.Group({final_norm});
    head.Group({{Role::kHead, kHeadName, {config.vocab, h}}});
    append(std::move(head));
  }

  layout.plane_elements = AlignUp(end, kUnitAlignment);
  layout.parameters = 0;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) layout.parameters += tensor.count;
  }
  layout.hash = HashOf(layout);
  return layout;
}

}  // namespace slidedp::model
