#include "hostd/daemon/log_lines.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/fd.h"
#include "common/base/units.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kPieceBytes = 64 * kKiB;
constexpr size_t kMaxLineBytes = 32 * kKiB;
constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

// Bytes of the well-formed UTF-8 sequence at the start of `text`; 0 if it is
// none (Unicode 15, table 3-7).
size_t SequenceBytes(absl::string_view text) {
  auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  auto continues = [&](size_t i, unsigned low = 0x80, unsigned high = 0xBF) {
    return byte(i) >= low && byte(i) <= high;
  };
  unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2) return 0;
  if (first < 0xE0) return continues(1) ? 2 : 0;
  if (first < 0xF0) {
    unsigned low = first == 0xE0 ? 0xA0 : 0x80;
    unsigned high = first == 0xED ? 0x9F : 0xBF;
    return continues(1, low, high) && continues(2) ? 3 : 0;
  }
  if (first < 0xF5) {
    unsigned low = first == 0xF0 ? 0x90 : 0x80;
    unsigned high = first == 0xF4 ? 0x8F : 0xBF;
    return continues(1, low, high) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

// The file's bytes [begin, begin + count), as far as they are there.
std::string ReadPiece(const std::string& path, uint64_t begin, size_t count) {
  absl::StatusOr<UniqueFd> fd = OpenFile(path, O_RDONLY | O_NOFOLLOW);
  if (!fd.ok()) return "";
  std::string piece(count, '\0');
  ssize_t got =
      pread(fd->get(), piece.data(), count, static_cast<off_t>(begin));
  piece.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return piece;
}

uint64_t FileBytes(const std::string& path) {
  absl::StatusOr<UniqueFd> fd = OpenFile(path, O_RDONLY | O_NOFOLLOW);
  if (!fd.ok()) return 0;
  return RegularFileBytes(fd->get(), path).value_or(0);
}

}  // namespace

std::string ToValidUtf8(absl::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    size_t bytes = SequenceBytes(text);
    bool control = bytes == 1 && absl::ascii_iscntrl(text[0]) &&
                   text[0] != '\t' && text[0] != '\n' && text[0] != '\x1b';
    if (bytes == 0 || control) {
      valid.append(kReplacement.data(), kReplacement.size());
      bytes = 1;
    } else {
      valid.append(text.data(), bytes);
    }
    text.remove_prefix(bytes);
  }
  return valid;
}

void LogLines::SeekTail(uint64_t lines) {
  offset_bytes_ = 0;
  if (lines == 0) return;
  uint64_t end = FileBytes(path_);
  // A last line without its newline counts as one.
  if (end > 0 && ReadPiece(path_, end - 1, 1) == "\n") ++lines;
  uint64_t begin = end;
  while (begin > 0) {
    size_t count = static_cast<size_t>(std::min<uint64_t>(begin, kPieceBytes));
    begin -= count;
    std::string piece = ReadPiece(path_, begin, count);
    for (size_t i = piece.size(); i > 0; --i) {
      if (piece[i - 1] != '\n') continue;
      if (--lines == 0) {
        offset_bytes_ = begin + i;
        return;
      }
    }
  }
}

std::vector<std::string> LogLines::Next(bool at_end) {
  std::vector<std::string> lines;
  std::string piece = ReadPiece(path_, offset_bytes_, kPieceBytes);
  absl::string_view rest = piece;
  while (!rest.empty()) {
    size_t newline = rest.find('\n');
    absl::string_view line = rest.substr(0, newline);
    bool complete = newline != absl::string_view::npos;
    if (line.size() > kMaxLineBytes) {
      line = line.substr(0, kMaxLineBytes);
      complete = false;
    } else if (!complete && (!at_end || piece.size() == kPieceBytes)) {
      break;
    }
    size_t taken = line.size() + (complete ? 1 : 0);
    lines.push_back(ToValidUtf8(absl::StripSuffix(line, "\r")));
    rest.remove_prefix(taken);
    offset_bytes_ += taken;
  }
  return lines;
}

std::string LastLine(const std::string& path) {
  constexpr size_t kTailBytes = 4 * kKiB;
  constexpr size_t kMaxShownBytes = 200;
  uint64_t end = FileBytes(path);
  uint64_t begin = end > kTailBytes ? end - kTailBytes : 0;
  std::string tail = ReadPiece(path, begin, static_cast<size_t>(end - begin));
  absl::string_view rest = absl::StripTrailingAsciiWhitespace(tail);
  size_t newline = rest.rfind('\n');
  if (newline != absl::string_view::npos) rest = rest.substr(newline + 1);
  return ToValidUtf8(rest.substr(0, kMaxShownBytes));
}

}  // namespace slidedp::hostd
