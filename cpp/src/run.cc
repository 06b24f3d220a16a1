// `tvmflow-run`: runs a bundle on arrays of NumPy's files.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>

#include "json.h"
#include "tvmflow/model.h"

namespace {

using tvmflow::Arrays;
using tvmflow::Error;
using tvmflow::Model;
using tvmflow::Quoted;
using tvmflow::Tensor;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: tvmflow-run BUNDLE [--inputs IN.npz | --inputs NAME=IN.npy ...] [--output OUT.npz]\n"
    "                   [--repeat N] [--warmup N] [--threads N] [--json]\n"
    "\n"
    "Runs BUNDLE, a .tar.gz or the folder that it was unpacked into, verified first, and writes its outputs by name\n"
    "and as output_0, output_1, ... Without inputs it runs on the golden sample.\n"
    "\n"
    "  --inputs   arrays by input name, or one array for one input; may be repeated\n"
    "  --output   the file to write\n"
    "  --repeat   timed runs (1)\n"
    "  --warmup   runs before them that are not timed (0)\n"
    "  --threads  worker threads (TVM_NUM_THREADS, else the bundle's own as far as there are cores)\n"
    "  --json     print one JSON document\n";

// A mistake in how the command is called.
class UsageError : public Error {
 public:
  using Error::Error;
};

struct Options {
  std::string bundle;
  std::vector<std::string> inputs;
  std::optional<std::string> output;
  int repeat = 1;
  int warmup = 0;
  int threads = 0;
  bool json = false;
};

int Number(const std::string& option, const std::string& text, int least) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least) {
    throw UsageError(option + " is '" + text + "'; give a whole number of at least " + std::to_string(least));
  }
  return value;
}

Options Parse(const std::vector<std::string>& arguments) {
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
    static constexpr const char* kOptions[] = {"--inputs", "--output", "--repeat", "--warmup", "--threads"};
    if (std::find(std::begin(kOptions), std::end(kOptions), option) == std::end(kOptions)) {
      throw UsageError("there is no option '" + option + "'; see --help");
    }
    if (!value) {
      if (i + 1 == arguments.size()) throw UsageError(option + " lacks its value; see --help");
      value = arguments[++i];
    }
    if (option == "--inputs") options.inputs.push_back(*value);
    if (option == "--output") options.output = *value;
    if (option == "--repeat") options.repeat = Number(option, *value, 1);
    if (option == "--warmup") options.warmup = Number(option, *value, 0);
    if (option == "--threads") options.threads = Number(option, *value, 1);
  }
  if (options.bundle.empty()) throw UsageError("no bundle is given; see --help");
  return options;
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::map<std::string, Tensor> ReadInputs(const std::vector<std::string>& places) {
  std::map<std::string, Tensor> inputs;
  for (const std::string& place : places) {
    Arrays arrays;
    const size_t equals = place.find('=');
    if (equals != std::string::npos && !EndsWith(place, ".npz")) {
      arrays.emplace_back(place.substr(0, equals), tvmflow::ReadNpy(place.substr(equals + 1)));
    } else {
      arrays = tvmflow::ReadNpz(place);
    }
    for (auto& [name, tensor] : arrays) {
      if (!inputs.emplace(name, tensor).second) throw Error("input '" + name + "' is given twice");
    }
  }
  return inputs;
}

struct Times {
  double mean, p50, p90, min;
};

Times Summary(std::vector<double> milliseconds) {
  std::sort(milliseconds.begin(), milliseconds.end());
  const size_t count = milliseconds.size();
  const double total = std::accumulate(milliseconds.begin(), milliseconds.end(), 0.0);
  return {total / static_cast<double>(count), (milliseconds[(count - 1) / 2] + milliseconds[count / 2]) / 2,
          milliseconds[(count * 9 + 9) / 10 - 1], milliseconds[0]};
}

double Milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

std::string Shape(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

void Run(const Options& options) {
  const Clock::time_point start = Clock::now();
  Model model = Model::Open(options.bundle, options.threads);
  const double load = Milliseconds(start);
  const std::vector<Tensor> inputs =
      model.CheckInputs(options.inputs.empty() ? model.sample() : ReadInputs(options.inputs));
  for (int i = 0; i < options.warmup; ++i) model.Run(inputs);
  std::vector<Tensor> outputs;
  std::vector<double> milliseconds;
  for (int i = 0; i < options.repeat; ++i) {
    const Clock::time_point begin = Clock::now();
    outputs = model.Run(inputs);
    milliseconds.push_back(Milliseconds(begin));
  }
  const std::vector<tvmflow::TensorSpec>& specs = model.manifest().outputs;
  if (options.output) {
    Arrays arrays;
    for (size_t i = 0; i < outputs.size(); ++i) arrays.emplace_back("output_" + std::to_string(i), outputs[i]);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto same = [&](const auto& item) { return item.first == specs[i].name; };
      arrays.erase(std::remove_if(arrays.begin(), arrays.end(), same), arrays.end());
      arrays.emplace_back(specs[i].name, outputs[i]);
    }
    tvmflow::WriteNpz(*options.output, arrays);
  }
  const Times times = Summary(milliseconds);
  if (options.json) {
    std::string shapes;
    for (size_t i = 0; i < outputs.size(); ++i) {
      shapes += (i ? ", " : "") + Quoted(specs[i].name) + ": {\"shape\": " + Shape(outputs[i]) + ", \"dtype\": " +
                Quoted(tvmflow::DtypeName(outputs[i].dtype())) + "}";
    }
    std::printf(
        "{\"outputs\": {%s}, \"output\": %s, \"runs\": %d, \"load_ms\": %.3f, "
        "\"latency_ms\": {\"mean\": %.6f, \"p50\": %.6f, \"p90\": %.6f, \"min\": %.6f}}\n",
        shapes.c_str(), options.output ? Quoted(*options.output).c_str() : "null", options.repeat, load, times.mean,
        times.p50, times.p90, times.min);
    return;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::printf("%s: %s%s\n", specs[i].name.c_str(), tvmflow::DtypeName(outputs[i].dtype()).c_str(),
                Shape(outputs[i]).c_str());
  }
  std::printf("loaded in %.1f ms; %d run%s: mean %.3f ms, median %.3f ms, p90 %.3f ms, min %.3f ms\n", load,
              options.repeat, options.repeat > 1 ? "s" : "", times.mean, times.p50, times.p90, times.min);
  if (options.output) std::printf("written to %s\n", options.output->c_str());
}

// A message on one line of text, whatever a damaged file has put into it.
void Say(const std::exception& error) {
  const std::string message = error.what();
  const bool utf8 = tvmflow::IsUtf8(message);
  std::string line;
  for (char byte : message) {
    const auto code = static_cast<unsigned char>(byte);
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\x%02x", code);
    line += code < 0x20 || code == 0x7F || (code >= 0x80 && !utf8) ? escape : std::string(1, byte);
  }
  std::fprintf(stderr, "tvmflow-run: %s\n", line.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    Run(Parse(arguments));
    return 0;
  } catch (const UsageError& error) {
    Say(error);
    return 2;
  } catch (const std::exception& error) {
    Say(error);
    return 1;
  }
}
