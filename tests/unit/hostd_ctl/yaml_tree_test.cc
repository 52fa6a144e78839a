#include "hostd/ctl/yaml_tree.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::kInvalid;
using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(YamlTreeTest, KeysKeepTheirLinesAndOrder) {
  ASSERT_OK_AND_ASSIGN(YamlNode root,
                       ParseYaml("# first\nb: 1\n\na:\n  c: [x, 'y']\n", "f"));
  ASSERT_EQ(root.members.size(), 2);
  EXPECT_EQ(root.members[0].key, "b");
  EXPECT_EQ(root.members[0].line, 2);
  EXPECT_EQ(root.members[1].key, "a");
  EXPECT_EQ(root.members[1].line, 4);
  const YamlNode* c = root.members[1].value.Find("c");
  ASSERT_NE(c, nullptr);
  ASSERT_EQ(c->items.size(), 2);
  EXPECT_FALSE(c->items[0].quoted);
  EXPECT_TRUE(c->items[1].quoted);
  EXPECT_EQ(c->items[1].text, "y");
}

TEST(YamlTreeTest, NullsAreToldFromText) {
  ASSERT_OK_AND_ASSIGN(YamlNode root,
                       ParseYaml("a:\nb: null\nc: ~\nd: 'null'\ne: ''\n", "f"));
  EXPECT_EQ(root.Find("a")->kind, YamlNode::Kind::kNull);
  EXPECT_EQ(root.Find("b")->kind, YamlNode::Kind::kNull);
  EXPECT_EQ(root.Find("c")->kind, YamlNode::Kind::kNull);
  EXPECT_EQ(root.Find("d")->kind, YamlNode::Kind::kScalar);
  EXPECT_EQ(root.Find("e")->kind, YamlNode::Kind::kScalar);
}

TEST(YamlTreeTest, NothingIsNull) {
  for (const char* text : {"", "\n", "# only a comment\n", "---\n"}) {
    ASSERT_OK_AND_ASSIGN(YamlNode root, ParseYaml(text, "f"));
    EXPECT_EQ(root.kind, YamlNode::Kind::kNull) << text;
  }
}

TEST(YamlTreeTest, AKeyGivenTwiceNamesBothLines) {
  EXPECT_THAT(
      ParseYaml("seed: 1\nranks: 2\nseed: 3\n", "job.yaml"),
      StatusIs(kInvalid, AllOf(HasSubstr("job.yaml"), HasSubstr("line 3"),
                               HasSubstr("first in line 1"))));
}

TEST(YamlTreeTest, RefusesWhatAJobFileHasNoUseFor) {
  const std::pair<const char*, const char*> cases[] = {
      {"a: &x 1\nb: *x\n", "anchors"},
      {"a: *x\n", "line 1"},
      {"a: !!int 1\n", "tag"},
      {"a: !secret 1\n", "tag"},
      {"a: 1\n---\nb: 2\n", "more than one"},
      {"[[[[[[[[[1]]]]]]]]]", "nested deeper"},
      {"? [1, 2]\n: 3\n", "key"},
      {"? {a: 1}\n: 3\n", "key"},
      {": 3\n", "key"},
  };
  for (const auto& [text, part] : cases) {
    EXPECT_THAT(ParseYaml(text, "f"), StatusIs(kInvalid, HasSubstr(part)))
        << text;
  }
}

TEST(YamlTreeTest, DepthIsBoundedExactly) {
  auto nested = [](int depth) {
    return std::string(depth, '[') + "1" + std::string(depth, ']');
  };
  EXPECT_OK(ParseYaml(nested(kMaxYamlDepth), "f"));
  EXPECT_THAT(ParseYaml(nested(kMaxYamlDepth + 1), "f"), StatusIs(kInvalid));
}

TEST(YamlTreeTest, SizesAreBounded) {
  std::string many = "[";
  for (int i = 0; i < kMaxYamlNodes; ++i) many += "1,";
  EXPECT_THAT(ParseYaml(many + "]", "f"),
              StatusIs(kInvalid, HasSubstr("values")));
  EXPECT_OK(ParseYaml(std::string(kMaxYamlBytes, '\n'), "f"));
  EXPECT_THAT(ParseYaml(std::string(kMaxYamlBytes + 1, '\n'), "f"),
              StatusIs(kInvalid, HasSubstr("larger than")));
}

TEST(YamlTreeTest, OnlyUtf8TextPasses) {
  for (absl::string_view bad :
       {absl::string_view("a: \x00 b", 6), absl::string_view("a: \x01"),
        absl::string_view("a: \xff"), absl::string_view("a: \xc0\x80"),
        absl::string_view("a: \xed\xa0\x80"), absl::string_view("a: \xc3"),
        absl::string_view("a: \xf5\x80\x80\x80"), absl::string_view("\x7f")}) {
    EXPECT_THAT(ParseYaml(bad, "f"), StatusIs(kInvalid, HasSubstr("UTF-8")));
  }
  ASSERT_OK_AND_ASSIGN(YamlNode root, ParseYaml("a: Übung 日本\n", "f"));
  EXPECT_EQ(root.Find("a")->text, "Übung 日本");
}

TEST(YamlTreeTest, PrintableHoldsNoControlCharacterAndIsCut) {
  EXPECT_EQ(Printable("a\x1b[31m\nb\x7f\xff", 100), "a?[31m?b??");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m",
                      100),
            "?31m");
  EXPECT_EQ(Printable("日本語", 7), "日本...");
  EXPECT_EQ(Printable("", 3), "");
}

}  // namespace
}  // namespace slidedp::ctl
