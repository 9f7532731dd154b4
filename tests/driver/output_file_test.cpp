#include "driver/output_file.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "tools/run_tool.hpp"

namespace pullback::testing {
namespace {

class OutputFile : public ToolTest {};

TEST_F(OutputFile, ended_by_a_signal_leaves_nothing) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::signal(signal, SIG_DFL);
      const driver::OutputFile file(path("out"));
      file.write("half", 4);
      std::raise(signal);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_EQ(files(), std::vector<std::string>{});
  }
}

}  // namespace
}  // namespace pullback::testing
