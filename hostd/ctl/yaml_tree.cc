#include "hostd/ctl/yaml_tree.h"

#include <sstream>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/exceptions.h"
#include "yaml-cpp/mark.h"
#include "yaml-cpp/parser.h"

namespace slidedp::ctl {
namespace {

// Thrown out of the event handler, through yaml-cpp, to ParseYaml.
struct Refused : std::runtime_error {
  Refused(int line, const std::string& problem, const std::string& remedy)
      : std::runtime_error(problem), line(line), remedy(remedy) {}
  int line;
  std::string remedy;
};

class TreeBuilder : public YAML::EventHandler {
 public:
  YamlNode Take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    RefuseAnchor(mark, anchor);
    YamlNode node;
    node.line = Line(mark);
    Add(std::move(node), mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refused(Line(mark), "aliases (*name) are not used in a job file",
                  "write the value out");
  }

  void OnAnchor(const YAML::Mark& mark, const std::string& name) override {
    if (!name.empty()) RefuseAnchor(mark, 1);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag,
                YAML::anchor_t anchor, const std::string& value) override {
    RefuseAnchor(mark, anchor);
    if (!tag.empty() && tag != "?" && tag != "!") RefuseTag(mark, tag);
    YamlNode node;
    node.kind = YamlNode::Kind::kScalar;
    node.text = value;
    node.quoted = tag == "!";
    node.line = Line(mark);
    Add(std::move(node), mark);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag,
                       YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(YamlNode::Kind::kSequence, mark, tag, anchor);
  }
  void OnSequenceEnd() override { Close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag,
                  YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    Open(YamlNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override { Close(); }

 private:
  struct OpenNode {
    YamlNode node;
    bool has_key = false;  // kMap: the next node is the value of `key`
    std::string key;
    int key_line = 0;
  };

  static int Line(const YAML::Mark& mark) { return mark.line + 1; }

  static void RefuseAnchor(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor == 0) return;
    throw Refused(Line(mark), "anchors (&name) are not used in a job file",
                  "remove the anchor");
  }
  static void RefuseTag(const YAML::Mark& mark, const std::string& tag) {
    throw Refused(
        Line(mark),
        absl::StrCat("tag ", Printable(tag, 40), " is not used in a job file"),
        "remove the tag");
  }

  void Open(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag,
            YAML::anchor_t anchor) {
    RefuseAnchor(mark, anchor);
    if (!tag.empty() && tag != "?" && tag != "!") RefuseTag(mark, tag);
    if (open_.size() >= kMaxYamlDepth) {
      throw Refused(Line(mark),
                    absl::StrCat("nested deeper than ", kMaxYamlDepth),
                    "a job file has two levels");
    }
    if (!open_.empty() && open_.back().node.kind == YamlNode::Kind::kMap &&
        !open_.back().has_key) {
      throw Refused(Line(mark), "a key must be a plain word",
                    "write `key: value`");
    }
    Count(mark);
    OpenNode node;
    node.node.kind = kind;
    node.node.line = Line(mark);
    open_.push_back(std::move(node));
  }

  void Close() {
    YamlNode node = std::move(open_.back().node);
    open_.pop_back();
    Place(std::move(node));
  }

  void Count(const YAML::Mark& mark) {
    if (++nodes_ > kMaxYamlNodes) {
      throw Refused(Line(mark),
                    absl::StrCat("more than ", kMaxYamlNodes, " values"),
                    "a job file has a few dozen");
    }
  }

  void Add(YamlNode node, const YAML::Mark& mark) {
    Count(mark);
    if (!open_.empty()) {
      OpenNode& parent = open_.back();
      if (parent.node.kind == YamlNode::Kind::kMap && !parent.has_key) {
        SetKey(parent, node, mark);
        return;
      }
    }
    Place(std::move(node));
  }

  static void SetKey(OpenNode& parent, const YamlNode& node,
                     const YAML::Mark& mark) {
    if (node.kind != YamlNode::Kind::kScalar || node.text.empty()) {
      throw Refused(Line(mark), "a key must be a plain word",
                    "write `key: value`");
    }
    for (const YamlMember& member : parent.node.members) {
      if (member.key != node.text) continue;
      throw Refused(
          Line(mark),
          absl::StrCat("key ", Printable(node.text, 60),
                       " is given twice, first in line ", member.line),
          "remove one of the two");
    }
    parent.has_key = true;
    parent.key = node.text;
    parent.key_line = node.line;
  }

  // A finished value goes to its parent.
  void Place(YamlNode node) {
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    OpenNode& parent = open_.back();
    if (parent.node.kind == YamlNode::Kind::kSequence) {
      parent.node.items.push_back(std::move(node));
      return;
    }
    parent.has_key = false;
    parent.node.members.push_back(
        {std::move(parent.key), parent.key_line, std::move(node)});
    parent.key.clear();
  }

  YamlNode root_;
  std::vector<OpenNode> open_;
  int nodes_ = 0;
};

// Bytes of the well-formed UTF-8 sequence at `text`, 0 if it is not one.
size_t Utf8Length(absl::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  uint8_t first = byte(0);
  if (first < 0x80) return 1;
  size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and values above U+10FFFF.
  if (first == 0xe0 && byte(1) < 0xa0) return 0;
  if (first == 0xed && byte(1) > 0x9f) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

absl::Status CheckText(absl::string_view text, absl::string_view source) {
  if (text.size() > kMaxYamlBytes) {
    return InvalidInput(source, "size", absl::StrCat(text.size(), " bytes"),
                        absl::StrCat("larger than ", kMaxYamlBytes, " bytes"),
                        "give a job file, not a data file");
  }
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    size_t length = Utf8Length(text.substr(i));
    unsigned char c = text[i];
    bool control = c < 0x20 && c != '\n' && c != '\r' && c != '\t';
    if (length == 0 || control || c == 0x7f) {
      return InvalidInput(source, absl::StrCat("line ", line), "",
                          "not UTF-8 text (a stray byte or control character)",
                          "save the file as UTF-8 text");
    }
    if (c == '\n') ++line;
    i += length;
  }
  return absl::OkStatus();
}

}  // namespace

const YamlNode* YamlNode::Find(absl::string_view key) const {
  for (const YamlMember& member : members) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

absl::StatusOr<YamlNode> ParseYaml(absl::string_view text,
                                   absl::string_view source) {
  SDP_RETURN_IF_ERROR(CheckText(text, source));
  try {
    std::istringstream in{std::string(text)};
    YAML::Parser parser(in);
    TreeBuilder builder;
    if (!parser.HandleNextDocument(builder)) return YamlNode{};
    YamlNode root = builder.Take();
    TreeBuilder rest;
    if (parser.HandleNextDocument(rest)) {
      return InvalidInput(source, "", "", "holds more than one YAML document",
                          "keep one job in one file");
    }
    return root;
  } catch (const Refused& e) {
    return InvalidInput(source, absl::StrCat("line ", e.line), "", e.what(),
                        e.remedy);
  } catch (const YAML::Exception& e) {
    return InvalidInput(source, absl::StrCat("line ", e.mark.line + 1), "",
                        absl::StrCat("not valid YAML: ", e.msg),
                        "write `key: value`, one a line");
  } catch (const std::exception& e) {
    return InvalidInput(source, "", "",
                        absl::StrCat("not valid YAML: ", e.what()),
                        "write `key: value`, one a line");
  }
}

std::string Printable(absl::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    size_t length = Utf8Length(text.substr(i));
    unsigned char c = text[i];
    // U+0080 .. U+009F are control characters too.
    bool control = c < 0x20 || c == 0x7f ||
                   (length == 2 && c == 0xc2 &&
                    static_cast<unsigned char>(text[i + 1]) < 0xa0);
    size_t step = length == 0 ? 1 : length;
    if (out.size() + step > max_bytes) {
      out += "...";
      break;
    }
    if (length == 0 || control) {
      out += '?';
    } else {
      out.append(text.data() + i, step);
    }
    i += step;
  }
  return out;
}

std::string Describe(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kNull:
      return "null";
    case YamlNode::Kind::kMap:
      return "{...}";
    case YamlNode::Kind::kSequence:
      return "[...]";
    case YamlNode::Kind::kScalar:
      break;
  }
  std::string text = Printable(node.text, 60);
  return node.quoted || text.empty() ? absl::StrCat("\"", text, "\"") : text;
}

}  // namespace slidedp::ctl
