// What the commands print with: tables, a progress bar, numbers with units.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace pullback::tool {

// A line, or a part of one, to stderr. Where that cannot be written nobody is told: what failed
// before counts, and the exit status has it.
void tell(std::string_view text);
// Throws Error(device) where what was printed cannot be written.
void flush_output();

struct Column {
  std::string title;
  bool right = false;  // aligned, as numbers are
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add_column(Column column) { columns_.push_back(std::move(column)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// A bar on stderr, drawn only when that is a terminal, and wiped when the work is done.
class Progress {
 public:
  explicit Progress(std::size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // Work on the next item, called `label`, begins.
  void next(const std::string& label);

 private:
  bool shown_;
  std::size_t total_, started_ = 0;
  std::chrono::steady_clock::time_point begin_;
};

std::string time_text(double seconds);                // "1.23 ms"
std::string bytes_text(double bytes);                 // "1.5 MiB"
std::string flops_text(double flops_per_second);      // "123 GFLOP/s"
std::string bandwidth_text(double bytes_per_second);  // "12.3 GB/s"
std::string percent_text(double share);               // "54 %"
std::string error_text(double error);                 // "1.2e-07"

// 'text', quoted for a POSIX shell.
std::string shell_quoted(const std::string& text);

}  // namespace pullback::tool
