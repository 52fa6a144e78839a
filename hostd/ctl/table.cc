#include "hostd/ctl/table.h"

#include <algorithm>
#include <cmath>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/units.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

constexpr size_t kMaxCellBytes = 2000;

// Columns that a text takes on a terminal, one per UTF-8 code point.
size_t Width(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (c & 0xc0) != 0x80; });
}

std::string OrDash(const std::string& text) {
  return text.empty() ? "-" : text;
}

}  // namespace

void Table::Print(bool headers, bool color, std::ostream& out) const {
  std::vector<size_t> widths(columns_.size(), 0);
  std::vector<std::vector<std::string>> texts;
  for (const std::vector<Cell>& row : rows_) {
    std::vector<std::string>& line = texts.emplace_back();
    for (const Cell& cell : row) {
      line.push_back(Printable(cell.text, kMaxCellBytes));
    }
  }
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (headers) widths[c] = Width(columns_[c].title);
    for (const auto& line : texts) {
      widths[c] = std::max(widths[c], Width(line[c]));
    }
  }
  auto print_line = [&](auto text_of, auto color_of) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      std::string text = text_of(c);
      std::string pad(widths[c] - Width(text), ' ');
      std::string sgr = color ? color_of(c) : "";
      if (c > 0) line += "  ";
      if (columns_[c].align == Align::kRight) line += pad;
      if (sgr.empty()) {
        line += text;
      } else {
        absl::StrAppend(&line, "\x1b[", sgr, "m", text, "\x1b[0m");
      }
      bool last = c + 1 == columns_.size();
      if (columns_[c].align == Align::kLeft && !last) line += pad;
    }
    out << line << "\n";
  };
  if (headers) {
    print_line([&](size_t c) { return columns_[c].title; },
               [](size_t) { return std::string("1"); });
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    print_line([&](size_t c) { return texts[r][c]; },
               [&](size_t c) { return rows_[r][c].color; });
  }
}

const char* StateColor(v1::JobState state) {
  switch (state) {
    case v1::RUNNING:
    case v1::COMPLETED:
      return "32";
    case v1::PENDING:
    case v1::CONFIGURING:
    case v1::COMPLETING:
      return "33";
    case v1::FAILED:
      return "31";
    default:
      return "";
  }
}

std::string EtaText(const v1::JobInfo& info) {
  double rate = info.steps_per_second();
  if (info.state() != v1::RUNNING || !std::isfinite(rate) || rate <= 0 ||
      info.step() >= info.steps()) {
    return "-";
  }
  return FormatSeconds(static_cast<double>(info.steps() - info.step()) / rate);
}

std::string ElapsedText(const v1::JobInfo& info, int64_t now_us) {
  if (info.started_us() <= 0) return "-";
  int64_t end_us = info.ended_us() > 0 ? info.ended_us() : now_us;
  return FormatSeconds(
      static_cast<double>(std::max<int64_t>(0, end_us - info.started_us())) /
      1e6);
}

std::string LocalTimeText(int64_t unix_us) {
  if (unix_us <= 0) return "-";
  time_t seconds = static_cast<time_t>(unix_us / 1'000'000);
  std::tm local = {};
  char text[32];
  if (localtime_r(&seconds, &local) == nullptr ||
      std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local) == 0) {
    return "-";
  }
  return text;
}

Table JobTable(const std::vector<v1::JobInfo>& jobs, bool wide,
               int64_t now_us) {
  constexpr Align kRight = Align::kRight;
  std::vector<Table::Column> columns = {
      {"ID", kRight},    {"NAME"},         {"USER"},
      {"STATE"},         {"STEP", kRight}, {"STEP/s", kRight},
      {"RANKS", kRight}, {"MEM", kRight},  {"ELAPSED", kRight},
      {"ETA", kRight}};
  if (wide) {
    columns.push_back({"LOSS", kRight});
    columns.push_back({"TOKENS/s", kRight});
    columns.push_back({"SUBMITTED"});
    columns.push_back({"ENDED"});
  }
  columns.push_back({"REASON"});
  Table table(std::move(columns));
  for (const v1::JobInfo& job : jobs) {
    auto rate = [](double value, int digits) {
      if (!std::isfinite(value) || value <= 0) return std::string("-");
      return absl::StrFormat("%.*f", digits, value);
    };
    std::vector<Table::Cell> cells = {
        {absl::StrCat(job.id())},
        {OrDash(job.name())},
        {job.user().empty() ? absl::StrCat(job.uid()) : job.user()},
        {Word(job.state()), StateColor(job.state())},
        {absl::StrCat(job.step(), "/", job.steps())},
        {rate(job.steps_per_second(), 3)},
        {absl::StrCat(job.ranks())},
        {job.host_bytes() == 0 ? "-" : FormatBytes(job.host_bytes())},
        {ElapsedText(job, now_us)},
        {EtaText(job)}};
    if (wide) {
      cells.push_back(
          {job.step() > 0 ? absl::StrFormat("%.4f", job.last_loss()) : "-"});
      cells.push_back({rate(job.tokens_per_second(), 0)});
      cells.push_back({LocalTimeText(job.submitted_us())});
      cells.push_back({LocalTimeText(job.ended_us())});
    }
    cells.push_back({OrDash(job.reason())});
    table.Add(std::move(cells));
  }
  return table;
}

}  // namespace slidedp::ctl
