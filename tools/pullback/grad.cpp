#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "commands.hpp"
#include "driver/check.hpp"
#include "driver/driver.hpp"
#include "driver/output_file.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

struct GradOptions {
  std::string input, output, variant;
  DeviceOptions device;
  driver::OptionMap options;  // of the op
  bool verify = false;
};

// True when the outputs agree with the reference; else says which do not.
bool verified(const driver::Request& request, const driver::TensorMap& outputs) {
  const driver::CheckReport report = driver::verify_outputs(request, outputs);
  Table table(
      {{"tensor"}, {"error", true}, {"allowed", true}, {"textbook", true}, {"largest", true}});
  for (const auto& error : report.errors) {
    table.add({error.tensor, error_text(error.error), error_text(error.allowed),
               error_text(error.textbook), error_text(error.scale)});
  }
  fmt::print("{}", table.text());
  for (const std::string& failure : report.failures) {
    tell(fmt::format("pullback: {}: {}\n", request.op, failure));
  }
  if (report.passed()) {
    fmt::print("{}: all {} outputs agree with the f64 reference\n", request.op, outputs.size());
  }
  return report.passed();
}

int run_grad(const std::string& op, const GradOptions& options) {
  driver::Request request{.op = op,
                          .inputs = {},
                          .options = options.options,
                          .device = options.device.get(),
                          .variant = options.variant};
  driver::check_output_file(options.output);
  request.inputs = driver::read_safetensors(options.input);
  const driver::TensorMap outputs = driver::evaluate(request);
  if (options.verify && !verified(request, outputs)) {
    tell(fmt::format("pullback: {}: not written\n", driver::printable(options.output, 400)));
    return kCheckFailed;
  }
  flush_output();  // before a file is replaced: that stays where the status is not 0
  driver::write_safetensors(options.output, outputs);
  return kDone;
}

std::string footer_of(const driver::OpDriver& driver) {
  std::string text = "Tensors of the input file:\n";
  for (const auto& input : driver.inputs) {
    text += fmt::format("  {:<27} {}{}\n", input.name, input.shape,
                        input.required ? "" : "  (optional)");
  }
  text += fmt::format("In the output file:\n  {}\n", driver.outputs);
  for (const auto& pair : driver.gradients) {
    text += fmt::format("  {:<27} by {}\n", pair.second, pair.first);
  }
  return text;
}

void add_op(CLI::App& grad, const driver::OpDriver& driver, Command& command) {
  CLI::App* app = grad.add_subcommand(std::string(driver.name), std::string(driver.summary));
  app->footer(footer_of(driver));
  auto options = std::make_shared<GradOptions>();
  app->add_option("--input", options->input, "safetensors file to read")
      ->required()
      ->type_name("FILE");
  app->add_option("--output", options->output, "safetensors file to write; may be the input")
      ->required()
      ->type_name("FILE");
  options->device.add_to(*app);
  app->add_option("--variant", options->variant, "implementation to use; the best when not given")
      ->type_name("NAME");
  app->add_flag("--verify", options->verify, "compare with the f64 reference before writing");
  for (const auto& option : driver.options) {
    app->add_option_function<std::string>(
           "--" + std::string(option.name),
           [options, name = std::string(option.name)](const std::string& value) {
             options->options[name] = value;
           },
           std::string(option.help))
        ->type_name(std::string(option.value));
  }
  app->callback([&command, options, op = std::string(driver.name)] {
    command.run = [options, op] { return run_grad(op, *options); };
  });
}

}  // namespace

void add_grad(CLI::App& app, Command& command) {
  CLI::App* grad = app.add_subcommand(
      "grad", "Outputs and gradients of an op on the tensors of a safetensors file");
  grad->footer("pullback grad OP --help shows the tensors and options of an op.");
  for (const driver::OpDriver* driver : driver::all_drivers()) add_op(*grad, *driver, command);
  // An op that is not known ends up here, with all that follows it. After the ops, which would
  // inherit this.
  grad->allow_extras();
  grad->callback([grad] {
    if (!grad->get_subcommands().empty()) {
      if (!grad->remaining().empty()) throw CLI::ExtrasError(grad->remaining());
      return;
    }
    const auto extras = grad->remaining();
    if (extras.empty()) throw CLI::RequiredError("OP");
    driver::find_driver(extras.front());  // throws: names the ops there are
  });
}

}  // namespace pullback::tool
