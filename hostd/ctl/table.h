// Aligned columns of text for people.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "proto/job.pb.h"

namespace slidedp::ctl {

enum class Align { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };
  struct Cell {
    std::string text;
    std::string color = {};  // an SGR sequence's parameters, "" for none
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // As many cells as columns. Control characters are replaced.
  void Add(std::vector<Cell> cells) { rows_.push_back(std::move(cells)); }
  void Print(bool headers, bool color, std::ostream& out) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// Of `slidedpctl status`. `now_us`: unix microseconds.
Table JobTable(const std::vector<v1::JobInfo>& jobs, bool wide, int64_t now_us);

// "3h12m" of what is left at the present rate; "-" if there is no telling.
std::string EtaText(const v1::JobInfo& info);
std::string ElapsedText(const v1::JobInfo& info, int64_t now_us);
// "2024-05-01 12:00:00" in the local time zone; "-" for 0.
std::string LocalTimeText(int64_t unix_us);
// SGR parameters for a state: green, yellow, red.
const char* StateColor(v1::JobState state);

}  // namespace slidedp::ctl
