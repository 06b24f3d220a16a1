// The command `tvmflow-run`, which runs a bundle on arrays in NumPy's files.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "text.h"
#include "tvmflow/model.h"

namespace {

using tvmflow::Arrays;
using tvmflow::Error;
using tvmflow::Model;
using tvmflow::Tensor;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: tvmflow-run BUNDLE [--release ADDRESS --statement FILE] [--inputs IN.npz | --inputs NAME=IN.npy ...]\n"
    "                   [--output OUT.npz] [--repeat N] [--warmup N] [--threads N] [--json]\n"
    "\n"
    "Verifies BUNDLE, a .tar.gz or the folder into which it was unpacked, and runs it. Outputs are written by name and\n"
    "as output_0, output_1, ... Without inputs the golden sample is run.\n"
    "\n"
    "  --release    the release that BUNDLE must be of: release://NAME@CHANNEL or release://NAME/VERSION\n"
    "  --statement  the signed statement on it: CHANNEL.json or statement.json of the release store\n"
    "  --inputs     arrays by input name, or one array for one input; may be repeated\n"
    "  --output     the file to write\n"
    "  --repeat     timed runs (1)\n"
    "  --warmup     runs before the timed ones (0)\n"
    "  --threads    worker threads (TVM_NUM_THREADS, else the number of cores but at most the bundle's bound)\n"
    "  --json       print one JSON document\n";

// A mistake in the command line.
class UsageError : public Error {
 public:
  using Error::Error;
};

struct Options {
  std::string bundle;
  std::optional<std::string> release;
  std::optional<std::string> statement;
  std::vector<std::string> inputs;
  std::optional<std::string> output;
  int repeat = 1;
  int warmup = 0;
  int threads = 0;
  bool json = false;
};

int ParseNumber(const std::string& option, const std::string& text, int minimum) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < minimum) {
    throw UsageError(option + " is '" + text + "'; give a whole number of at least " + std::to_string(minimum));
  }
  return value;
}

Options ParseOptions(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string option = arguments[i];
    if (option.rfind("--", 0) != 0) {
      if (!options.bundle.empty()) throw UsageError("'" + option + "' is one bundle too many; see --help");
      options.bundle = option;
      continue;
    }
    if (option == "--json") {
      options.json = true;
      continue;
    }
    const size_t equals = option.find('=');
    std::optional<std::string> value;
    if (equals != std::string::npos) {
      value = option.substr(equals + 1);
      option.resize(equals);
    }
    static constexpr const char* kOptions[] = {"--release", "--statement", "--inputs", "--output",
                                               "--repeat",  "--warmup",    "--threads"};
    if (std::find(std::begin(kOptions), std::end(kOptions), option) == std::end(kOptions)) {
      throw UsageError("there is no option '" + option + "'; see --help");
    }
    if (!value) {
      if (i + 1 == arguments.size()) throw UsageError(option + " lacks its value; see --help");
      value = arguments[++i];
    }
    if (option == "--release") options.release = *value;
    if (option == "--statement") options.statement = *value;
    if (option == "--inputs") options.inputs.push_back(*value);
    if (option == "--output") options.output = *value;
    if (option == "--repeat") options.repeat = ParseNumber(option, *value, 1);
    if (option == "--warmup") options.warmup = ParseNumber(option, *value, 0);
    if (option == "--threads") options.threads = ParseNumber(option, *value, 1);
  }
  if (options.bundle.empty()) throw UsageError("no bundle is given; see --help");
  if (options.release.has_value() != options.statement.has_value()) {
    throw UsageError("--release and --statement need each other; see --help");
  }
  return options;
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Reads the values of --inputs: `FILE.npz`, or `NAME=FILE.npy`.
std::map<std::string, Tensor> ReadInputs(const std::vector<std::string>& values) {
  std::map<std::string, Tensor> inputs;
  for (const std::string& value : values) {
    Arrays arrays;
    const size_t equals = value.find('=');
    if (equals != std::string::npos && !EndsWith(value, ".npz")) {
      arrays.emplace_back(value.substr(0, equals), tvmflow::ReadNpy(value.substr(equals + 1)));
    } else {
      arrays = tvmflow::ReadNpz(value);
    }
    for (auto& [name, tensor] : arrays) {
      if (!inputs.emplace(name, tensor).second) throw Error("input '" + name + "' is given twice");
    }
  }
  return inputs;
}

