#include "print.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

// Columns on a terminal: code points, since we print no wide or combining ones.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// The columns of the terminal that stderr is.
std::size_t terminal_width() {
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

// As much of the beginning as fits so many columns.
std::string shortened(const std::string& text, std::size_t columns) {
  if (width_of(text) <= columns) return text;
  std::size_t end = 0;
  for (std::size_t width = 0; end < text.size(); ++end) {
    width += (text[end] & 0xc0) != 0x80;
    if (width == columns) break;
  }
  return text.substr(0, end) + "…";
}

std::string with_unit(double value, double base, const std::vector<std::string>& units) {
  std::size_t unit = 0;
  while (value >= base && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value >= 100 ? 0 : value >= 10 ? 1 : 2, units[unit]);
}

}  // namespace

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    widths.push_back(width_of(columns_[c].title));
    for (const auto& row : rows_) widths[c] = std::max(widths[c], width_of(row[c]));
  }
  std::string result;
  const auto add_line = [&](const auto& cell) {
    std::string line;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string& text = cell(c);
      const std::string padding(widths[c] - width_of(text), ' ');
      if (c > 0) line += "  ";
      line += columns_[c].right ? padding + text : text + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + "\n";
  };
  add_line([&](std::size_t c) -> const std::string& { return columns_[c].title; });
  std::size_t total = 2 * (columns_.size() - 1);
  for (std::size_t width : widths) total += width;
  for (std::size_t i = 0; i < total; ++i) result += "─";
  result += "\n";
  for (const auto& row : rows_) {
    add_line([&](std::size_t c) -> const std::string& { return row[c]; });
  }
  return result;
}

void tell(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void flush_output() {
  if (std::fflush(stdout) == 0) return;
  throw Error(ErrorCode::device,
              fmt::format("cannot write to standard output: {}", std::strerror(errno)));
}

Progress::Progress(std::size_t total)
    : shown_(::isatty(STDERR_FILENO) != 0),
      total_(total),
      begin_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (shown_) tell("\r\x1b[K");
}

void Progress::next(const std::string& label) {
  const std::size_t done = started_++;
  if (!shown_ || total_ == 0) return;
  constexpr std::size_t kWidth = 24;
  const std::size_t filled = std::min(kWidth, done * kWidth / total_);
  std::string bar;
  for (std::size_t i = 0; i < kWidth; ++i) bar += i < filled ? "█" : "░";
  const double elapsed =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  std::string left;
  if (done > 0 && elapsed > 2) {
    const double rest =
        elapsed * static_cast<double>(total_ - std::min(done, total_)) / static_cast<double>(done);
    left = fmt::format(" {:.0f} s left", rest);
  }
  // A line that wrapped could not be wiped; one that fills the terminal wraps on some.
  const std::string line = fmt::format("{} {}/{}{}  {}", bar, done, total_, left, label);
  tell(fmt::format("\r\x1b[K{}", shortened(line, terminal_width() - 1)));
}

std::string time_text(double seconds) {
  return with_unit(seconds * 1e9, 1000, {"ns", "µs", "ms", "s"});
}

std::string bytes_text(double bytes) {
  if (bytes < 1024) return fmt::format("{:.0f} B", bytes);
  return with_unit(bytes / 1024, 1024, {"KiB", "MiB", "GiB", "TiB"});
}

std::string flops_text(double flops_per_second) {
  return with_unit(flops_per_second / 1e6, 1000, {"MFLOP/s", "GFLOP/s", "TFLOP/s"});
}

std::string bandwidth_text(double bytes_per_second) {
  return with_unit(bytes_per_second / 1e6, 1000, {"MB/s", "GB/s", "TB/s"});
}

std::string percent_text(double share) { return fmt::format("{:.0f} %", share * 100); }

std::string error_text(double error) {
  return error == 0 ? "0" : std::isfinite(error) ? fmt::format("{:.1e}", error) : "not finite";
}

std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

}  // namespace pullback::tool
