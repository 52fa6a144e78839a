// Job files as hostile input.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/job_file.h"
#include "tests/testing/random.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/hostd_ctl/parse_job.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::kInvalid;
using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

// Hostile text: one error each, naming the file; no crash, no long run.
TEST(JobFileHostileTest, HostileTextIsOneErrorEach) {
  std::string laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n";
  for (char c = 'b'; c <= 'j'; ++c) {
    char p = static_cast<char>(c - 1);
    std::string refs;
    for (int i = 0; i < 9; ++i)
      absl::StrAppend(&refs, i ? "," : "", "*", std::string(1, p));
    absl::StrAppend(&laughs, std::string(1, c), ": &", std::string(1, c), " [",
                    refs, "]\n");
  }
  std::string merge = "base: &b {lr: 1}\noptimizer:\n  <<: *b\n";
  std::string deep_block;
  for (int i = 0; i < 200; ++i) {
    absl::StrAppend(&deep_block, std::string(i, ' '), "k:\n");
  }
  std::string long_key(60'000, 'k');
  std::vector<std::string> hostile = {
      "",
      "null",
      "42",
      "just text",
      "'quoted'",
      "- a\n- b\n",
      "[]",
      "[{}]",
      laughs,
      merge,
      "<<: {ranks: 2}\n",
      deep_block,
      std::string(50'000, '['),
      std::string(50'000, '{'),
      std::string(50'000, ']'),
      std::string(50'000, '-'),
      std::string(50'000, '?'),
      std::string(50'000, ':'),
      std::string(50'000, '&'),
      std::string(50'000, '*'),
      std::string(50'000, '!'),
      std::string(50'000, '|'),
      std::string(50'000, '>'),
      std::string(50'000, '%'),
      std::string(50'000, '"'),
      std::string(50'000, '\''),
      std::string(50'000, ','),
      std::string(60'000, 'a'),
      std::string(25'000, '\t') + "a: 1",
      std::string("? ") + std::string(20'000, '?'),
      long_key + ": 1",
      "ranks: " + std::string(60'000, '9'),
      "optimizer: {lr: 1" + std::string(50'000, '0') + "}",
      "optimizer: {lr: 0." + std::string(50'000, '1') + "}",
      "name: " + std::string(60'000, 'n'),
      "model: " + std::string(60'000, 'm'),
      std::string(70'000, '#'),
      std::string("ranks: 1\0", 9),
      std::string("\0", 1),
      "\xff\xfe"
      "r\0a\0",
      "\xfe\xff",
      "\xef\xbb\xbfranks: x",
      "ranks: 1\n\x1b[2J",
      "ranks: \"\\x00\"",
      "ranks: \"\\uD800\"",
      "ranks: \"\\U00110000\"",
      "ranks: \"unterminated",
      "ranks: 'unterminated",
      "ranks: {unterminated",
      "ranks: [unterminated",
      "ranks: }",
      "ranks: ]",
      "ranks: 1 : 2 : 3",
      "ranks: |\n  1\n",
      "ranks: >-\n  1\n",
      "ranks: !!binary AAAA",
      "ranks: !!python/object:os.system {}",
      "!!map {ranks: 1}",
      "&root {ranks: 1}",
      "%YAML 9.9\n---\nranks: 1\n",
      "%TAG ! tag:x,2000:\n---\nranks: x\n",
      "---\nranks: 1\n---\nranks: 2\n",
      "ranks: 1\n...\njunk",
      "ranks: 1\nranks: 2\n",
      "? ranks\n: ? 1\n  : 2\n",
      "{ranks: 1, ranks: 1}",
      "{ranks}",
      "ranks: @x",
      "ranks: `x`",
      "ranks: %x",
      "\tranks: 1",
      "ranks:\n\t- 1",
      "optimizer: {lr: {lr: {lr: {lr: 1}}}}",
      "? {ranks: 1}\n: 1",
      "[ranks: 1]",
      "ranks: *ranks",
      "ranks: &r *r",
  };
  ASSERT_GE(hostile.size(), 70);
  for (const std::string& text : hostile) {
    auto spec = Parse(text);
    EXPECT_THAT(spec, StatusIs(kInvalid, HasSubstr("job.yaml")))
        << text.substr(0, 60);
    if (!spec.ok()) {
      EXPECT_LT(spec.status().message().size(), 1000) << text.substr(0, 60);
      EXPECT_EQ(spec.status().message().find('\n'), absl::string_view::npos);
    }
  }
}

// Random damage to a good file never gives anything but a spec or one error.
TEST(JobFileHostileTest, RandomDamageGivesASpecOrOneError) {
  const std::string good = PrintDefaults();
  const std::string alphabet = "{}[]:,-?&*!|>'\"%@`# \n\t0a\\~<=.";
  testing::Random random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    int edits = 1 + static_cast<int>(random.Below(4));
    for (int i = 0; i < edits; ++i) {
      size_t at = random.Below(text.size());
      char c = alphabet[random.Below(alphabet.size())];
      switch (random.Below(4)) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, 1, c);
          break;
        case 2:
          text.erase(at, 1 + random.Below(20));
          break;
        default:
          text[at] = static_cast<char>(random.Below(256));
      }
    }
    auto spec = Parse(text);
    if (!spec.ok()) {
      ASSERT_EQ(spec.status().code(), kInvalid) << text;
      ASSERT_THAT(std::string(spec.status().message()), HasSubstr("job.yaml"));
    }
  }
}

}  // namespace
}  // namespace slidedp::ctl
