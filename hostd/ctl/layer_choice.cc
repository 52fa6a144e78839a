#include "hostd/ctl/layer_choice.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "policy/activations.h"

namespace slidedp::ctl {

std::optional<Problem> ReadKeepMask(const YamlNode& node, uint8_t& mask) {
  constexpr const char* kExample =
      "none, selective, full or a list such as [qkv, attention]";
  std::vector<std::string> words = {"none", "selective", "full"};
  for (int s = 0; s < policy::kSegments; ++s) {
    words.emplace_back(policy::Name(static_cast<policy::Segment>(s)));
  }
  const bool list = node.kind == YamlNode::Kind::kSequence;
  if (!list && node.kind != YamlNode::Kind::kScalar) {
    return Problem{"not what a layer can keep",
                   absl::StrCat("give ", kExample)};
  }
  const std::vector<YamlNode> items =
      list ? node.items : std::vector<YamlNode>{node};
  uint8_t result = 0;
  for (const YamlNode& item : items) {
    size_t index = 0;
    if (auto problem = ReadWord(item, words, index)) return problem;
    if (list && index < 3) {
      return Problem{absl::StrCat(words[index], " is no segment"),
                     absl::StrCat("give ", kExample)};
    }
    constexpr uint8_t kNamed[] = {0, policy::kKeepSelective, policy::kKeepAll};
    result |=
        index < 3 ? kNamed[index] : static_cast<uint8_t>(1 << (index - 3));
  }
  mask = result;
  return std::nullopt;
}

std::optional<Problem> ReadOffload(const YamlNode& node, uint16_t& permille) {
  double share = 0;
  if (auto problem = ReadReal(node, {0, 1}, "0.5", share)) return problem;
  permille = static_cast<uint16_t>(std::lround(share * policy::kOffloadAll));
  return std::nullopt;
}

Json JsonKeep(uint8_t mask) {
  if (mask == 0) return "none";
  if (mask == policy::kKeepSelective) return "selective";
  if (mask == policy::kKeepAll) return "full";
  Json names = Json::array();
  for (int s = 0; s < policy::kSegments; ++s) {
    if ((mask >> s & 1) == 0) continue;
    names.push_back(std::string(policy::Name(static_cast<policy::Segment>(s))));
  }
  return names;
}

}  // namespace slidedp::ctl