// Milliseconds.
struct Times {
  double mean, p50, p90, min;
};

Times Summarise(std::vector<double> milliseconds) {
  std::sort(milliseconds.begin(), milliseconds.end());
  const size_t count = milliseconds.size();
  const double total = std::accumulate(milliseconds.begin(), milliseconds.end(), 0.0);
  return {total / static_cast<double>(count), (milliseconds[(count - 1) / 2] + milliseconds[count / 2]) / 2,
          milliseconds[(count * 9 + 9) / 10 - 1], milliseconds[0]};
}

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::string ShapeText(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

// Prints the JSON document of --json. `load` is in milliseconds.
void PrintDocument(const Options& options, const std::vector<tvmflow::TensorSpec>& specs,
                   const std::vector<Tensor>& outputs, double load, const Times& times) {
  using Json = nlohmann::ordered_json;
  const auto round_to_nanoseconds = [](double milliseconds) { return std::round(milliseconds * 1e6) / 1e6; };
  Json document = {{"outputs", Json::object()},
                   {"output", options.output ? Json(*options.output) : Json()},
                   {"runs", options.repeat},
                   {"load_ms", round_to_nanoseconds(load)},
                   {"latency_ms", Json::object()}};
  for (size_t i = 0; i < outputs.size(); ++i) {
    document["outputs"][specs[i].name] = {
        {"shape", std::vector<int64_t>(outputs[i].shape().begin(), outputs[i].shape().end())},
        {"dtype", tvmflow::DtypeName(outputs[i].dtype())}};
  }
  const std::pair<const char*, double> latencies[] = {
      {"mean", times.mean}, {"p50", times.p50}, {"p90", times.p90}, {"min", times.min}};
  for (const auto& [name, milliseconds] : latencies) document["latency_ms"][name] = round_to_nanoseconds(milliseconds);
  // A path may hold bytes that are not UTF-8.
  std::printf("%s\n", document.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

// Runs the bundle and prints what the options ask for.
void Run(const Options& options) {
  const Clock::time_point start = Clock::now();
  std::optional<tvmflow::SignedRelease> release;
  if (options.release) release = {*options.release, *options.statement};
  Model model = Model::Open(options.bundle, options.threads, release);
  const double load = MillisecondsSince(start);
  const std::vector<Tensor> inputs =
      model.CheckInputs(options.inputs.empty() ? model.sample() : ReadInputs(options.inputs));
  for (int i = 0; i < options.warmup; ++i) model.Run(inputs);
  std::vector<Tensor> outputs;
  std::vector<double> milliseconds;
  for (int i = 0; i < options.repeat; ++i) {
    const Clock::time_point begin = Clock::now();
    outputs = model.Run(inputs);
    milliseconds.push_back(MillisecondsSince(begin));
  }
  const std::vector<tvmflow::TensorSpec>& specs = model.manifest().outputs;
  if (options.output) {
    Arrays arrays;
    for (size_t i = 0; i < outputs.size(); ++i) arrays.emplace_back("output_" + std::to_string(i), outputs[i]);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto has_name = [&](const auto& array) { return array.first == specs[i].name; };
      arrays.erase(std::remove_if(arrays.begin(), arrays.end(), has_name), arrays.end());
      arrays.emplace_back(specs[i].name, outputs[i]);
    }
    tvmflow::WriteNpz(*options.output, arrays);
  }
  const Times times = Summarise(milliseconds);
  if (options.json) {
    PrintDocument(options, specs, outputs, load, times);
    return;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::printf("%s: %s%s\n", specs[i].name.c_str(), tvmflow::DtypeName(outputs[i].dtype()).c_str(),
                ShapeText(outputs[i]).c_str());
  }
  std::printf("loaded in %.1f ms; %d run%s: mean %.3f ms, median %.3f ms, p90 %.3f ms, min %.3f ms\n", load,
              options.repeat, options.repeat > 1 ? "s" : "", times.mean, times.p50, times.p90, times.min);
  if (options.output) std::printf("written to %s\n", options.output->c_str());
}

// Prints a message as one printable line, whatever a damaged file has put into it.
void PrintError(const std::exception& error) {
  std::fprintf(stderr, "tvmflow-run: %s\n", tvmflow::Escape(error.what()).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    Run(ParseOptions(arguments));
    return 0;
  } catch (const UsageError& error) {
    PrintError(error);
    return 2;
  } catch (const std::exception& error) {
    PrintError(error);
    return 1;
  }
}
