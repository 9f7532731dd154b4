// Runs the command line as another program would, in a folder of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/environment.hpp"
#include "support/temporary_folder.hpp"

namespace pullback::testing {

struct Result {
  int status = -1;  // exit status; -1: killed by a signal
  std::string out, err;
};

class ToolTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // The names in the folder, sorted: what a run left behind.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  static std::string content(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }

  // `file_limit` bytes are the most that it may write to a file (0: no limit).
  Result run(const std::string& tool, const std::vector<std::string>& arguments,
             rlim_t file_limit = 0) const {
    int out[2], err[2];
    if (::pipe(out) != 0 || ::pipe(err) != 0) return {};
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      for (int end : {out[0], out[1], err[0], err[1]}) ::close(end);
      ::alarm(120);  // a run that hangs is killed
      if (file_limit > 0) {
        const rlimit limit{file_limit, file_limit};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      }
      std::vector<char*> argv{const_cast<char*>(tool.c_str())};
      for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      ::execv(tool.c_str(), argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
    Result result;
    result.out = drain(out[0]);
    result.err = drain(err[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
  }

  const TemporaryFolder temporary_;
  const std::filesystem::path& folder_ = temporary_.path();

 private:
  // Outputs of the tool stay below a pipe's capacity, so one after the other cannot block it.
  static std::string drain(int end) {
    std::string text;
    char buffer[4096];
    ssize_t count;
    while ((count = ::read(end, buffer, sizeof(buffer))) > 0) {
      text.append(buffer, static_cast<std::size_t>(count));
    }
    ::close(end);
    return text;
  }
};

}  // namespace pullback::testing
